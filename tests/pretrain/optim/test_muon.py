"""Muon on flat buffers equals torch.optim.Muon on whole matrices, however these are cut and spread over ranks."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihop.pretrain.optim.muon import (
    AllToAll,
    Muon,
    Span,
    StepGroup,
    adamw_rms_scale,
    assign_matrices,
    original_scale,
    orthogonalize,
)
from multihop.pretrain.optim.slices import Slice

LR, MOMENTUM, BETAS, EPS, DECAY = 0.02, 0.9, (0.9, 0.99), 1e-6, 0.1
SCALES = {"original": original_scale, "match_rms_adamw": adamw_rms_scale}

Tensors = dict[str, Tensor]
Shapes = dict[str, tuple[int, int]]


def make_matrices(shapes: list[tuple[int, int]], seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {f"matrix.{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}


def gradients(weights: Tensors, step: int) -> Tensors:
    generator = torch.Generator().manual_seed(1000 + step)
    return {name: torch.randn(weight.shape, generator=generator) for name, weight in weights.items()}


def reference(weights: Tensors, steps: int, scale: str = "original") -> Tensors:
    """Run torch.optim.Muon on whole matrices in float64, without its conversion to bf16; returns the weights."""
    params = {name: weight.double() for name, weight in weights.items()}
    optimizer = torch.optim.Muon(
        list(params.values()), lr=LR, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn=scale
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
        for t in range(1, steps + 1):
            for name, gradient in gradients(weights, t).items():
                params[name].grad = gradient.double()
            optimizer.step()
    return params


class Rank:
    """The flat buffers of one rank, one for each call of `step`, as ZeRO would pass them to the optimizer."""

    def __init__(self, pieces: list[Slice], flats: list[Tensor], calls: list[StepGroup], scale: str) -> None:
        self.pieces, self.flats, self.calls = pieces, flats, calls
        self.optimizer = Muon(
            [{"params": list(flats)}], LR, MOMENTUM, BETAS, EPS, weight_decay=DECAY, scale=SCALES[scale]
        )

    def step(self, grads: Tensors) -> None:
        """Step as ZeRO-3 does: the optimizer sees one flat buffer at a time."""
        for flat in self.flats:
            flat.grad = torch.zeros_like(flat)
        for piece in self.pieces:
            assert piece.flat.grad is not None
            piece.view_of(piece.flat.grad).copy_(grads[piece.name].view(-1)[piece.start : piece.start + piece.numel])
        (group,) = self.optimizer.param_groups
        for flat in self.flats:
            group["params"] = [flat]
            self.optimizer.step()
        group["params"] = list(self.flats)


def place(
    weights: Tensors,
    shares: list[dict[str, tuple[int, int]]],
    gap: Callable[[], int] = lambda: 0,
    calls: int = 1,
    scale: str = "original",
) -> list[Rank]:
    """Return ranks whose flat buffers hold `shares[rank][name] = (start, stop)`, with `gap()` elements before each.

    Matrix i is in the flat buffer, and the call of `step`, i modulo `calls`.
    """
    shapes: Shapes = {name: (weight.shape[0], weight.shape[1]) for name, weight in weights.items()}
    ranks = []
    for share in shares:
        pieces, flats, together = list[Slice](), list[Tensor](), list[StepGroup]()
        for call in range(calls):
            at, planned = 0, []
            for name in list(weights)[call::calls]:
                if name in share:
                    start, stop = share[name]
                    at += gap()
                    planned.append((name, start, stop, at))
                    at += stop - start
            flat = torch.zeros(at + gap() + 1)
            for name, start, stop, where in planned:
                piece = Slice(name, shapes[name], start, stop - start, flat, where)
                piece.view_of(flat).copy_(weights[name].view(-1)[start:stop])
                pieces.append(piece)
            flats.append(flat)
            together.append(StepGroup([flat], {name: shapes[name] for name in list(weights)[call::calls]}))
        ranks.append(Rank(pieces, flats, together, scale))
    return ranks


def run_ranks(ranks: list[Rank], weights: Tensors, steps: int) -> int:
    """Run `steps` steps of all ranks, each in a thread; returns how many elements they sent."""
    barrier = threading.Barrier(len(ranks), timeout=10)
    slots: dict[int, list[Tensor]] = {}
    sent = [0 for _ in ranks]

    def exchange_of(rank: int) -> AllToAll:
        def all_to_all(message: Tensor, sizes: list[int], expected: list[int]) -> Tensor:
            assert len(ranks) > 1, "a single rank sends nothing"
            sent[rank] += len(message)
            slots[rank] = list(message.clone().split(sizes))
            barrier.wait()
            received = [slots[other][rank] for other in range(len(ranks))]
            barrier.wait()
            assert [len(part) for part in received] == expected
            return torch.cat(received)

        return all_to_all

    held: list[list[Span]] = [[(piece.name, piece.start, piece.numel) for piece in rank.pieces] for rank in ranks]

    def work(number: int) -> None:
        rank = ranks[number]
        rank.optimizer.bind(rank.calls, rank.pieces, held, number, torch.device("cpu"), exchange_of(number))
        for t in range(1, steps + 1):
            rank.step(gradients(weights, t))

    with ThreadPoolExecutor(len(ranks)) as pool:
        for done in [pool.submit(work, number) for number in range(len(ranks))]:
            done.result(timeout=60)
    return sum(sent)


def gather(ranks: list[Rank], weights: Tensors) -> Tensors:
    whole = {name: torch.full_like(weight, torch.nan) for name, weight in weights.items()}
    for rank in ranks:
        for piece in rank.pieces:
            whole[piece.name].view(-1)[piece.start : piece.start + piece.numel] = piece.view_of(piece.flat)
    return whole


def deviation(got: Tensors, expected: Tensors) -> float:
    """Return the largest relative difference of a matrix, in the Frobenius norm."""
    return max(float((got[name].double() - expected[name]).norm() / expected[name].norm()) for name in expected)


SHAPES = [(7, 5), (5, 7), (40, 33), (1, 1), (1, 9), (40, 33), (120, 30), (33, 40)]


@pytest.mark.parametrize("scale", SCALES)
def test_one_rank_is_torchs_muon(scale: str) -> None:
    weights = make_matrices(SHAPES)
    everything = {name: (0, weight.numel()) for name, weight in weights.items()}
    ranks = place(weights, [everything], scale=scale)
    assert run_ranks(ranks, weights, steps=20) == 0
    assert deviation(gather(ranks, weights), reference(weights, 20, scale)) < 1e-6


@st.composite
def partitions(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[dict[str, tuple[int, int]]], int]:
    """Draw some shapes, cut at random positions over some ranks, and the number of calls of `step`."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6))
    world_size = draw(st.integers(1, 4))
    shares: list[dict[str, tuple[int, int]]] = [{} for _ in range(world_size)]
    for i, (rows, columns) in enumerate(shapes):
        size = rows * columns
        cuts = sorted(draw(st.lists(st.integers(0, size), min_size=world_size - 1, max_size=world_size - 1)))
        for share, start, stop in zip(shares, [0, *cuts], [*cuts, size], strict=True):
            share[f"matrix.{i}"] = (start, stop)
    return shapes, shares, draw(st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(partitions(), st.randoms(use_true_random=False))
def test_any_partition_is_torchs_muon(
    partition: tuple[list[tuple[int, int]], list[dict[str, tuple[int, int]]], int], random: Random
) -> None:
    shapes, shares, calls = partition
    weights = make_matrices(shapes)
    ranks = place(weights, shares, gap=lambda: random.randrange(3), calls=calls)
    run_ranks(ranks, weights, steps=3)
    assert deviation(gather(ranks, weights), reference(weights, 3)) < 1e-6


def test_stage_0_orthogonalizes_each_matrix_once() -> None:
    """Every rank has all matrices: no momentum is sent, and an update only by the rank that computed it."""
    weights = make_matrices(SHAPES)
    everything = {name: (0, weight.numel()) for name, weight in weights.items()}
    ranks = place(weights, [everything] * 3)
    sent = run_ranks(ranks, weights, steps=2)
    assert sent == 2 * 2 * sum(weight.numel() for weight in weights.values())
    expected = reference(weights, 2)
    for rank in ranks:
        assert deviation(gather([rank], weights), expected) < 1e-6


def test_whole_matrices_are_not_sent() -> None:
    """Two ranks have two of four equal matrices each, so that the work is already balanced."""
    weights = make_matrices([(16, 16)] * 4)
    shares = [{name: (0, 256) for name in list(weights)[part]} for part in (slice(0, 2), slice(2, 4))]
    ranks = place(weights, shares)
    assert run_ranks(ranks, weights, steps=2) == 0
    assert deviation(gather(ranks, weights), reference(weights, 2)) < 1e-6


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=40), st.integers(1, 8))
def test_the_work_is_shared(sizes: list[tuple[int, int]], world_size: int) -> None:
    """No rank has more than 1.1 times its share or the largest matrix, plus one matrix, as with a greedy division."""
    shapes = {f"matrix.{i}": shape for i, shape in enumerate(sizes)}
    held = {name: [math.prod(shape), *[0] * (world_size - 1)] for name, shape in shapes.items()}
    workers = assign_matrices(shapes, held, world_size)
    costs = {name: math.prod(shape) * min(shape) for name, shape in shapes.items()}
    loads = [sum(costs[name] for name in shapes if workers[name] == rank) for rank in range(world_size)]
    assert sum(loads) == sum(costs.values())
    assert max(loads) <= 1.1 * max(sum(loads) / world_size, max(costs.values())) + max(costs.values())


def test_orthogonalized_matrices_have_singular_values_near_1() -> None:
    torch.manual_seed(0)
    for shape in ((3, 30, 20), (2, 20, 30), (1, 64, 64)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert float(values.max()) < 1.25
        assert float(values.quantile(0.05)) > 0.5


def test_a_matrix_of_zeros_stays() -> None:
    assert orthogonalize(torch.zeros(1, 4, 3)).abs().max() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_nothing_waits_and_the_update_is_torchs() -> None:
    """Matrices are orthogonalized in bf16 there, on both sides."""
    weights = make_matrices([(64, 96), (96, 64), (64, 96), (256, 64)])
    flat = torch.cat([weight.view(-1) for weight in weights.values()]).cuda()
    pieces, at = [], 0
    for name, weight in weights.items():
        pieces.append(Slice(name, tuple(weight.shape), 0, weight.numel(), flat, at))
        at += weight.numel()
    optimizer = Muon([{"params": [flat]}], LR, MOMENTUM, BETAS, EPS, weight_decay=DECAY, scale=original_scale)
    shapes: Shapes = {name: (weight.shape[0], weight.shape[1]) for name, weight in weights.items()}
    held: list[list[Span]] = [[(piece.name, piece.start, piece.numel) for piece in pieces]]
    optimizer.bind([StepGroup([flat], shapes)], pieces, held, 0, flat.device, lambda *_: pytest.fail("one rank"))
    params = {name: torch.nn.Parameter(weight.cuda()) for name, weight in weights.items()}
    theirs = torch.optim.Muon(
        list(params.values()), lr=LR, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="original"
    )
    for t in range(1, 11):
        grads = gradients(weights, t)
        flat.grad = torch.cat([grads[name].view(-1) for name in weights]).cuda()
        for name, parameter in params.items():
            parameter.grad = grads[name].cuda()
        torch.cuda.set_sync_debug_mode("error" if t > 1 else "default")
        optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
        theirs.step()
    got = {piece.name: piece.view_of(flat).view(piece.shape) for piece in pieces}
    assert deviation(got, {name: parameter.detach().double() for name, parameter in params.items()}) < 1e-2
