"""The sample index: what a sample is. Built once per (documents, objective, sequence length), then memory-mapped.

All training documents have one index, or each source has its own where sources have weights.
"""

import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.files import canonical_json, make_folder, open_regular, read_json_object, sha256_file, write_atomically
from common.keyed import key_of
from data_prep.dataset.shards import Documents, TokenDataset
from pretrain.config import ObjectiveConfig, TrainingConfig
from pretrain.objectives import objective_of


@dataclass(frozen=True)
class SampleIndex:
    """The samples that a set of documents is cut into for one sequence length."""

    rows: NDArray[np.int64]
    """From the objective's `build_index`; documents are numbered within the set."""
    first_document: int
    """The number of the set's first document within its split."""
    size: int
    """Samples."""


def source_weights(config: TrainingConfig) -> list[float] | None:
    """The weights of the data's sources; None where they have none."""
    sources = config.data.sources if config.data else []
    weights = [source.weight for source in sources if source.weight is not None]
    return weights or None


def sources_of(config: TrainingConfig) -> list[int] | list[None]:
    """The sources with a training index of their own; [None]: one index of all documents."""
    weights = source_weights(config)
    return [None] if weights is None else list(range(len(weights)))


def index_path(
    folder: Path,
    data: TokenDataset,
    split: str,
    objective: ObjectiveConfig,
    seq_len: int,
    source: int | None = None,
) -> Path:
    """The file of an index; its name covers all that its content depends on."""
    key = _key(data, split, objective, seq_len, source)
    part = "" if source is None else f"-source{source}"
    return folder / f"{split}-{objective.name}-{seq_len}{part}-{key:016x}.npy"


def build_index(
    folder: Path,
    data: TokenDataset,
    split: str,
    objective: ObjectiveConfig,
    seq_len: int,
    source: int | None = None,
    full: bool = False,
) -> None:
    """Write an index into `folder`, with a record of its hash, size and modification time; keep one that is whole.

    An index whose size and modification time are those of its record is trusted without being read.

    Args:
        full: hash it in any case.

    Raises:
        ValueError: the documents yield no sample.
    """
    path = index_path(folder, data, split, objective, seq_len, source)
    if _is_whole(path, full):
        return
    _, documents = _documents(data, split, source)
    whose = f"{split} documents" + ("" if source is None else f" of data.sources[{source}]")
    rules = objective_of(objective)
    try:
        index = rules.build_index(documents, seq_len, _key(data, split, objective, seq_len, source), objective)
    except ValueError as error:
        raise ValueError(f"the {whose} cannot be used: {error}") from None
    if rules.sample_count(index, seq_len) == 0:
        raise ValueError(
            f"the {whose} have {int(documents.lengths.sum())} tokens, too few for one sample of {seq_len}; "
            "prepare more text, shorten phases.seq_len, or raise data.heldout_fraction if it is the held-out text"
        )
    content = io.BytesIO()
    np.save(content, index)
    make_folder(folder)
    write_atomically(path, content.getvalue())
    _write_record(path, hashlib.sha256(content.getbuffer()).hexdigest())


def open_index(
    folder: Path,
    data: TokenDataset,
    split: str,
    objective: ObjectiveConfig,
    seq_len: int,
    source: int | None = None,
) -> SampleIndex:
    """The index that `build_index` wrote, memory-mapped.

    Raises:
        ValueError: it is missing or damaged. Its hash is checked by `build_index`.
    """
    path = index_path(folder, data, split, objective, seq_len, source)
    try:
        open_regular(path).close()
        rows: NDArray[np.int64] = np.load(path, mmap_mode="r", allow_pickle=False)
        if rows.dtype != np.int64:
            raise ValueError(f"it holds {rows.dtype}")
    except (OSError, ValueError, EOFError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"the sample index {path} cannot be read ({reason}); rerun the same command to rebuild it"
        ) from None
    first_document, _ = _documents(data, split, source)
    return SampleIndex(rows, first_document, objective_of(objective).sample_count(rows, seq_len))


def build_indexes(folder: Path, data: TokenDataset, config: TrainingConfig, full: bool = False) -> None:
    """Every index that a run needs: those of each phase, and the held-out one, which has the first phase's length."""
    for phase in config.phases:
        for source in sources_of(config):
            build_index(folder, data, "train", config.objective, phase.seq_len, source, full)
    build_index(folder, data, "heldout", config.objective, config.phases[0].seq_len, full=full)


def look_up(
    objective: ObjectiveConfig,
    indexes: list[SampleIndex],
    sources: NDArray[np.int64],
    samples: NDArray[np.int64],
    seq_len: int,
) -> NDArray[np.int64]:
    """int64 (B, columns): the rows of samples in the objective's terms, documents numbered within their split.

    Args:
        indexes: of a phase, one per source.
        sources: int64 (B,), which of them each sample is in.
        samples: int64 (B,), positions in the concatenated indexes.
    """
    rules = objective_of(objective)
    starts = np.cumsum([0, *(index.size for index in indexes)])
    rows: NDArray[np.int64] | None = None
    for source in np.unique(sources).tolist() or [0]:  # a rank without samples gets 0 rows
        mine, index = sources == source, indexes[source]
        found = rules.sample_rows(index.rows, samples[mine] - starts[source], seq_len)
        found[:, rules.DOCUMENT_COLUMNS] += index.first_document
        rows = np.empty((len(samples), found.shape[1]), np.int64) if rows is None else rows
        rows[mine] = found
    assert rows is not None
    return rows


def _record_of(path: Path) -> Path:
    return path.with_suffix(".json")


def _write_record(path: Path, sha256: str) -> None:
    found = os.stat(path)
    record = {"sha256": sha256, "bytes": found.st_size, "mtime_ns": found.st_mtime_ns}
    write_atomically(_record_of(path), canonical_json(record))


def _is_whole(path: Path, full: bool) -> bool:
    try:
        record, found = read_json_object(_record_of(path)), os.stat(path)
        if not full and (record.get("bytes"), record.get("mtime_ns")) == (found.st_size, found.st_mtime_ns):
            return True
        sha256 = sha256_file(path)
    except (OSError, ValueError):  # missing, damaged, or no regular file: it is written again
        return False
    if record.get("sha256") != sha256:
        return False
    _write_record(path, sha256)
    return True


def _documents(data: TokenDataset, split: str, source: int | None) -> tuple[int, Documents]:
    documents = data.train if split == "train" else data.heldout
    return (0, documents) if source is None else documents.of_source(source)


def _key(data: TokenDataset, split: str, objective: ObjectiveConfig, seq_len: int, source: int | None) -> int:
    own = () if source is None else (source,)
    isolated = ("isolated",) if objective.name == "mlm" and objective.isolate_documents else ()  # clm's is the same
    return key_of("index", data.manifest.fingerprint, split, objective.name, seq_len, *own, *isolated)
