"""A micro-batch of a recipe whose data is not prepared: random tokens, and samples as long as the phase allows."""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa

from multihop.data_prep.dataset.shards import Documents, list_array, shard_schema, write_shard
from multihop.data_prep.tokenizers.info import TokenizerInfo, pack_flags
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.objectives.objective import objective_of

_SPECIAL_TOKENS = ("pad", "unk", "cls", "sep", "mask", "end")
_SENTENCE = 2
"""Tokens of a sentence: samples of whole sentences are full but for fewer than these."""
_DOCUMENT = 16
"""Length of a document, in samples."""
_WORD = 2
"""Tokens of a word."""


def assumed_tokenizer(vocab_size: int) -> TokenizerInfo:
    """A tokenizer of this size with the special tokens of all objectives."""
    starts = np.arange(vocab_size) % _WORD == 0
    starts[: len(_SPECIAL_TOKENS)] = False
    special_ids = {name: number for number, name in enumerate(_SPECIAL_TOKENS)}
    return TokenizerInfo(
        kind="unigram", vocab_size=vocab_size, sha256="", special_ids=special_ids, word_start=pack_flags(starts)
    )


def assumed_batch(config: TrainingConfig, phase: int, samples: int, vocab_size: int) -> Batch:
    """A micro-batch of a phase.

    Args:
        samples: number of samples, or of pairs.
    """
    seq_len, objective = config.phases[phase].seq_len, objective_of(config.objective)
    with tempfile.TemporaryDirectory() as folder:
        if config.objective.needs.reads_pairs:
            documents = _write(Path(folder), np.tile(_sides(config, seq_len), (samples, 1)), vocab_size)
        else:
            sentences, number = _DOCUMENT * seq_len // _SENTENCE, 3 + 2 * samples // _DOCUMENT
            documents = _write(Path(folder), np.full((number, sentences), _SENTENCE), vocab_size)
        index = objective.build_index(documents, seq_len, 0, config.objective)
        rows = objective.sample_rows(index, np.arange(objective.sample_count(index, seq_len)), seq_len)
        tokens = [
            sum(stop - start for _, start, stop in objective.spans(documents, row, seq_len, config.objective))
            for row in rows
        ]
        rows = rows[np.argsort(tokens, kind="stable")[-samples:]]
        keys = np.arange(samples, dtype=np.uint64)
        return objective.collate(documents, rows, keys, seq_len, assumed_tokenizer(vocab_size), config.objective)


def _sides(config: TrainingConfig, seq_len: int) -> list[int]:
    """Tokens of the source and of the target of a pair, without special tokens."""
    if not FAMILIES[config.model.family].translates:  # one sequence has both, and two special tokens
        return [(seq_len - 2) // 2] * 2
    if config.objective.needs.target_fits_source:
        return [seq_len - 1, seq_len // 2]
    return [seq_len - 1] * 2


def _write(folder: Path, lengths: np.ndarray, vocab_size: int) -> Documents:
    """Documents of sentences, or pairs of sides, of these numbers of tokens, int64 (documents, sentences)."""
    generator, schema = np.random.default_rng(0), shard_schema("uint32")
    documents = len(lengths)
    ends = lengths.cumsum(axis=1)
    tokens = generator.integers(len(_SPECIAL_TOKENS), vocab_size, int(lengths.sum()), dtype=np.uint32)
    columns = [
        pa.array(np.arange(documents), pa.uint64()),
        pa.array(np.zeros(documents), pa.uint16()),
        list_array(np.append(0, ends[:, -1].cumsum()), tokens, schema.field("tokens").type),
        list_array(np.arange(documents + 1) * lengths.shape[1], ends.ravel(), schema.field("sentence_ends").type),
    ]
    write_shard(folder / "assumed.arrow", [pa.RecordBatch.from_arrays(columns, schema=schema)])
    return Documents([folder / "assumed.arrow"])
