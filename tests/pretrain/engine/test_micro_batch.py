"""engine.micro_batch=auto: how much memory a sample takes, from two micro-batches."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pretrain.engine.micro_batch import memory_line


def measured(a_sample: float, alone: float, limit: int) -> tuple[Callable[[int], float], list[int]]:
    """A device on which `limit` samples fit, and the sizes that were tried."""
    tried: list[int] = []

    def bytes_of(size: int) -> float:
        tried.append(size)
        if size > limit:
            raise torch.OutOfMemoryError(f"{size} samples")
        return alone + a_sample * size

    return bytes_of, tried


@given(
    a_sample=st.floats(1e3, 1e9),
    alone=st.floats(0, 1e9),
    seq_len=st.sampled_from([32, 128, 512, 2048, 65_536]),
    share=st.integers(2, 5_000),
    limit=st.integers(2, 5_000),
)
def test_the_line_through_two_measurements(a_sample: float, alone: float, seq_len: int, share: int, limit: int) -> None:
    bytes_of, tried = measured(a_sample, alone, limit)
    found = memory_line(bytes_of, seq_len, share, "cuda")
    assert found == pytest.approx((a_sample, alone), rel=1e-6, abs=1e-3 * a_sample)
    assert max(tried) <= share, "a micro-batch larger than a rank's share of a step never runs"
    most = max(size for size in tried if size <= limit)
    assert most * seq_len >= min(16_384, share * seq_len // 2, limit * seq_len // 4), "too few tokens tell nothing"


def test_one_sample_is_measured_alone_where_a_share_has_no_two() -> None:
    bytes_of, tried = measured(7e6, 2e6, 1)
    assert memory_line(bytes_of, 128, 1, "cuda") == (9e6, 0.0) and tried == [1]


def test_a_sample_that_does_not_fit_takes_more_than_all_memory() -> None:
    bytes_of, tried = measured(1.0, 0.0, 0)
    assert memory_line(bytes_of, 512, 100, "cuda") == (float("inf"), 0.0)
    assert tried == [64, 32, 16, 8, 4, 2, 1]
