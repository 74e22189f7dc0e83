"""Documents of given sentence lengths in a real shard, every token with an id of its own, and their tokenizer."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from multihop.data_prep.dataset.shards import Documents, shard_schema, write_shard
from multihop.data_prep.tokenizers.info import TokenizerInfo, pack_flags

BERT = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
GPT2 = {"end": 0, "unk": 1}
FIRST = 5
"""Id of the first document's first token; the ids after it count up."""


def documents_of(path: Path, sentences: list[list[int]]) -> Documents:
    """Return a document for each list of its sentences' lengths, in tokens."""
    schema = shard_schema("uint32")
    ends = [np.cumsum(lengths) for lengths in sentences]
    stops = np.cumsum([0, *(each[-1] for each in ends)])
    counts = np.cumsum([0, *map(len, ends)])

    def lists(name: str, offsets: np.ndarray, values: np.ndarray) -> pa.ListArray:
        column = schema.field(name).type
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, pa.uint32()), type=column)

    columns = [
        pa.array(np.arange(len(sentences)), pa.uint64()),
        pa.array(np.zeros(len(sentences)), pa.uint16()),
        lists("tokens", stops, np.arange(FIRST, FIRST + stops[-1])),
        lists("sentence_ends", counts, np.concatenate(ends)),
    ]
    write_shard(path, [pa.RecordBatch.from_arrays(columns, schema=schema)])
    return Documents([path])


def tokenizer_of(starts: list[bool] | np.ndarray, special_ids: dict[str, int] = BERT) -> TokenizerInfo:
    """Return a tokenizer with as many tokens as `starts`, which says whether a word begins with each."""
    flags = np.array(starts, bool)
    flags[list(special_ids.values())] = False
    return TokenizerInfo(
        kind="unigram", vocab_size=len(flags), sha256="", special_ids=special_ids, word_start=pack_flags(flags)
    )
