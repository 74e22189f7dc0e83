"""The kernels for GPUs compute what torch computes, and drop what they say."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from multihop.pretrain.engine.activation_checkpointing import checkpoint_activations
from multihop.pretrain.engine.inputs import packed_to_device
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.models.families import parse_model_config
from multihop.pretrain.models.layers.attention import Sequences, attend
from multihop.pretrain.models.layers.blocks import gelu
from multihop.pretrain.packed_tokens import cumulative_lengths, pack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NARROW = [torch.bfloat16, torch.float16]
LENGTHS = [[5, 16, 0, 1, 12], [64, 40, 64], [100, 128, 1, 77, 65]]


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def bounds_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)


def attention_weights(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """(heads, T, T) of one sequence's queries and keys, (T, heads, width)."""
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[2] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1)


def agree(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_attention_of_short_sequences_is_the_definitions(
    lengths: list[int], width: int, dtype: torch.dtype, causal: bool
) -> None:
    from multihop.pretrain.models.gpu.short_attention import short_attention  # needs Triton

    parts = [normal(seed, sum(lengths), 3, width, dtype=dtype).requires_grad_() for seed in range(3)]
    upstream = normal(3, sum(lengths), 3, width, dtype=dtype)
    out = short_attention(*parts, bounds_of(lengths), max(lengths), causal, 0.0)
    found = [out, *torch.autograd.grad(out, parts, upstream)]
    wide = [part.detach().float().requires_grad_() for part in parts]
    pieces = [part.split(lengths) for part in wide]
    expected = torch.cat(
        [torch.einsum("hqk,khd->qhd", attention_weights(q, k, causal), v) for q, k, v in zip(*pieces, strict=True)]
    )
    agree(found, [expected, *torch.autograd.grad(expected, wide, upstream.float())], 2e-2)


@pytest.mark.parametrize("lengths", [[64, 40, 64], [16, 9], [128, 100]])
def test_dropped_attention_weights_are_dropped_in_the_backward_pass_too(lengths: list[int]) -> None:
    """Values that are one-hot vectors make the outputs the weights themselves, so that the mask is seen: of 64 keys at
    a time, as many as a head is wide. The calls share a seed, and so a mask."""
    from multihop.pretrain.models.gpu.short_attention import short_attention  # needs Triton

    rate, tokens, heads, width = 0.25, sum(lengths), 32, min(max(lengths), 64)
    bounds, longest = bounds_of(lengths), max(lengths)
    query, key = (normal(seed, tokens, heads, width, dtype=torch.float16).requires_grad_() for seed in (0, 1))

    def attended(value: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return short_attention(query, key, value, bounds, longest, False, rate)

    shown = []
    for first in range(0, longest, width):
        one_hot = torch.cat([torch.eye(longest, device="cuda")[:length, first : first + width] for length in lengths])
        padded = F.pad(one_hot, (0, width - one_hot.shape[1]))
        shown.append(attended(padded[:, None].expand(tokens, heads, width).half().contiguous(), 1).detach())
    weights = torch.cat(shown, -1)
    value = normal(2, tokens, heads, width, dtype=torch.float16).requires_grad_()
    out = attended(value, 1)
    assert torch.equal(out, attended(value, 1))
    assert not torch.equal(out, attended(value, 2))
    upstream = normal(3, tokens, heads, width, dtype=torch.float16)
    found = [out, *torch.autograd.grad(out, (query, key, value), upstream)]
    wide = [part.detach().float().requires_grad_() for part in (query, key, value)]
    expected, kept = [], []
    for q, k, v, of_one in zip(*(part.split(lengths) for part in [*wide, weights]), strict=True):
        mask = of_one[..., : len(q)].transpose(0, 1) != 0
        kept.append(mask.float().flatten())
        expected.append(torch.einsum("hqk,khd->qhd", attention_weights(q, k, False) * mask / (1 - rate), v))
    whole = torch.cat(expected)
    agree(found, [whole, *torch.autograd.grad(whole, wide, upstream.float())], 2e-2)
    drawn = torch.cat(kept)
    assert abs(float(drawn.mean()) - (1 - rate)) < 5 * (rate * (1 - rate) / len(drawn)) ** 0.5


def test_attention_takes_these_kernels_for_short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(
        "multihop.pretrain.models.gpu.short_attention.short_attention", lambda *given: called.append(1) or given[0]
    )
    for length in (128, 129):
        parts = [normal(seed, 2 * length, 2, 64, dtype=torch.bfloat16) for seed in range(3)]
        attend(*parts, Sequences(bounds_of([length, length]).long(), length, 2 * length), False, 0.0)
    assert len(called) == 1


@pytest.mark.parametrize("dtype", NARROW)
def test_gelu_is_torchs(dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-12, 12, 10_001), torch.tensor([0.0, 1e4, -1e4])]).to("cuda", dtype).requires_grad_()
    upstream = normal(1, 10_004, dtype=dtype)
    out, expected = gelu(x), F.gelu(x)
    agree(
        [out, *torch.autograd.grad(out, x, upstream)],
        [expected, *torch.autograd.grad(expected, x, upstream)],
        2**-7 if dtype == torch.bfloat16 else 2**-10,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("rate", [0.0, 0.25])
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 16), (300, 768), (5000, 1024)])
def test_dropout_add_norm_is_torchs(rows: int, width: int, rate: float, dtype: torch.dtype, tolerance: float) -> None:
    from multihop.pretrain.models.gpu.dropout_add_norm import dropout_add_norm  # needs Triton

    x, residual, upstream = (normal(seed, rows, width, 2)[..., 0].to(dtype) for seed in range(3))
    weight, bias = (normal(seed, width, 2)[:, 0].to(dtype) for seed in (3, 4))  # like x, not contiguous in fp32
    given = [part.requires_grad_() for part in (x, residual, weight, bias)]
    torch.manual_seed(1)
    out = dropout_add_norm(*given, 1e-5, rate)
    found = [out, *torch.autograd.grad(out, given, upstream)]
    # Without a residual and with an identity for a norm's weights, the smallest value of a row is that of the dropped.
    torch.manual_seed(1)
    ones = torch.ones(rows, width, device="cuda")
    identity = torch.ones(width, device="cuda"), torch.zeros(width, device="cuda")
    shown = dropout_add_norm(ones, 0 * ones, *identity, 1e-5, rate)
    kept = (shown > 0) if rate else torch.ones_like(shown, dtype=torch.bool)
    if rate and rows > 1:
        assert abs(float(kept.float().mean()) - (1 - rate)) < 5 * (rate * (1 - rate) / kept.numel()) ** 0.5
        columns = kept.float().mean(0)
        assert float((columns - (1 - rate)).abs().max()) < 6 * (rate * (1 - rate) / rows) ** 0.5
    wide = [part.detach().float().requires_grad_() for part in given]
    total = wide[1] + wide[0] * kept / (1 - rate)
    expected = F.layer_norm(total, (width,), wide[2], wide[3], 1e-5)
    wanted = [expected, *torch.autograd.grad(expected, wide, upstream.float())]
    for ours, theirs in zip(found, wanted, strict=True):
        scale = float(theirs.detach().abs().max()) if theirs.numel() else 0.0
        torch.testing.assert_close(ours.float(), theirs, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("length", [100, 129])
def test_recomputed_layers_draw_the_same_masks(length: int) -> None:
    """Of short sequences by the kernels of this project, of longer ones by FlashAttention."""
    gradients = []
    for kind in ("none", "selective", "full"):
        config = parse_model_config(
            {"family": "bert", "layers": 2, "hidden": 128, "heads": 2, "max_positions": 256, "dropout": 0.2}
        )
        model = build_model(config, 100)
        init_weights(model, 1)
        model = model.to("cuda", torch.bfloat16).train()
        if kind != "none":
            checkpoint_activations(model, kind)
        ids = np.random.default_rng(1).integers(5, 100, 2 * length + 3)
        packed = pack(ids, cumulative_lengths([length, length + 3]), np.zeros(len(ids), np.int64))
        torch.manual_seed(1)
        model.encode(packed_to_device(packed, torch.device("cuda"))).float().square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.layers.parameters()]))
    assert torch.allclose(gradients[1], gradients[0], rtol=2e-2, atol=1e-3 * float(gradients[0].abs().max()))
    assert torch.allclose(gradients[2], gradients[0], rtol=2e-2, atol=1e-3 * float(gradients[0].abs().max()))
