"""Stages 2 to 4: train the tokenizer, encode one split of the documents, put one shard together."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import sentencepiece as spm

from data_prep import tokenizer
from data_prep.config import TokenizerConfig
from data_prep.dedup import held_out
from data_prep.documents import Kept, read_documents
from data_prep.sample import texts_of
from data_prep.sentences import split_sentences
from data_prep.shards import shard_schema, token_dtype, write_shard
from data_prep.stages import Output, once, write_batches


@dataclass(frozen=True)
class TrainTokenizer:
    """Train on the documents in `drawn`, outputs of `sample.draw_sample`."""

    key: str
    folder: str
    drawn: tuple[str, ...]
    config: TokenizerConfig


@dataclass(frozen=True)
class EncodeSplit:
    """Encode one split's documents."""

    key: str
    folder: str
    split: Kept
    heldout_fraction: float
    model: str


@dataclass(frozen=True)
class AssembleShard:
    """Put batches of encoded splits, (path, number) in order, into one shard at `target`."""

    key: str
    folder: str
    split: Literal["train", "heldout"]
    target: str
    batches: list[tuple[str, int]]


def train_tokenizer(item: TrainTokenizer) -> Output:
    """Train the SentencePiece model; the output is FOLDER/KEY.model. Raises ValueError as `tokenizer.train`."""

    def write(path: Path) -> dict[str, Any]:
        path.write_bytes(tokenizer.train(chain.from_iterable(map(split_sentences, texts_of(item.drawn))), item.config))
        return {}

    folder = Path(item.folder)
    return once(folder / f"{item.key}.json", folder / f"{item.key}.model", write)


def encode_split(item: EncodeSplit) -> Output:
    """Tokens and sentence ends of a split's documents, as an Arrow file of `shard_schema`.

    Train and held-out documents stand in batches of their own. Facts: "batches", a list with split, documents,
    sentences, tokens, text_bytes and bytes of each; "no tokens", how many documents nothing was left of.
    """
    processor = tokenizer.load(item.model)
    schema = shard_schema(token_dtype(processor.vocab_size()))
    facts: dict[str, Any] = {"batches": [], "no tokens": 0}

    def batches() -> Iterator[pa.RecordBatch]:
        for documents in read_documents(item.split.path, item.split.dropped):
            held = held_out(documents.column("second").to_numpy(), item.heldout_fraction)
            for split, rows in (("train", ~held), ("heldout", held)):
                chosen = documents.filter(pa.array(rows))
                batch, text_bytes = _encode(chosen, processor, schema)
                facts["no tokens"] += chosen.num_rows - batch.num_rows
                if batch.num_rows:
                    facts["batches"].append(
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
        return facts

    folder = Path(item.folder)
    return once(folder / f"{item.key}.json", folder / f"{item.key}.arrow", write)


def assemble_shard(item: AssembleShard) -> Output:
    """Write one shard of the data set, entered as FOLDER/KEY.json. Facts: "bytes", the file's size."""

    def write(path: Path) -> dict[str, Any]:
        batches = []
        readers: dict[str, pa.ipc.RecordBatchFileReader] = {}
        for source, number in item.batches:
            if source not in readers:
                readers[source] = pa.ipc.open_file(pa.memory_map(source))
            batches.append(readers[source].get_batch(number))
        write_shard(path, batches)
        return {"bytes": path.stat().st_size}

    return once(Path(item.folder) / f"{item.key}.json", Path(item.target), write)


def _encode(
    documents: pa.RecordBatch, processor: spm.SentencePieceProcessor, schema: pa.Schema
) -> tuple[pa.RecordBatch, int]:
    """`documents` as rows of `schema`, and the bytes of their sentences; those without any token are left out."""
    per_document = [split_sentences(text) for text in documents.column("text").to_pylist()]
    sentences = list(chain.from_iterable(per_document))
    owner = np.repeat(np.arange(len(per_document)), [len(some) for some in per_document])
    pieces = processor.encode(sentences, out_type=int, num_threads=1) if sentences else []
    lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
    total = int(lengths.sum())
    values = np.fromiter(chain.from_iterable(pieces), dtype=schema.field("tokens").type.value_type.to_pandas_dtype(),
                         count=total)  # fmt: skip

    tokens = np.bincount(owner, weights=lengths, minlength=len(per_document)).astype(np.int64)
    token_offsets = np.concatenate([[0], np.cumsum(tokens)])
    full = lengths > 0  # a sentence of nothing but what the tokenizer drops ends nowhere
    ends = (np.cumsum(lengths) - token_offsets[owner])[full]
    end_offsets = np.concatenate([[0], np.cumsum(np.bincount(owner[full], minlength=len(per_document)))])

    columns = [
        documents.column("first"),
        documents.column("source"),
        _list_array(token_offsets, values, schema.field("tokens").type),
        _list_array(end_offsets, ends.astype(np.uint32), schema.field("sentence_ends").type),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    if not tokens.all():
        batch = batch.filter(pa.array(tokens > 0))
    return batch, sum(len(sentence.encode()) for sentence in sentences)


def _list_array(offsets: np.ndarray, values: np.ndarray, kind: pa.ListType) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values, kind.value_type), type=kind)
