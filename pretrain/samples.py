"""The sample index: what a sample is. Built once for each (documents, objective, sequence length), then mapped."""

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.files import sha256_file, write_atomically
from data_prep.shards import TokenDataset
from pretrain.config import ObjectiveConfig, TrainingConfig
from pretrain.keyed import key_of
from pretrain.objectives import objective_of


def index_path(folder: Path, data: TokenDataset, split: str, objective: str, seq_len: int) -> Path:
    """The file of an index; its name tells all that its content depends on."""
    key = key_of("index", data.manifest.fingerprint, split, objective, seq_len)
    return folder / f"{split}-{objective}-{seq_len}-{key:016x}.npy"


def build_index(folder: Path, data: TokenDataset, split: str, objective: ObjectiveConfig, seq_len: int) -> None:
    """Write an index and its SHA-256 into `folder`, unless it stands there whole.

    Raises:
        ValueError: the documents do not yield a single sample.
    """
    path = index_path(folder, data, split, objective.name, seq_len)
    proof = path.with_suffix(".sha256")
    if path.exists() and proof.exists() and proof.read_text() == sha256_file(path):
        return
    documents = data.train if split == "train" else data.heldout
    rules = objective_of(objective)
    key = key_of("index", data.manifest.fingerprint, split, objective.name, seq_len)
    index = rules.build_index(documents, seq_len, key)
    if rules.sample_count(index, seq_len) == 0:
        raise ValueError(
            f"the {split} documents hold {int(documents.lengths.sum())} pieces, too few for one sample of {seq_len}; "
            "prepare more text, shorten phases.seq_len, or raise data.heldout_fraction if it is the held-out text"
        )
    content = io.BytesIO()
    np.save(content, index)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content.getvalue())
    write_atomically(proof, sha256_file(path).encode())


def open_index(
    folder: Path, data: TokenDataset, split: str, objective: ObjectiveConfig, seq_len: int
) -> NDArray[np.int64]:
    """The index that `build_index` wrote, memory-mapped."""
    index: NDArray[np.int64] = np.load(index_path(folder, data, split, objective.name, seq_len), mmap_mode="r")
    return index


def build_indexes(folder: Path, data: TokenDataset, config: TrainingConfig) -> None:
    """Every index that a run needs: one a phase, and the held-out one, which has the first phase's length."""
    for phase in config.phases:
        build_index(folder, data, "train", config.objective, phase.seq_len)
    build_index(folder, data, "heldout", config.objective, config.phases[0].seq_len)
