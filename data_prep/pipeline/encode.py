"""The stages that train the tokenizer, encode a split of the documents, and assemble a shard."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from multihop.common.malloc import raise_mmap_threshold
from multihop.data_prep.config import TokenizerConfig
from multihop.data_prep.dataset.shards import list_array, shard_schema, token_dtype, write_shard
from multihop.data_prep.pipeline.encode_pairs import encode_pairs
from multihop.data_prep.pipeline.sample import texts_of
from multihop.data_prep.rules.pairs import sides_of
from multihop.data_prep.rules.sentences import split_sentences
from multihop.data_prep.stages.content import held_out
from multihop.data_prep.stages.documents import Kept, read_documents
from multihop.data_prep.stages.outputs import Output, once, standing_at, write_batches
from multihop.data_prep.tokenizers.existing import adopt
from multihop.data_prep.tokenizers.tokenizer import Tokenizer, load
from multihop.data_prep.tokenizers.training import train


@dataclass(frozen=True)
class TrainTokenizer:
    """Train on the documents in `drawn`, outputs of `sample.draw_sample`, or convert the tokenizer at `config.path`."""

    key: str
    folder: str
    drawn: tuple[str, ...]
    sample_bytes: int
    """UTF-8 bytes of these documents."""
    languages: tuple[str, ...]
    """By source."""
    config: TokenizerConfig
    pairs: bool = False
    side: Literal["source", "target"] | None = None
    """Of pairs, the side to train on; None: both."""


@dataclass(frozen=True)
class EncodeSplit:
    """Encode one split's documents."""

    key: str
    folder: str
    split: Kept
    heldout_fraction: float
    model: str
    languages: tuple[str, ...]
    """By source."""
    target_model: str | None = None
    """Of pairs, the tokenizer of the target sides, which may be `model`; None: the split has documents."""


@dataclass(frozen=True)
class AssembleShard:
    """Assemble a shard from batches of encoded splits, (path, number) in order."""

    key: str
    folder: str
    split: Literal["train", "heldout"]
    target: str
    """The shard's path in the data set."""
    beside: str
    """The path to write it to if it is not at its target: another data set may be there, and in use."""
    batches: list[tuple[str, int]]


def train_tokenizer(item: TrainTokenizer) -> Output:
    """Write the tokenizer, trained or converted, to FOLDER/KEY.model. Raises UserError as `train` and `adopt`."""

    def sentences() -> Iterator[str]:
        for text, source in texts_of(item.drawn):
            if not item.pairs:
                yield from split_sentences(text, item.languages[source])
                continue
            sides = sides_of(text)
            yield from sides if item.side is None else sides[item.side == "target" :][:1]

    def write(path: Path) -> dict[str, Any]:
        config = item.config
        if config.path is not None:
            path.write_bytes(adopt(config.path, config.lowercase, item.pairs))
        else:
            path.write_bytes(train(sentences(), config, item.sample_bytes))
        return {}

    folder = Path(item.folder)
    return once(folder / f"{item.key}.json", folder / f"{item.key}.model", write)


def encode_split(item: EncodeSplit) -> Output:
    """Encode a split's documents or pairs into an Arrow file of `shard_schema`.

    Train and held-out documents are in separate batches. Facts: "batches", a list with split, documents, sentences,
    tokens, text_bytes and bytes of each; "no tokens", the number of documents without a token.
    """
    raise_mmap_threshold()
    tokenizer = _load(item.model)
    target = tokenizer if item.target_model is None else _load(item.target_model)
    schema = shard_schema(token_dtype(max(tokenizer.vocab_size, target.vocab_size)))
    facts: dict[str, Any] = {"batches": [], "no tokens": 0}

    def batches() -> Iterator[pa.RecordBatch]:
        for documents in read_documents(item.split.path, item.split.dropped):
            held = held_out(documents.column("second").to_numpy(), item.heldout_fraction)
            for split, rows in (("train", ~held), ("heldout", held)):
                chosen = documents.filter(pa.array(rows))
                if item.target_model is None:
                    batch, text_bytes = _encode(chosen, tokenizer, item.languages, schema)
                else:
                    batch, text_bytes = encode_pairs(chosen, tokenizer, target, schema)
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
    """Write a shard beside the data set, unless it is in it; enter it as FOLDER/KEY.json. Facts: "bytes", its size."""

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


@lru_cache(maxsize=2)
def _load(model: str) -> Tokenizer:
    """Kept from split to split, with its cache of words."""
    return load(model)


def _encode(
    documents: pa.RecordBatch, tokenizer: Tokenizer, languages: Sequence[str], schema: pa.Schema
) -> tuple[pa.RecordBatch, int]:
    """`documents` as rows of `schema`, without those that have no token; and the bytes of the sentences."""
    texts, sources = (documents.column(name).to_pylist() for name in ("text", "source"))
    per_document = [tokenizer.split(text, languages[source]) for text, source in zip(texts, sources, strict=True)]
    sentences = list(chain.from_iterable(per_document))
    owner = np.repeat(np.arange(len(per_document)), [len(some) for some in per_document])
    ids, lengths = tokenizer.encode(sentences)
    values = ids.astype(schema.field("tokens").type.value_type.to_pandas_dtype())

    tokens = np.bincount(owner, weights=lengths, minlength=len(per_document)).astype(np.int64)
    token_offsets = np.concatenate([[0], np.cumsum(tokens)])
    full = lengths > 0  # a sentence without tokens has no end
    ends = (np.cumsum(lengths) - token_offsets[owner])[full]
    end_offsets = np.concatenate([[0], np.cumsum(np.bincount(owner[full], minlength=len(per_document)))])

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
