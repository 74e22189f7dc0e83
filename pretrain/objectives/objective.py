"""The interface of objectives: each is a module with the functions of `Objective`."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import UInt64
from multihop.data_prep.dataset.shards import Documents
from multihop.data_prep.tokenizers.info import TokenizerInfo
from multihop.pretrain.objectives import bilm, clm, completion, ctc, mlm, plm, sentence_pairs, translation
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.objectives.config import ObjectiveConfig


class Objective(Protocol):
    """Defines the samples of a data set, and collates samples into a model's inputs."""

    DOCUMENT_COLUMNS: list[int]
    """The columns of a row of `sample_rows` that hold document numbers."""

    def build_index(
        self, documents: Documents, seq_len: int, key: int, objective: ObjectiveConfig
    ) -> NDArray[np.int64]:
        """Build the sample index of some documents."""

    def sample_count(self, index: NDArray[np.int64], seq_len: int) -> int:
        """The number of samples in an index."""

    def sample_rows(self, index: NDArray[np.int64], samples: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
        """A row for each sample, which identifies its tokens; rows of several indexes can be concatenated."""

    def spans(
        self, documents: Documents, row: NDArray[np.int64], seq_len: int, objective: ObjectiveConfig
    ) -> list[tuple[int, int, int]]:
        """(document, start, stop) of each span of tokens in the sample of a row."""

    def collate(
        self,
        documents: Documents,
        rows: NDArray[np.int64],
        keys: UInt64,
        seq_len: int,
        tokenizer: TokenizerInfo,
        objective: ObjectiveConfig,
    ) -> Batch:
        """Collate the samples of some rows into packed sequences; `keys`, uint64 (B,), seed the masks of each."""


def objective_of(config: ObjectiveConfig) -> Objective:
    """The objective of a recipe."""
    match config.name:
        case "bilm":
            return bilm
        case "clm":
            return clm
        case "mlm":
            return mlm
        case "plm":
            return plm
        case "translation":
            return translation
        case "completion":
            return completion
        case "ctc":
            return ctc
    return sentence_pairs
