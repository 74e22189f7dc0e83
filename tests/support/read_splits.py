"""Splits of documents as the reading stage writes them, from texts."""

from pathlib import Path

import pyarrow as pa

from multihop.data_prep.stages.documents import SCHEMA, content_hash
from multihop.data_prep.stages.outputs import write_batches


def write_read_split(path: Path, texts: list[str], documents_a_batch: int = 50) -> str:
    """Write `texts` to `path`, one row each, in several batches; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [(*content_hash(text), len(text.encode()), 0, text) for text in texts]
    batches = [rows[start : start + documents_a_batch] for start in range(0, len(rows), documents_a_batch)]
    arrays = [
        [pa.array(column, kind.type) for column, kind in zip(zip(*batch, strict=True), SCHEMA, strict=True)]
        for batch in batches
    ]
    write_batches(path, SCHEMA, (pa.RecordBatch.from_arrays(columns, schema=SCHEMA) for columns in arrays), "lz4")
    return str(path)
