"""The stage that encodes the selected documents or pairs of a split as rows of a shard."""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from multihop.common.machine import raise_mmap_threshold
from multihop.data_prep.config import DataConfig
from multihop.data_prep.dataset.shards import list_array, shard_schema, token_dtype
from multihop.data_prep.pipeline.select_documents import selection_key
from multihop.data_prep.pipeline.train_tokenizer import PreparedTokenizers
from multihop.data_prep.rules.pairs import split_sides
from multihop.data_prep.stages.documents import Selection, heldout_mask, read_documents
from multihop.data_prep.stages.outputs import Output, stage_key, write_batches, write_once
from multihop.data_prep.stages.runner import StageRunner
from multihop.data_prep.tokenizers.info import TOKENIZER
from multihop.data_prep.tokenizers.tokenizer import Tokenizer, load


@dataclass(frozen=True)
class EncodeSplit:
    """Encode one split's documents."""

    key: str
    folder: str
    selection: Selection
    heldout_fraction: float
    model: str
    languages: tuple[str, ...]
    """ISO 639 code of each source."""
    target_model: str | None = None
    """Path of the tokenizer of the target sides of pairs, which may be `model`; None: the split has documents."""


def encode_splits(
    work: Path, selections: list[Selection], tokenizers: PreparedTokenizers, data: DataConfig, runner: StageRunner
) -> list[Output]:
    """Run the stage "encode"; returns the outputs of `encode_split` in the order of the splits."""
    items = [_encode_item(work, selection, tokenizers, data) for selection in selections]
    return runner.outputs("encode", encode_split, items)


def encode_split(item: EncodeSplit) -> Output:
    """Encode a split's documents or pairs into an Arrow file of `shard_schema`.

    Train and held-out documents are in separate batches. Metadata: "batches", a list with split, documents, sentences,
    tokens, text_bytes and bytes of each; "no tokens", the number of documents without a token.
    """
    raise_mmap_threshold()
    tokenizer = _load(item.model)
    target = tokenizer if item.target_model is None else _load(item.target_model)
    schema = shard_schema(token_dtype(max(tokenizer.vocab_size, target.vocab_size)))
    metadata: dict[str, Any] = {"batches": [], "no tokens": 0}

    def batches() -> Iterator[pa.RecordBatch]:
        for documents in read_documents(item.selection.path, item.selection.dropped):
            held = heldout_mask(documents.column("second").to_numpy(), item.heldout_fraction)
            for split, rows in (("train", ~held), ("heldout", held)):
                chosen = documents.filter(pa.array(rows))
                if item.target_model is None:
                    batch, text_bytes = encode_documents(chosen, tokenizer, item.languages, schema)
                else:
                    batch, text_bytes = encode_pairs(chosen, tokenizer, target, schema)
                metadata["no tokens"] += chosen.num_rows - batch.num_rows
                if batch.num_rows:
                    metadata["batches"].append(
                        {
                            "split": split,
                            "documents": batch.num_rows,
                            "sentences": len(batch.column("sentence_ends").values),
                            "tokens": len(batch.column("tokens").values),
                            "text_bytes": text_bytes,
                            "bytes": batch.nbytes,
                        }
                    )
                    yield batch

    def write(path: Path) -> dict[str, Any]:
        write_batches(path, schema, batches(), None)
        return metadata

    folder = Path(item.folder)
    return write_once(folder / f"{item.key}.json", folder / f"{item.key}.arrow", write)


def encode_documents(
    documents: pa.RecordBatch, tokenizer: Tokenizer, languages: Sequence[str], schema: pa.Schema
) -> tuple[pa.RecordBatch, int]:
    """Encode documents as rows of `schema`; a document without a token has no row.

    Args:
        documents: a batch of `multihop.data_prep.stages.documents.SCHEMA`.
        languages: ISO 639 code of each source.

    Returns:
        The rows, and the UTF-8 bytes of all sentences.
    """
    texts, sources = (documents.column(name).to_pylist() for name in ("text", "source"))
    per_document = [tokenizer.split(text, languages[source]) for text, source in zip(texts, sources, strict=True)]
    sentences = list(chain.from_iterable(per_document))
    document_of = np.repeat(np.arange(len(per_document)), [len(some) for some in per_document])
    ids, lengths = tokenizer.encode(sentences)
    values = ids.astype(schema.field("tokens").type.value_type.to_pandas_dtype())

    tokens = np.bincount(document_of, weights=lengths, minlength=len(per_document)).astype(np.int64)
    token_offsets = np.concatenate([[0], np.cumsum(tokens)])
    nonempty = lengths > 0  # a sentence without tokens has no end
    ends = (np.cumsum(lengths) - token_offsets[document_of])[nonempty]
    ends_per_document = np.bincount(document_of[nonempty], minlength=len(per_document))
    end_offsets = np.concatenate([[0], np.cumsum(ends_per_document)])

    columns = [
        documents.column("first"),
        documents.column("source"),
        list_array(token_offsets, values, schema.field("tokens").type),
        list_array(end_offsets, ends.astype(np.uint32), schema.field("sentence_ends").type),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    if not tokens.all():
        batch = batch.filter(pa.array(tokens > 0))
    return batch, len("".join(sentences).encode())


def encode_pairs(
    documents: pa.RecordBatch, source: Tokenizer, target: Tokenizer, schema: pa.Schema
) -> tuple[pa.RecordBatch, int]:
    """Encode pairs as rows of `schema`; a pair with a side without a token has no row.

    `tokens` are those of the source side and then those of the target side, and `sentence_ends` the number of the
    former and of both.

    Args:
        documents: a batch of `multihop.data_prep.stages.documents.SCHEMA`.

    Returns:
        The rows, and the UTF-8 bytes of all sides.
    """
    pairs = [split_sides(text) for text in documents.column("text").to_pylist()]
    sides = [tokenizer.encode([pair[side] for pair in pairs]) for side, tokenizer in enumerate((source, target))]
    lengths = np.stack([lengths for _, lengths in sides], axis=1)  # (pairs, 2)
    starts = np.concatenate([[0], np.cumsum(lengths)])  # of each side among all tokens, and the end
    tokens = np.empty(starts[-1], schema.field("tokens").type.value_type.to_pandas_dtype())
    for side, (ids, side_lengths) in enumerate(sides):
        within = np.concatenate([[0], np.cumsum(side_lengths)[:-1]]) if len(side_lengths) else side_lengths
        tokens[np.arange(len(ids)) + np.repeat(starts[side:-1:2] - within, side_lengths)] = ids
    ends = np.cumsum(lengths, axis=1).astype(np.uint32)
    columns = [
        documents.column("first"),
        documents.column("source"),
        list_array(starts[::2], tokens, schema.field("tokens").type),
        list_array(np.arange(0, 2 * len(ends) + 1, 2), ends.ravel(), schema.field("sentence_ends").type),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    if not lengths.all():
        batch = batch.filter(pa.array((lengths > 0).all(axis=1)))
    return batch, len("".join(side for pair in pairs for side in pair).encode())


@lru_cache(maxsize=2)
def _load(model: str) -> Tokenizer:
    """Keep the tokenizer, with its cache of words, from split to split."""
    return load(model)


def _encode_item(work: Path, selection: Selection, tokenizers: PreparedTokenizers, data: DataConfig) -> EncodeSplit:
    first, *others = tokenizers.outputs
    languages = tuple(source.language for source in data.sources)
    library = "sentencepiece" if tokenizers.source.file == TOKENIZER else "tokenizers"
    depends_on = [
        selection_key(selection), first.sha256, data.heldout_fraction, languages, unicodedata.unidata_version
    ]  # fmt: skip
    if data.holds_pairs:
        depends_on += ["pairs", *(other.sha256 for other in others)]
    key = stage_key("encode", [library, "sentencex"], *depends_on)
    target = tokenizers.outputs[-1].path if data.holds_pairs else None
    return EncodeSplit(key, str(work / "encode"), selection, data.heldout_fraction, first.path, languages, target)
