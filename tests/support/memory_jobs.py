"""A job of the ranks of a `RankPool`: the memory that steps of the real engine take, by torch's own accounting."""

import gc
from typing import Any

from live_bytes import LiveBytes
from torch.nn import functional

from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.engine.engine import Engine
from multihop.pretrain.engine.ranks import Ranks
from multihop.pretrain.models.build import build_model_on_meta, make_param_init
from multihop.pretrain.plan.assumed_batch import assumed_batch


def bytes_of_steps(
    ranks: Ranks, settings: dict[str, Any], vocab_size: int, samples: int, micro_batches: int
) -> dict[str, int]:
    """Return bytes between steps, and the peaks of the backward pass and of the update, as `trace_rank` does.

    Each is the smallest of three steps: a thread of gloo may release the tensors of a collective late, which adds to
    the next peak.
    """
    config = TrainingConfig.model_validate(settings)
    batches = [assumed_batch(config, 0, samples, vocab_size) for _ in range(micro_batches)]
    counts = {name: float(sum(batch.counts[name] for batch in batches)) for name in batches[0].counts}
    model = build_model_on_meta(config.model, vocab_size)
    found: dict[str, int] = {}
    linear = functional.linear

    def note(name: str, size: int) -> None:
        found[name] = min(size, found.get(name, size))

    gc.collect()
    with LiveBytes("cpu", 1) as live:
        engine = Engine(config, model, ranks, samples, make_param_init(model, 1))
        for step in range(4):
            if step == 1:  # the first step allocates what all later ones find
                found.clear()
            gc.collect()
            live.peak = live.bytes
            note("between", live.bytes)
            for batch in batches:
                engine.forward_backward(batch, counts)
            note("backward", live.peak)
            gc.collect()
            live.peak = live.bytes
            engine.step(1e-3)
            note("update", live.peak)
    engine.destroy()
    functional.linear = linear  # DeepSpeed replaces it in ZeRO stage 3
    return found
