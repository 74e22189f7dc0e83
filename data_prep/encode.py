"""Stages 2 to 4: train the tokenizer, encode one split of the documents, put one shard together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from data_prep.config import TokenizerConfig
from data_prep.content import held_out
from data_prep.documents import Kept, read_documents
from data_prep.host_memory import keep_freed_blocks
from data_prep.rules.sentences import split_sentences
from data_prep.sample import texts_of
from data_prep.shards import shard_schema, token_dtype, write_shard
from data_prep.stages import Output, once, standing_at, write_batches
from data_prep.tokenizers.existing import adopt
from data_prep.tokenizers.tokenizer import Tokenizer, load
from data_prep.tokenizers.training import train


@dataclass(frozen=True)
class TrainTokenizer:
    """Train on the documents in `drawn`, outputs of `sample.draw_sample`, or take over what `config.path` names."""

    key: str
    folder: str
    drawn: tuple[str, ...]
    sample_bytes: int
    """UTF-8 bytes of these documents."""
    languages: tuple[str, ...]
    """Of the sources."""
    config: TokenizerConfig


@dataclass(frozen=True)
class EncodeSplit:
    """Encode one split's documents."""

    key: str
    folder: str
    split: Kept
    heldout_fraction: float
    model: str
    languages: tuple[str, ...]
    """Of the sources."""


@dataclass(frozen=True)
class AssembleShard:
    """Put batches of encoded splits, (path, number) in order, into one shard, for `target`."""

    key: str
    folder: str
    split: Literal["train", "heldout"]
    target: str
    """Where the data set has it."""
    beside: str
    """Where it is written, unless it stands at its target: the data set may be another there, and in use."""
    batches: list[tuple[str, int]]


def train_tokenizer(item: TrainTokenizer) -> Output:
    """The tokenizer's file, trained or taken over, is FOLDER/KEY.model. Raises ValueError as `train` and `adopt`."""

    def sentences() -> Iterator[str]:
        for text, source in texts_of(item.drawn):
            yield from split_sentences(text, item.languages[source])

    def write(path: Path) -> dict[str, Any]:
        config = item.config
        if config.path is not None:
            path.write_bytes(adopt(config.path, config.lowercase))
        else:
            path.write_bytes(train(sentences(), config, item.sample_bytes))
        return {}

    folder = Path(item.folder)
    return once(folder / f"{item.key}.json", folder / f"{item.key}.model", write)


def encode_split(item: EncodeSplit) -> Output:
    """Tokens and sentence ends of a split's documents, as an Arrow file of `shard_schema`.

    Train and held-out documents stand in batches of their own. Facts: "batches", a list with split, documents,
    sentences, tokens, text_bytes and bytes of each; "no tokens", how many documents nothing was left of.
    """
    keep_freed_blocks()
    tokenizer = _load(item.model)
    schema = shard_schema(token_dtype(tokenizer.vocab_size))
    facts: dict[str, Any] = {"batches": [], "no tokens": 0}

    def batches() -> Iterator[pa.RecordBatch]:
        for documents in read_documents(item.split.path, item.split.dropped):
            held = held_out(documents.column("second").to_numpy(), item.heldout_fraction)
            for split, rows in (("train", ~held), ("heldout", held)):
                chosen = documents.filter(pa.array(rows))
                batch, text_bytes = _encode(chosen, tokenizer, item.languages, schema)
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
    """Write one shard of the data set beside it, entered as FOLDER/KEY.json. Facts: "bytes", the file's size."""

    def write(path: Path) -> dict[str, Any]:
        batches = []
        readers: dict[str, pa.ipc.RecordBatchFileReader] = {}
        for source, number in item.batches:
            if source not in readers:
                readers[source] = pa.ipc.open_file(pa.memory_map(source))
            batches.append(readers[source].get_batch(number))
        write_shard(path, batches)
        return {"bytes": path.stat().st_size}

    entry = Path(item.folder) / f"{item.key}.json"
    return standing_at(entry, Path(item.target)) or once(entry, Path(item.beside), write)


@lru_cache(maxsize=1)
def _load(model: str) -> Tokenizer:
    """Kept from split to split, with the words that it has met."""
    return load(model)


def _encode(
    documents: pa.RecordBatch, tokenizer: Tokenizer, languages: Sequence[str], schema: pa.Schema
) -> tuple[pa.RecordBatch, int]:
    """`documents` as rows of `schema`, and the bytes of their sentences; those without any token are left out."""
    texts, sources = (documents.column(name).to_pylist() for name in ("text", "source"))
    per_document = [tokenizer.split(text, languages[source]) for text, source in zip(texts, sources, strict=True)]
    sentences = list(chain.from_iterable(per_document))
    owner = np.repeat(np.arange(len(per_document)), [len(some) for some in per_document])
    ids, lengths = tokenizer.encode(sentences)
    values = ids.astype(schema.field("tokens").type.value_type.to_pandas_dtype())

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
    return batch, len("".join(sentences).encode())


def _list_array(offsets: np.ndarray, values: np.ndarray, kind: pa.ListType) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values, kind.value_type), type=kind)
