"""The sample index: which tokens make up each sample. It is built once per (documents, objective, sequence length), and
memory-mapped.

All training documents have one index; if sources have weights, each source has a separate one.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import key_of
from multihop.common.errors import UserError
from multihop.data_prep.config import DataConfig
from multihop.data_prep.dataset.shards import Documents, TokenDataset
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.array_file import ensure_array, open_array
from multihop.pretrain.objectives.config import ObjectiveConfig
from multihop.pretrain.objectives.ctc import check_targets
from multihop.pretrain.objectives.objective import objective_of


@dataclass(frozen=True)
class SampleIndex:
    """The samples of a set of documents for one sequence length."""

    rows: NDArray[np.int64]
    """The result of the objective's `build_index`; documents are numbered within the set."""
    first_document: int
    """Number of the set's first document within its split."""
    stop_document: int
    """Number of the set's last document, plus 1."""
    size: int
    """Number of samples."""


def source_weights(config: TrainingConfig) -> list[float] | None:
    """The weights of the data's sources; None without weights."""
    sources = config.data.sources if config.data else []
    weights = [source.weight for source in sources if source.weight is not None]
    return weights or None


def sources_of(config: TrainingConfig) -> list[int] | list[None]:
    """The sources with separate training indexes; [None]: one index of all documents."""
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
    """The file of an index; its name has a hash of everything that its content depends on."""
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
    """Write an index into `folder`; keep one that is whole.

    Args:
        full: Hash an existing index in any case, as `ensure_array` does.

    Raises:
        UserError: The documents yield no sample.
    """
    _, documents = _documents(data, split, source)
    subject = f"{split} documents" + ("" if source is None else f" of data.sources[{source}]")
    module = objective_of(objective)

    def compute() -> NDArray[np.int64]:
        key = _key(data, split, objective, seq_len, source)
        try:
            index: NDArray[np.int64] = module.build_index(documents, seq_len, key, objective)
        except ValueError as error:
            raise UserError(f"the {subject} cannot be used: {error}") from None
        if module.sample_count(index, seq_len) == 0:
            raise UserError(
                f"the {subject} have {int(documents.lengths.sum())} tokens, too few for one sample of {seq_len}; "
                "prepare more text, shorten phases.seq_len, or raise data.heldout_fraction if it is the held-out text"
            )
        return index

    ensure_array(index_path(folder, data, split, objective, seq_len, source), compute, full)


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
        UserError: It is missing or damaged. Its hash is checked by `build_index`.
    """
    path = index_path(folder, data, split, objective, seq_len, source)
    rows: NDArray[np.int64] = open_array(path, np.int64, "the sample index")
    first, stop = 0, len(data.train if split == "train" else data.heldout)
    if source is not None:  # the documents' shards may not be fetched yet
        bounds = open_array(_bounds_path(folder, data), np.int64, "the bounds of the sources")
        first, stop = bounds[source : source + 2].tolist()
    return SampleIndex(rows, first, stop, objective_of(objective).sample_count(rows, seq_len))


def build_indexes(folder: Path, data: TokenDataset, config: TrainingConfig, full: bool = False) -> None:
    """Write every index that a run needs: those of each phase, and the held-out one, which has the first phase's
    length.

    Raises:
        UserError: Documents yield no sample, or too many of them cannot be used.
    """
    if config.objective.needs.target_fits_source:
        limit = config.data.max_bad_fraction if config.data else DataConfig.model_fields["max_bad_fraction"].default
        check_targets(data.train, "training", limit)
        check_targets(data.heldout, "held-out", limit)
    for phase in config.phases:
        for source in sources_of(config):
            build_index(folder, data, "train", config.objective, phase.seq_len, source, full)
    build_index(folder, data, "heldout", config.objective, config.phases[0].seq_len, full=full)
    if source_weights(config) is not None:

        def bounds() -> NDArray[np.int64]:
            firsts = [data.train.of_source(source)[0] for source in sources_of(config) if source is not None]
            return np.array([*firsts, len(data.train)], np.int64)

        ensure_array(_bounds_path(folder, data), bounds, full)


def index_rows(
    objective: ObjectiveConfig,
    indexes: list[SampleIndex],
    sources: NDArray[np.int64],
    samples: NDArray[np.int64],
    seq_len: int,
) -> NDArray[np.int64]:
    """int64 (B, columns): the samples' rows, as the objective defines them, with documents numbered within their split.

    Args:
        indexes: A phase's indexes, one per source.
        sources: int64 (B,), the index that each sample is in.
        samples: int64 (B,), positions in the concatenated indexes.
    """
    module = objective_of(objective)
    starts = np.cumsum([0, *(index.size for index in indexes)])
    rows: NDArray[np.int64] | None = None
    for source in np.unique(sources).tolist() or [0]:  # a rank without samples gets 0 rows
        in_source, index = sources == source, indexes[source]
        source_rows = module.sample_rows(index.rows, samples[in_source] - starts[source], seq_len)
        source_rows[:, module.DOCUMENT_COLUMNS] += index.first_document
        rows = np.empty((len(samples), source_rows.shape[1]), np.int64) if rows is None else rows
        rows[in_source] = source_rows
    assert rows is not None
    return rows


def _documents(data: TokenDataset, split: str, source: int | None) -> tuple[int, Documents]:
    documents = data.train if split == "train" else data.heldout
    return (0, documents) if source is None else documents.of_source(source)


def _bounds_path(folder: Path, data: TokenDataset) -> Path:
    """int64 (sources + 1,): the first training document of each source; the last is the number of documents."""
    return folder / f"train-sources-{key_of('sources', data.manifest.fingerprint):016x}.npy"


def _key(data: TokenDataset, split: str, objective: ObjectiveConfig, seq_len: int, source: int | None) -> int:
    part = () if source is None else (source,)
    isolated = (
        ("isolated",) if objective.name in ("mlm", "plm") and objective.isolate_documents else ()
    )  # clm's index does not depend on it
    return key_of("index", data.manifest.fingerprint, split, objective.name, seq_len, *part, *isolated)
