"""Which kernels compute attention of variable lengths on a GPU, tested without one by tensors without data."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC2701
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701

from multihop.pretrain.engine.activation_checkpointing import checkpoint_activations
from multihop.pretrain.models.layers.attention import Sequences, attend
from multihop.pretrain.models.layers.cross_attention import Pairs, cross_attend


class Called(TorchDispatchMode):
    """Records the names of the operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.flash: list[dict[str, Any]] = []
        """The keyword arguments of FlashAttention's calls."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(operation.name())
        if operation.name() == "aten::_flash_attention_forward":
            self.flash.append(kwargs)
        return operation(*args, **(kwargs or {}))


class FlashLayer(nn.Module):
    """FlashAttention of two sequences, and an operation that is recomputed."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bounds = torch.empty(3, dtype=torch.int32, device="meta")
        given = (x, x, x, bounds, bounds, 64, 64, self.dropout, False, False)
        return torch.ops.aten._flash_attention_forward(*given)[0].sin()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_that_draws_random_numbers_is_recomputed(dropout: float) -> None:
    """A saved result would leave the generator behind, and the masks of dropout after it would be others."""
    model: Any = nn.Module()
    model.layers = nn.ModuleList([FlashLayer(dropout)])
    checkpoint_activations(model, "selective")
    x = torch.empty(100, 2, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with Called() as called:
        model.layers[0](1 * x).sum().backward()
    assert called.names.count("aten::_flash_attention_forward") == (2 if dropout else 1)


def on_gpu(tokens: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.empty(tokens, 4, width, dtype=dtype, device="cuda") for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_go_to_flash_attention_directly(
    dtype: torch.dtype, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    with FakeTensorMode(), Called() as called:
        query, key, value = on_gpu(303, 64, dtype)
        sequences = Sequences(torch.empty(5, dtype=torch.int64, device="cuda"), 129, 303)
        for _ in range(2):  # two layers
            out = attend(query, key, value, sequences, causal, 0.1)
    assert out.shape == (303, 4, 64) and out.dtype == dtype
    assert called.names.count("aten::_flash_attention_forward") == 2
    assert called.names.count("aten::_to_copy") == 1, "the bounds are made narrow once for all layers"
    assert not [name for name in called.names if "item" in name or "nested" in name]


@pytest.mark.parametrize("causal", [False, True])
def test_windows_are_flash_attentions_own(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    with FakeTensorMode(), Called() as called:
        for lengths, longest, tokens in ((5, 164, 303), (3, 150, 300)):  # different lengths, and equal ones
            query, key, value = on_gpu(tokens, 64, torch.bfloat16)
            sequences = Sequences(torch.empty(lengths, dtype=torch.int64, device="cuda"), longest, tokens)
            assert attend(query, key, value, sequences, causal, 0.0, window=16).shape == (tokens, 4, 64)
            attend(query, key, value, sequences, causal, 0.0, window=163)  # as long as the text: no window
    sides = [(call.get("window_size_left"), call.get("window_size_right")) for call in called.flash]
    assert [side for side in sides if side[0] == 16] == [(16, 0 if causal else 16)] * 2
    assert not [side for side in sides if side[0] == 163]


def test_targets_attend_to_sources_of_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    with FakeTensorMode(), Called() as called:
        query, (_, key, value) = on_gpu(30, 64, torch.bfloat16)[0], on_gpu(50, 64, torch.bfloat16)
        queries, keys = (
            Sequences(torch.empty(4, dtype=torch.int64, device="cuda"), longest, tokens)
            for longest, tokens in ((16, 30), (20, 50))
        )
        out = cross_attend(query, key, value, Pairs(queries, keys))
    assert out.shape == (30, 4, 64) and "aten::_flash_attention_forward" in called.names
