"""Kernels are deterministic, and options that only debugging needs are off."""

import os

import pytest
import torch
from torch.profiler import profile

from multihop.pretrain.engine.device import use_deterministic_kernels


def test_new_memory_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        torch.use_deterministic_algorithms(True)
        with profile() as filled:
            torch.empty(8)
        use_deterministic_kernels()
        with profile() as done:
            torch.empty(8)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]
    kernels = [{event.key for event in each.key_averages()} for each in (filled, done)]
    assert kernels[0] - kernels[1] >= {"aten::fill_"} and "aten::empty" in kernels[1]
