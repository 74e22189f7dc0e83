"""The sample index: what a sample is. Built once for each (documents, objective, sequence length), then mapped.

There is one for all training documents, or one for those of each source where sources have weights.
"""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.files import make_folder, open_regular, sha256_file, write_atomically
from data_prep.shards import Documents, TokenDataset
from pretrain.config import ObjectiveConfig, TrainingConfig
from pretrain.keyed import key_of
from pretrain.objectives import objective_of


@dataclass(frozen=True)
class SampleIndex:
    """The samples that a set of documents is cut into for one sequence length."""

    rows: NDArray[np.int64]
    """As the objective's `build_index` made them; documents are numbered within the set."""
    first_document: int
    """The number of the set's first document within its split."""
    size: int
    """Samples."""


def source_weights(config: TrainingConfig) -> list[float] | None:
    """The weights of the data's sources; null where they have none."""
    sources = config.data.sources if config.data else []
    weights = [source.weight for source in sources if source.weight is not None]
    return weights or None


def sources_of(config: TrainingConfig) -> list[int] | list[None]:
    """Whose documents the training indexes are made of: each source's, or everybody's (null)."""
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
    """The file of an index; its name tells all that its content depends on."""
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
) -> None:
    """Write an index and its SHA-256 into `folder`, unless it stands there whole.

    Raises:
        ValueError: the documents do not yield a single sample.
    """
    path = index_path(folder, data, split, objective, seq_len, source)
    proof = path.with_suffix(".sha256")
    if _is_whole(path, proof):
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
            f"the {whose} hold {int(documents.lengths.sum())} pieces, too few for one sample of {seq_len}; "
            "prepare more text, shorten phases.seq_len, or raise data.heldout_fraction if it is the held-out text"
        )
    content = io.BytesIO()
    np.save(content, index)
    make_folder(folder)
    write_atomically(path, content.getvalue())
    write_atomically(proof, sha256_file(path).encode())


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
        ValueError: it is missing or damaged; that its numbers are those that were written is for `build_index` to say.
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
            f"the sample index {path} cannot be read ({reason}); start the run again to rebuild it"
        ) from None
    first_document, _ = _documents(data, split, source)
    return SampleIndex(rows, first_document, objective_of(objective).sample_count(rows, seq_len))


def build_indexes(folder: Path, data: TokenDataset, config: TrainingConfig) -> None:
    """Every index that a run needs: those of each phase, and the held-out one, which has the first phase's length."""
    for phase in config.phases:
        for source in sources_of(config):
            build_index(folder, data, "train", config.objective, phase.seq_len, source)
    build_index(folder, data, "heldout", config.objective, config.phases[0].seq_len)


def look_up(
    objective: ObjectiveConfig,
    indexes: list[SampleIndex],
    sources: NDArray[np.int64],
    samples: NDArray[np.int64],
    seq_len: int,
) -> NDArray[np.int64]:
    """int64 (B, columns): what samples are in the objective's terms, documents numbered within their split.

    Args:
        indexes: of all samples of a phase, one behind the other.
        sources: int64 (B,), which of them each sample stands in.
        samples: int64 (B,), places in all of them together.
    """
    rules = objective_of(objective)
    starts = np.cumsum([0, *(index.size for index in indexes)])
    rows: NDArray[np.int64] | None = None
    for source in np.unique(sources).tolist() or [0]:  # a rank without samples has rows, none of them
        mine, index = sources == source, indexes[source]
        found = rules.look_up(index.rows, samples[mine] - starts[source], seq_len)
        found[:, rules.DOCUMENT_COLUMNS] += index.first_document
        rows = np.empty((len(samples), found.shape[1]), np.int64) if rows is None else rows
        rows[mine] = found
    assert rows is not None
    return rows


def _is_whole(path: Path, proof: Path) -> bool:
    try:
        with open_regular(proof) as file:
            return file.read(65) == sha256_file(path).encode()
    except OSError:  # missing, or no file: it is written anew
        return False


def _documents(data: TokenDataset, split: str, source: int | None) -> tuple[int, Documents]:
    documents = data.train if split == "train" else data.heldout
    return (0, documents) if source is None else documents.of_source(source)


def _key(data: TokenDataset, split: str, objective: ObjectiveConfig, seq_len: int, source: int | None) -> int:
    own = () if source is None else (source,)
    isolated = ("isolated",) if objective.name == "mlm" and objective.isolate_documents else ()  # clm's is the same
    return key_of("index", data.manifest.fingerprint, split, objective.name, seq_len, *own, *isolated)
