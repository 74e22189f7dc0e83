"""Hashes of a rank's batches: samples, masks and segments are equal if their hashes are."""

import hashlib
import typing

import numpy as np
from kinds_of_families import TRAINED_WITH, model_section

from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import RankBatch
from multihop.pretrain.packed_tokens import PackedTokens

Weights = tuple[float, ...] | None


def config_of(
    objective: str, phases: list[dict[str, typing.Any]], weights: Weights = None, **rules: typing.Any
) -> TrainingConfig:
    name, *changes = objective.split()
    rules |= {"mem_len": 9} if "memory" in changes else {}
    return TrainingConfig.model_validate(
        {
            "seed": 5,
            "data": {"sources": [{"path": "texts", "weight": weight} for weight in weights or [None]]},
            "model": model_section(TRAINED_WITH[name], layers=1, hidden=8, heads=1, max_positions=64),
            "objective": {"name": name, "isolate_documents": "isolated" in changes, **rules},
            "phases": phases,
            "engine": {"heldout_samples": 11},
        }
    )


def sequences_of(packed: PackedTokens[typing.Any]) -> list[typing.Any]:
    return np.split(packed.input_ids, packed.cu_seqlens[1:-1])


def sequence_hashes(step: RankBatch) -> list[str]:
    """Return a hash for each sequence of a rank's step, in order, over all that the model gets of it."""
    found, samples = [], 0
    for batch in step.micro_batches:
        if not batch.tokens:  # borrowed
            assert len(batch.targets) == 0 and not any(batch.counts.values())
            continue
        inputs: dict[str, typing.Any] = batch.inputs
        packed = inputs["packed"]
        cu_seqlens = packed.cu_seqlens
        remembered = int(np.sum(inputs.get("is_memory", 0)))
        assert batch.tokens == len(packed.input_ids) - remembered == cu_seqlens[-1] - remembered
        assert packed.max_seqlen == np.diff(cu_seqlens).max()
        by_token = {name: getattr(packed, name) for name in ("input_ids", "positions", "token_type_ids")}
        seen = inputs | {name: values for name, values in by_token.items() if values is not None}
        del seen["packed"]
        context = seen.pop("context", None)
        around = [] if context is None else [b"", *(each.tobytes() for each in sequences_of(context))]
        samples += batch.counts.get("nsp", batch.counts.get("sop", 0))
        for number, (start, stop) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
            digest = hashlib.sha256()
            masked = inputs.get("masked_positions")
            mine = None if masked is None else (masked >= start) & (masked < stop)
            for name, values in sorted(seen.items()):
                if name == "masked_positions":
                    part = values[mine] - start
                elif name == "next_positions":
                    part = values[(values >= start) & (values < stop)] - start
                elif name == "labels" and mine is not None:
                    part = values[mine]
                elif name in ("preceding", "following"):
                    part = values[number : number + 1]
                    digest.update(around[int(part[0])])
                    part = part > 0  # the numbers depend on the other samples of the micro-batch
                elif name in ("is_random_next", "is_swapped"):
                    part = values[number : number + 1]
                else:
                    assert len(values) == cu_seqlens[-1], name  # an input of another length needs a case above
                    part = values[start:stop]
                assert part.dtype in (np.int64, np.bool_)
                digest.update(name.encode() + np.ascontiguousarray(part).tobytes())
            found.append(digest.hexdigest())
    assert samples in (0, step.samples) and len(found) >= step.samples
    return found
