"""What a model learns to predict. Each objective is a module with the functions that `Objective` names."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from data_prep.manifest import TokenizerInfo
from data_prep.shards import Documents
from pretrain.config import ObjectiveConfig
from pretrain.keyed import UInt64
from pretrain.objectives import clm, full_sentences, pairs
from pretrain.objectives.batch import Batch


class Objective(Protocol):
    """Lays out samples, and turns some of them into the model's inputs."""

    DOCUMENT_COLUMNS: list[int]
    """Where a row of `look_up` holds numbers of documents."""

    def build_index(
        self, documents: Documents, seq_len: int, key: int, objective: ObjectiveConfig
    ) -> NDArray[np.int64]: ...

    def sample_count(self, index: NDArray[np.int64], seq_len: int) -> int: ...

    def look_up(self, index: NDArray[np.int64], samples: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
        """A row for each sample that says what it is; rows of several sources' indexes can stand together."""

    def spans(
        self, documents: Documents, row: NDArray[np.int64], seq_len: int, objective: ObjectiveConfig
    ) -> list[tuple[int, int, int]]:
        """(document, start, stop) of all that the sample of a row is made of."""

    def assemble(
        self,
        documents: Documents,
        rows: NDArray[np.int64],
        keys: UInt64,
        seq_len: int,
        tokenizer: TokenizerInfo,
        objective: ObjectiveConfig,
    ) -> Batch:
        """The model's inputs for the samples of some rows, one behind the other; `keys` (B,) decide what is random."""


def objective_of(config: ObjectiveConfig) -> Objective:
    """The recipe's objective."""
    if config.name == "clm":
        return clm
    return full_sentences if config.name == "mlm" else pairs
