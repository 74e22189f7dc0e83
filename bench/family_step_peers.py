"""The peers of bench/family_step.py, each a process like those of bench/step.py.

All sequences have the case's length, so that a peer's batch has no padding.
"""

import sys
from typing import Any

import numpy as np
from step_peers import Case, Stepper, engine_loop, num_masked, peer_process, plain_loop, reset_peak_memory

BLANK, FIRST = 0, 5
_TARGET_SHARE = 0.5
"""Length of a CTC target in terms of its source's."""


def texts_of(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens int64 (B, T), those that follow them, and which positions are masked, int64 (B, M), ascending."""
    rng, shape = np.random.default_rng(case["seed"]), (case["sequences"], case["length"] + 1)
    tokens = rng.integers(FIRST, case["vocabulary"], shape)
    masked = [np.sort(rng.choice(case["length"], num_masked(case, case["length"]), replace=False)) for _ in tokens]
    return tokens[:, :-1], tokens[:, 1:], np.stack(masked)


def ctc_targets(case: Case) -> np.ndarray:
    """Return targets int64 (B, U), in which no token follows itself."""
    rng, length = np.random.default_rng(case["seed"] + 1), round(_TARGET_SHARE * case["length"])
    steps = rng.integers(1, case["vocabulary"] - FIRST, (case["sequences"], length))
    return FIRST + steps.cumsum(1) % (case["vocabulary"] - FIRST)


def ours(case: Case) -> Stepper:
    """Return a function that runs a step of our engine on one rank."""
    return engine_loop(case, _batch_of)


def _batch_of(case: Case) -> Any:
    from multihop.pretrain.objectives.batch import Batch
    from multihop.pretrain.packed_tokens import cumulative_lengths, pack

    ids, following, masked = texts_of(case)
    flat, cu_seqlens = ids.ravel(), cumulative_lengths([case["length"]] * case["sequences"])
    at = (masked + cu_seqlens[:-1, None]).ravel()
    inputs: dict[str, Any] = {"packed": pack(flat, cu_seqlens)}
    match case["objective"]:
        case "clm":
            inputs["labels"], count = following.ravel(), flat.size
        case "mlm":
            inputs |= {"masked_positions": at, "labels": flat[at]}
            count = len(at)
        case "bilm":
            inputs["next_positions"] = np.delete(np.arange(flat.size), cu_seqlens[1:] - 1)
            count = 2 * len(inputs["next_positions"])
        case "plm":
            order = np.full(flat.size, -1)
            order[at] = np.tile(np.arange(masked.shape[1]), len(ids))
            types = np.zeros(flat.size, np.int64)
            inputs = {"packed": pack(flat, cu_seqlens, types), "factorization_order": order}
            inputs |= {"masked_positions": at, "labels": flat[at]}
            count = len(at)
        case "ctc":
            targets = ctc_targets(case)
            target = pack(targets.ravel(), cumulative_lengths([targets.shape[1]] * len(targets)))
            inputs, count = {"source": inputs["packed"], "target": target, "blank": BLANK}, targets.size
    return Batch(inputs, np.empty(0, np.int64), {case["objective"]: count}, flat.size)


def peer(case: Case) -> Stepper:
    """Return a function that runs a step of the same model in a plain loop: of torch's modules, or transformers'
    XLNet."""
    import torch
    from plain_families import PlainAwdLstm, PlainBag, PlainBilm, PlainCtc

    from multihop.pretrain.models.families import parse_model_config

    reset_peak_memory()
    sizes: Any = parse_model_config(case["model"])
    ids, following, masked = texts_of(case)
    vocabulary, arrays = case["vocabulary"], {"ids": ids}
    model: torch.nn.Module
    match case["objective"]:
        case "clm":
            model = PlainAwdLstm(vocabulary, sizes.state_widths, sizes.model_dump(), sizes.alpha, sizes.beta)
            arrays["labels"] = following
        case "mlm":
            model = PlainBag(vocabulary, sizes.hidden, sizes.window, sizes.dropout)
            labels = np.full(ids.shape, -100)
            np.put_along_axis(labels, masked, np.take_along_axis(ids, masked, 1), 1)
            arrays["labels"] = labels
        case "bilm":
            model = PlainBilm(vocabulary, sizes.layers, sizes.hidden // 2, sizes.lstm_width, sizes.dropout)
        case "ctc":
            model = PlainCtc(vocabulary, sizes.layers, sizes.hidden, sizes.dropout, BLANK)
            arrays["labels"] = ctc_targets(case)
        case "plm":
            return _xlnet(case, sizes, ids, masked)
    return plain_loop(case, model, arrays, lambda loss: loss)


def _xlnet(case: Case, sizes: Any, ids: np.ndarray, masked: np.ndarray) -> Stepper:
    import torch
    import transformers

    from multihop.pretrain.checkpoint.huggingface_config import config_json

    described = config_json(sizes, case["vocabulary"], {"pad": 0, "cls": 2, "sep": 3, "unk": 1, "mask": 4})
    model = transformers.XLNetLMHeadModel(transformers.AutoConfig.for_model(**described))
    order = np.full(ids.shape, -1)
    np.put_along_axis(order, masked, np.broadcast_to(np.arange(masked.shape[1]), masked.shape), 1)
    hides = ~((order[:, None] < order[:, :, None]) | (order[:, None] < 0))
    mapping = (np.arange(ids.shape[1]) == masked[:, :, None]).astype(np.float32)
    arrays = {"input_ids": ids, "perm_mask": hides.astype(np.float32), "target_mapping": mapping}
    labels = torch.from_numpy(np.take_along_axis(ids, masked, 1)).flatten()

    def loss_of(out: Any) -> torch.Tensor:
        logits = out.logits.flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels.to(logits.device))

    return plain_loop(case, model, arrays, loss_of)


PEERS = {"ours": ours, "peer": peer}


if __name__ == "__main__":
    peer_process(sys.argv[1], PEERS)
