"""Encodes pairs as rows of a shard."""

import numpy as np
import pyarrow as pa

from multihop.data_prep.dataset.shards import list_array
from multihop.data_prep.rules.pairs import sides_of
from multihop.data_prep.tokenizers.tokenizer import Tokenizer


def encode_pairs(
    documents: pa.RecordBatch, source: Tokenizer, target: Tokenizer, schema: pa.Schema
) -> tuple[pa.RecordBatch, int]:
    """Pairs as rows of `schema`: `tokens` are those of the source side and then those of the target side, and
    `sentence_ends` the number of the former and of both. A pair with a side without a token has no row.

    Args:
        documents: a batch of `multihop.data_prep.stages.documents.SCHEMA`.

    Returns:
        The rows, and the UTF-8 bytes of all sides.
    """
    texts = [sides_of(text) for text in documents.column("text").to_pylist()]
    sides = [tokenizer.encode([pair[side] for pair in texts]) for side, tokenizer in enumerate((source, target))]
    lengths = np.stack([lengths for _, lengths in sides], axis=1)  # (pairs, 2)
    starts = np.concatenate([[0], np.cumsum(lengths)])  # of each side among all tokens, and the end
    tokens = np.empty(starts[-1], schema.field("tokens").type.value_type.to_pandas_dtype())
    for side, (ids, of_side) in enumerate(sides):
        within = np.concatenate([[0], np.cumsum(of_side)[:-1]]) if len(of_side) else of_side
        tokens[np.arange(len(ids)) + np.repeat(starts[side:-1:2] - within, of_side)] = ids
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
    return batch, len("".join(side for pair in texts for side in pair).encode())
