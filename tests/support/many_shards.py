"""A data set of a few texts in many shards."""

from pathlib import Path

import pytest

from multihop.data_prep.config import DataConfig, TokenizerConfig
from multihop.data_prep.dataset.manifest import Manifest
from multihop.data_prep.pipeline import shards
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.stages import documents


def prepare_many_shards(data: DataConfig, tokenizer: TokenizerConfig, out: Path, shard_bytes: int = 1_000) -> Manifest:
    """Run `prepare` with shards of about `shard_bytes` bytes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(documents, "BATCH_BYTES", 100)
        patched.setattr(shards, "SHARD_BYTES", shard_bytes)
        return prepare(data, tokenizer, out)
