"""The peers of bench/family_step.py, each a process like those of bench/step.py.

Sequences of text have the case's length, so that a peer's batch has no padding. Pairs and sentences to tag have
different lengths, and a peer pads them to the longest of the batch.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from step_peers import (
    Case,
    Stepper,
    engine_loop,
    import_optimizers,
    num_masked,
    peer_process,
    plain_loop,
    reset_peak_memory,
    transformers_model,
)

BLANK, END, FIRST = 0, 0, 5
_TARGET_SHARE = 0.5
"""Length of a CTC target in terms of its source's."""
LABELS = 9
"""As of the named entities of CoNLL-2003: four kinds, of which a word begins or continues one, and none."""
LSTM_WIDTH = 200
"""Units of the tagger in each direction."""
SOURCES, TARGETS, SENTENCES = (4, 16), (1, 8), (4, 28)
"""Tokens of the shortest and of the longest source and target of a pair, and sentence to tag."""


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


def pairs_of(case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the sources and targets of pairs, int64 each, without end tokens."""
    rng = np.random.default_rng(case["seed"])
    sources, targets = (
        _of_lengths(case["sequences"], bounds, case["vocabulary"], rng) for bounds in (SOURCES, TARGETS)
    )
    return list(zip(sources, targets, strict=True))


def sentences_of(case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the words of sentences, a token each, and their labels, int64 both."""
    rng = np.random.default_rng(case["seed"])
    sentences = _of_lengths(case["sequences"], SENTENCES, case["vocabulary"], rng)
    return [(words, rng.integers(0, LABELS, len(words))) for words in sentences]


def _of_lengths(count: int, bounds: tuple[int, int], vocabulary: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Return texts of random tokens whose lengths are spread evenly, in random order."""
    lengths = rng.permutation(np.linspace(*bounds[::-1], count).round().astype(np.int64))
    return [rng.integers(FIRST, vocabulary, length) for length in lengths]


def lengths_of(case: Case) -> np.ndarray:
    """Return int64 (B,), the tokens that are read of each sequence, sentence or pair; of a pair both sides, the end
    token before each included."""
    match case["objective"]:
        case "completion":
            return np.array([2 + len(source) + len(target) for source, target in pairs_of(case)])
        case "tagging":
            return np.array([len(words) for words, _ in sentences_of(case)])
    return np.full(case["sequences"], case["length"])


def ours(case: Case) -> Stepper:
    """Return a function that runs a step of our engine on one rank, or of fine-tuning."""
    if case["objective"] == "tagging":
        return _our_tagger(case)
    return engine_loop(case, _pairs_batch if case["objective"] == "completion" else _batch_of)


def _our_tagger(case: Case) -> Stepper:
    """A step of `multihop.eval.finetune.loop.finetune`, whose batch is collated in each step."""
    from multihop.eval.config import Features, TrialSettings
    from multihop.eval.finetune.heads import TaskModel
    from multihop.eval.finetune.inputs import Encoded
    from multihop.eval.finetune.labeled import TargetScale, loss_of
    from multihop.eval.finetune.loop import parameter_groups
    from multihop.eval.tasks.task import Task
    from multihop.pretrain.models.build import build_model, init_weights
    from multihop.pretrain.models.families import parse_model_config
    from multihop.pretrain.optim.norms import clip_grad_norm_
    from multihop.pretrain.packed_tokens import cumulative_lengths, positions_in
    from multihop.pretrain.uncompiled import AdamW

    sentences = sentences_of(case)
    words, labels = (np.concatenate([each[side] for each in sentences]) for side in (0, 1))
    bounds, each_one = cumulative_lengths(lengths_of(case)), np.arange(len(sentences) + 1)
    lengths, positions = np.diff(bounds).astype(np.int32), positions_in(bounds).astype(np.int32)
    examples = Encoded(
        words.astype(np.int32), bounds, lengths, each_one, positions, bounds, labels.astype(np.float64), bounds
    )
    scale, batch = TargetScale.of(examples), each_one[:-1]
    task = Task("bench", "tagging", "accuracy", True, "random labels", tuple(map(str, range(LABELS))))
    features = Features(layers=[0], head="bilstm_crf", lstm_width=LSTM_WIDTH)
    build_model(parse_model_config(case["model"]), 1)  # imports its module
    reset_peak_memory()
    encoder = build_model(parse_model_config(case["model"]), case["vocabulary"])
    init_weights(encoder, 1)
    model = TaskModel(encoder, task, seed=1, features=features).train()
    optimizer = AdamW(parameter_groups(model, TrialSettings(), []), lr=1e-4, fused=True)

    def step() -> None:
        loss = loss_of(model, examples, batch, scale)
        loss.item()
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()

    return step


def _pairs_batch(case: Case) -> Any:
    from multihop.pretrain.objectives.batch import Batch
    from multihop.pretrain.packed_tokens import pack_sequences

    pairs = pairs_of(case)
    packed = pack_sequences([np.array([END, *source, END, *target]) for source, target in pairs])
    labels = np.concatenate([[*target, END] for _, target in pairs])
    predicting = [
        np.arange(stop - len(target) - 1, stop) for stop, (_, target) in zip(packed.cu_seqlens[1:], pairs, strict=True)
    ]
    inputs = {"packed": packed, "labels": labels, "predicting_positions": np.concatenate(predicting)}
    return Batch(inputs, labels, {"completion": labels.size}, packed.input_ids.size)


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
    """Return a function that runs a step of the same model in a plain loop: of torch's modules, or transformers' XLNet
    or GPT-2."""
    if case["objective"] in _OTHER_PEERS:
        return _OTHER_PEERS[case["objective"]](case)

    import torch
    from plain_families import PlainAwdLstm, PlainBag, PlainBilm, PlainCtc

    from multihop.pretrain.models.families import parse_model_config

    import_optimizers()
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
            clips = None if sizes.cell_clip is None else (sizes.cell_clip, sizes.projection_clip)
            model = PlainBilm(vocabulary, sizes.layers, sizes.hidden // 2, sizes.lstm_width, sizes.dropout, clips)
        case "ctc":
            model = PlainCtc(vocabulary, sizes.layers, sizes.hidden, sizes.dropout, BLANK)
            arrays["labels"] = ctc_targets(case)
    return plain_loop(case, model, arrays, lambda loss: loss)


def _xlnet(case: Case) -> Stepper:
    import torch

    model = transformers_model(case, {"pad": 0, "cls": 2, "sep": 3, "unk": 1, "mask": 4})
    ids, _, masked = texts_of(case)
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


def _gpt2(case: Case) -> Stepper:
    """A step of transformers' GPT-2 over padded pairs, whose labels are -100 on the source and the padding."""
    model = transformers_model(case, {"end": END})
    pairs = pairs_of(case)
    rows = [np.array([END, *source, END, *target, END]) for source, target in pairs]
    labels = [np.array([*[-100] * (2 + len(source)), *target, END]) for source, target in pairs]
    arrays = {
        "input_ids": _padded(rows, END),
        "attention_mask": _padded([np.ones_like(row) for row in rows], 0),
        "labels": _padded(labels, -100),
    }
    return plain_loop(case, model, arrays, lambda out: out.loss)


def _plain_tagger(case: Case) -> Stepper:
    import torchcrf  # noqa: F401
    from plain_families import PlainTagger

    from multihop.eval.finetune.heads import LSTM_DEPTH
    from multihop.pretrain.models.families import parse_model_config

    import_optimizers()
    reset_peak_memory()
    sizes: Any = parse_model_config(case["model"])
    model = PlainTagger(case["vocabulary"], sizes.hidden, LSTM_DEPTH, LSTM_WIDTH, LABELS, sizes.dropout)
    words, labels = zip(*sentences_of(case), strict=True)
    return plain_loop(case, model, {"ids": _padded(words, 0), "labels": _padded(labels, -1)}, lambda loss: loss)


_OTHER_PEERS = {"plm": _xlnet, "completion": _gpt2, "tagging": _plain_tagger}


def _padded(rows: Sequence[np.ndarray], filling: int) -> np.ndarray:
    longest = max(map(len, rows))
    return np.stack([np.pad(row, (0, longest - len(row)), constant_values=filling) for row in rows])


PEERS = {"ours": ours, "peer": peer}


if __name__ == "__main__":
    peer_process(sys.argv[1], PEERS)
