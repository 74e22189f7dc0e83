"""The peers of bench/translation_step.py, each a process like those of bench/step.py."""

import sys
from typing import Any

import numpy as np
from step_peers import (
    Case,
    Stepper,
    engine_loop,
    import_optimizers,
    lengths_of,
    peer_process,
    plain_loop,
    reset_peak_memory,
)

PAD, END, FIRST = 0, 1, 3
SMOOTHING = 0.1
_RATIO = 0.2
"""Standard deviation of the ratio of a target's length to its source's."""


def lengths_of_pairs(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of the sources and of the targets, int64 (S,) each, end tokens included.

    Those of the sources are spread as in bench/step.py. The targets have the same lengths, so that both sides have the
    same padding; long targets mostly belong to long sources.
    """
    sources = lengths_of(case)
    rank = sources * np.random.default_rng(case["seed"] + 1).normal(1.0, _RATIO, len(sources))
    targets = np.empty_like(sources)
    targets[rank.argsort()] = np.sort(sources)
    return sources, targets


def pairs_of(case: Case) -> list[tuple[list[int], list[int]]]:
    """Return pairs of random tokens, with an end token on each side."""
    rng = np.random.default_rng(case["seed"])
    return [
        tuple([*rng.integers(FIRST, case["vocabulary"], length - 1).tolist(), END] for length in pair)
        for pair in zip(*lengths_of_pairs(case), strict=True)
    ]


def ours(case: Case) -> Stepper:
    """Return a function that runs a step of our engine on one rank."""
    return engine_loop(case, _batch_of)


def _batch_of(case: Case) -> Any:
    from multihop.pretrain.objectives.batch import Batch
    from multihop.pretrain.packed_tokens import cumulative_lengths, pack, pack_sequences

    pairs = pairs_of(case)
    source = pack_sequences([pair[0] for pair in pairs])
    labels = np.concatenate([pair[1] for pair in pairs])
    cu_seqlens = cumulative_lengths([len(pair[1]) for pair in pairs])
    input_ids = np.roll(labels, 1)
    input_ids[cu_seqlens[:-1]] = PAD
    inputs = {
        "source": source,
        "target": pack(input_ids, cu_seqlens),
        "labels": labels,
        "label_smoothing": SMOOTHING,
    }
    return Batch(inputs, labels, {"translation": len(labels)}, len(source.input_ids) + len(labels))


def marian_config(sizes: Any, vocabulary: int) -> Any:
    """Return the MarianConfig of the same model; `sizes` is its model section."""
    import transformers

    return transformers.MarianConfig(
        vocab_size=vocabulary,
        d_model=sizes.hidden,
        encoder_layers=sizes.layers,
        decoder_layers=sizes.layers,
        encoder_attention_heads=sizes.heads,
        decoder_attention_heads=sizes.heads,
        encoder_ffn_dim=sizes.intermediate,
        decoder_ffn_dim=sizes.intermediate,
        max_position_embeddings=sizes.max_positions,
        dropout=sizes.dropout,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=PAD,
    )


def hugging_face(case: Case) -> Stepper:
    """Return a function that does the work of `transformers.Trainer` between batches, on a batch of its collator."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers.trainer_pt_utils import LabelSmoother

    from multihop.pretrain.models.families import parse_model_config

    words = Tokenizer(WordLevel({"<pad>": PAD, "</s>": END}, unk_token="</s>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    sizes = parse_model_config(case["model"])
    config = marian_config(sizes, case["vocabulary"])
    model_class = transformers.MarianMTModel  # imports its module
    import_optimizers()
    reset_peak_memory()
    model = model_class(config)
    collate = transformers.DataCollatorForSeq2Seq(tokenizer, model=model)
    batch = dict(collate([{"input_ids": source, "labels": target} for source, target in pairs_of(case)]))
    labels, smoothed = batch.pop("labels"), LabelSmoother(epsilon=SMOOTHING)
    inputs = {name: tensor.numpy() for name, tensor in batch.items()}
    return plain_loop(case, model, inputs, lambda out: smoothed(out, labels.to(out.logits.device)))


def torch_lstm(case: Case) -> Stepper:
    """Return a function that runs a step of torch's own LSTM in a plain loop, on the same padded batch."""
    import torch
    from plain_lstm import PlainLSTM

    from multihop.pretrain.models.families import parse_model_config

    import_optimizers()
    reset_peak_memory()
    sizes = parse_model_config(case["model"])
    attends, feeds = sizes.attention != "none", bool(sizes.input_feeding)
    model = PlainLSTM(case["vocabulary"], sizes.layers, sizes.hidden, sizes.dropout, attends, feeds, SMOOTHING)
    pairs = pairs_of(case)
    sources, labels = (_padded([pair[side] for pair in pairs], filling) for side, filling in ((0, PAD), (1, -100)))
    lengths = torch.tensor([len(source) for source, _ in pairs])
    given = np.roll(np.where(labels < 0, PAD, labels), 1, 1)
    given[:, 0] = PAD

    class Given(torch.nn.Module):
        """Passes the lengths to the model; they stay on the CPU."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
            return self.model(lengths=lengths, **inputs)

    return plain_loop(case, Given(), {"sources": sources, "inputs": given, "labels": labels}, lambda loss: loss)


def _padded(rows: list[list[int]], filling: int) -> np.ndarray:
    longest = max(map(len, rows))
    return np.array([[*row, *[filling] * (longest - len(row))] for row in rows])


PEERS = {"ours": ours, "hugging_face": hugging_face, "torch_lstm": torch_lstm}


if __name__ == "__main__":
    peer_process(sys.argv[1], PEERS)
