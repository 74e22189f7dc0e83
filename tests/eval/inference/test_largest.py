"""The largest of many values are those of `topk`."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from multihop.eval.inference.beam_search import largest


@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 3000),
    count=st.integers(1, 9),
    low=st.sampled_from([-1e30, -5.0]),
    seed=st.integers(0, 99),
)
def test_they_are_those_of_topk(rows: int, columns: int, count: int, low: float, seed: int) -> None:
    count = min(count, columns)
    values = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) + low * (
        torch.arange(columns) % 7 == 0
    )
    values[:, columns // 2] = -torch.inf
    result, where = largest(values, count)
    assert torch.equal(result, values.topk(count).values)
    assert torch.equal(values.gather(1, where), result)
    assert all(len(set(row)) == count for row in where.tolist())
