"""Settings of the device: kernels are deterministic, options that only debugging needs are off, and memory may grow."""

import os
import subprocess
import sys

import pytest
import torch
from torch.profiler import profile

from multihop.pretrain.engine.device import use_deterministic_kernels, use_expandable_segments


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


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_settings_of_the_allocator_stay(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "backend:native")
    use_expandable_segments()
    found = {key: value for key, value in os.environ.items() if key.startswith("PYTORCH_") and "ALLOC_CONF" in key}
    assert found == {name: "backend:native"}
    monkeypatch.delenv(name)
    use_expandable_segments()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_ranks_memory_is_expandable() -> None:
    code = (
        "import torch; from multihop.pretrain.engine.ranks import join_process_group; ranks = join_process_group(); "
        "torch.ones(1, device=ranks.device); print(torch.cuda.memory_snapshot()[0]['is_expandable'])"
    )
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **rank}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == "True"
