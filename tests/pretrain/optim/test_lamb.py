"""LAMB on flat buffers equals LAMB in one process, however the tensors are cut and spread over ranks."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihop.pretrain.optim.lamb import Lamb
from multihop.pretrain.optim.slices import Slice

LR, BETAS, EPS, DECAY, MAX_TRUST = 0.02, (0.9, 0.99), 1e-6, 0.1, 4.0

Tensors = dict[str, Tensor]
AllReduce = Callable[[Tensor], None]


def is_trusted(name: str) -> bool:
    return name.startswith("matrix")


def alone(_: Tensor) -> None:
    """Sum over one rank, which changes nothing."""


def make_weights(shapes: list[tuple[int, ...]], seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{'matrix' if len(shape) > 1 else 'bias'}.{i}": torch.randn(shape, generator=generator)
        for i, shape in enumerate(shapes)
    }


def gradients(weights: Tensors, step: int) -> Tensors:
    generator = torch.Generator().manual_seed(1000 + step)
    return {name: torch.randn(weight.shape, generator=generator) for name, weight in weights.items()}


def reference(
    weights: Tensors, steps: int, max_trust_ratio: float = MAX_TRUST, first: int = 0
) -> tuple[Tensors, Tensors]:
    """Run You et al. 2020, algorithm 2, line by line in float64; returns parameters and last trust ratios."""
    x = {name: weight.double() for name, weight in weights.items()}
    m = {name: torch.zeros_like(weight) for name, weight in x.items()}
    v = {name: torch.zeros_like(weight) for name, weight in x.items()}
    ratios: Tensors = {}
    for t in range(1, steps + 1):
        g = {name: gradient.double() for name, gradient in gradients(weights, first + t).items()}
        for i in x:
            m[i] = BETAS[0] * m[i] + (1 - BETAS[0]) * g[i]
            v[i] = BETAS[1] * v[i] + (1 - BETAS[1]) * g[i] ** 2
            m_hat = m[i] / (1 - BETAS[0] ** t)
            v_hat = v[i] / (1 - BETAS[1] ** t)
            r = m_hat / (v_hat.sqrt() + EPS)
            ratio = torch.tensor(1.0)
            if is_trusted(i):
                r = r + DECAY * x[i]
                if x[i].norm() > 0 and r.norm() > 0:
                    ratio = (x[i].norm() / r.norm()).clamp(max=max_trust_ratio)
            x[i] = x[i] - LR * ratio * r
            ratios[i] = ratio
    return x, ratios


class Rank:
    """The flat buffers of one rank, one per group, as ZeRO would pass them to the optimizer."""

    def __init__(
        self, pieces: list[Slice], groups: list[tuple[Tensor, bool]], max_trust_ratio: float = MAX_TRUST
    ) -> None:
        self.pieces, self.flats = pieces, [flat for flat, _ in groups]
        self.optimizer = Lamb(
            [{"params": [f], "trust": t, "weight_decay": DECAY if t else 0.0} for f, t in groups],
            LR,
            BETAS,
            EPS,
            weight_decay=0.0,
            max_trust_ratio=max_trust_ratio,
        )

    def step(self, grads: Tensors) -> None:
        """Step as ZeRO-1, 2 and 3 do: the optimizer sees one group at a time."""
        for flat in self.flats:
            flat.grad = torch.zeros_like(flat)
        for piece in self.pieces:
            flat_grad = piece.flat.grad
            assert flat_grad is not None
            piece.view_of(flat_grad).copy_(grads[piece.name].view(-1)[piece.start : piece.start + piece.numel])
        groups = self.optimizer.param_groups
        for group in groups:
            self.optimizer.param_groups = [group]
            self.optimizer.step()
        self.optimizer.param_groups = groups


def place(
    weights: Tensors,
    shares: list[dict[str, tuple[int, int]]],
    gap: Callable[[], int],
    max_trust_ratio: float = MAX_TRUST,
) -> list[Rank]:
    """Return ranks whose flat buffers hold `shares[rank][name] = (start, stop)`, with `gap()` elements before each."""
    ranks = []
    for share in shares:
        pieces: list[Slice] = []
        groups = []
        for trust in (True, False):
            at, planned = 0, []
            for name, (start, stop) in share.items():
                if is_trusted(name) == trust:
                    at += gap()
                    planned.append((name, start, stop, at))
                    at += stop - start
            flat = torch.zeros(at + gap() + 1)
            for name, start, stop, at in planned:
                piece = Slice(name, tuple(weights[name].shape), start, stop - start, flat, at)
                piece.view_of(flat).copy_(weights[name].view(-1)[start:stop])
                pieces.append(piece)
            groups.append((flat, trust))
        ranks.append(Rank(pieces, groups, max_trust_ratio))
    return ranks


def run_ranks(ranks: list[Rank], weights: Tensors, steps: int, shared: bool = True, first: int = 0) -> None:
    """Run `steps` steps of all ranks, each in a thread; without `shared`, no rank gets the sums of others."""
    barrier = threading.Barrier(len(ranks), timeout=30)
    slots: dict[int, Tensor] = {}

    def sum_of(rank: int) -> AllReduce:
        def all_reduce(tensor: Tensor) -> None:
            slots[rank] = tensor.clone()
            barrier.wait()
            total = torch.stack([slots[r] for r in range(len(ranks))]).sum(0)
            barrier.wait()
            tensor.copy_(total)

        return all_reduce

    def work(number: int) -> None:
        rank = ranks[number]
        rank.optimizer.bind(rank.pieces, sum_of(number) if shared else alone, list(weights))
        for t in range(1, steps + 1):
            rank.step(gradients(weights, first + t))

    with ThreadPoolExecutor(len(ranks)) as pool:
        for done in [pool.submit(work, number) for number in range(len(ranks))]:
            done.result(timeout=60)


def gather(ranks: list[Rank], weights: Tensors) -> Tensors:
    whole = {name: torch.full_like(weight, torch.nan) for name, weight in weights.items()}
    for rank in ranks:
        for piece in rank.pieces:
            whole[piece.name].view(-1)[piece.start : piece.start + piece.numel] = piece.view_of(piece.flat)
    return whole


def deviation(got: Tensors, expected: Tensors) -> float:
    """Return the largest difference, in units of the largest weight of its tensor (of 1 if that is smaller)."""
    return max(
        float((got[name] - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1.0)) for name in expected
    )


def one_rank(weights: Tensors, max_trust_ratio: float = MAX_TRUST) -> list[Rank]:
    return place(weights, [{name: (0, weight.numel()) for name, weight in weights.items()}], lambda: 0, max_trust_ratio)


SHAPES = [(7, 5), (5,), (40, 33), (1, 1), (33,), (2, 3, 4), (600, 500)]  # the last is longer than a run on a CPU


def test_one_rank_follows_the_paper() -> None:
    weights = make_weights(SHAPES)
    ranks = one_rank(weights)
    run_ranks(ranks, weights, steps=30)
    expected, ratios = reference(weights, steps=30)
    assert deviation(gather(ranks, weights), expected) < 3e-6
    got = ranks[0].optimizer.trust_ratios()
    assert set(got) == {name for name in weights if is_trusted(name)}
    assert all(got[name] == pytest.approx(float(ratios[name]), rel=1e-5) for name in got)


def test_whole_tensors_in_one_call_follow_the_paper() -> None:
    """DeepSpeed does this without ZeRO: parameters are the module's tensors, and all groups are stepped together."""
    weights = make_weights(SHAPES)
    params = {name: weight.clone() for name, weight in weights.items()}
    groups = [
        {"params": [p for n, p in params.items() if is_trusted(n)], "weight_decay": DECAY},
        {"params": [p for n, p in params.items() if not is_trusted(n)], "weight_decay": 0.0, "trust": False},
    ]
    optimizer = Lamb(groups, LR, BETAS, EPS, weight_decay=0.0, max_trust_ratio=MAX_TRUST)
    calls: list[Tensor] = []
    pieces = [Slice(name, tuple(p.shape), 0, p.numel(), p, 0) for name, p in params.items()]
    optimizer.bind(pieces, calls.append, list(params))
    for t in range(1, 31):
        for name, gradient in gradients(weights, t).items():
            params[name].grad = gradient
        optimizer.step()
    assert deviation(params, reference(weights, steps=30)[0]) < 3e-6
    assert len(calls) == 30


@st.composite
def cut_worlds(draw: st.DrawFn) -> tuple[Tensors, list[Rank]]:
    """Draw tensors, and ranks that hold arbitrary pieces of them in buffers with padding; some ranks hold nothing."""
    side = st.integers(1, 24)
    shapes: list[tuple[int, ...]] = draw(st.lists(st.tuples(side) | st.tuples(side, side), min_size=1, max_size=5))
    weights = make_weights(shapes, seed=draw(st.integers(0, 100)))
    shares: list[dict[str, tuple[int, int]]] = [{} for _ in range(draw(st.integers(1, 4)))]
    for name, weight in weights.items():
        cuts = sorted(
            draw(st.lists(st.integers(0, weight.numel()), min_size=len(shares) - 1, max_size=len(shares) - 1))
        )
        for share, start, stop in zip(shares, [0, *cuts], [*cuts, weight.numel()], strict=True):
            if stop > start:
                share[name] = (start, stop)
    return weights, place(weights, shares, lambda: draw(st.integers(0, 3)))


@settings(max_examples=40)
@given(cut_worlds())
def test_however_tensors_are_cut_the_ranks_follow_the_paper(world: tuple[Tensors, list[Rank]]) -> None:
    weights, ranks = world
    run_ranks(ranks, weights, steps=30)
    assert deviation(gather(ranks, weights), reference(weights, steps=30)[0]) < 3e-6
    for rank in ranks:
        held = {id(flat): torch.ones(flat.shape, dtype=torch.bool) for flat in rank.flats}
        for piece in rank.pieces:
            piece.view_of(held[id(piece.flat)]).fill_(False)
        assert all(bool((flat[held[id(flat)]] == 0).all()) for flat in rank.flats)  # padding stays


def halves(weights: Tensors) -> list[Rank]:
    middle = {name: weight.numel() // 3 for name, weight in weights.items()}
    shares = [
        {name: (0, middle[name]) for name in weights if middle[name]},
        {name: (middle[name], weight.numel()) for name, weight in weights.items()},
    ]
    return place(weights, shares, lambda: 0)


def test_norms_of_local_pieces_would_be_found_out() -> None:
    """The comparison above fails for a wrong LAMB, in which each rank takes its own pieces for whole tensors."""
    weights = make_weights([(30, 20), (50, 4)])
    for weight in weights.values():
        weight.view(-1)[weight.numel() // 3 :] *= 0.1
    expected = reference(weights, steps=30)[0]
    honest, local = halves(weights), halves(weights)
    run_ranks(honest, weights, steps=30)
    run_ranks(local, weights, steps=30, shared=False)
    assert deviation(gather(honest, weights), expected) < 3e-6
    assert deviation(gather(local, weights), expected) > 0.05


def test_excluded_tensors_are_stepped_as_by_adamw_and_without_communication() -> None:
    weights = make_weights([(64,), (9,)])
    flat = torch.cat([weights["bias.0"], weights["bias.1"]])
    theirs = torch.nn.Parameter(flat.clone())
    rank = Rank(
        [Slice("bias.0", (64,), 0, 64, flat, 0), Slice("bias.1", (9,), 0, 9, flat, 64)],
        [(flat, False)],
    )
    sums: list[Tensor] = []
    rank.optimizer.bind(rank.pieces, sums.append, list(weights))
    adamw = torch.optim.AdamW([theirs], LR, BETAS, EPS, weight_decay=0.0, fused=True)
    for t in range(10):
        grads = gradients(weights, t)
        theirs.grad = torch.cat([grads["bias.0"], grads["bias.1"]])
        adamw.step()
        rank.step(grads)
    assert torch.equal(flat, theirs)
    assert not sums
    assert rank.optimizer.trust_ratios() == {}


def test_every_rank_takes_part_in_the_sum_once_a_step_with_one_layout() -> None:
    weights = make_weights([(4, 4), (4,), (3, 3)])
    shares = [{name: (0, weight.numel()) for name, weight in weights.items()}, {}]
    for rank in place(weights, shares, lambda: 1):
        sums: list[Tensor] = []
        rank.optimizer.bind(rank.pieces, sums.append, list(weights))
        rank.step(gradients(weights, 0))
        assert [(tuple(tensor.shape), tensor.dtype) for tensor in sums] == [((2, 3), torch.float64)]


@pytest.mark.parametrize("zero", ["weights", "update"])
def test_a_zero_norm_means_a_ratio_of_one(zero: str) -> None:
    weights = make_weights([(3, 4)])
    if zero == "weights":
        weights["matrix.0"].zero_()
    ranks = one_rank(weights)
    grads = {name: torch.zeros_like(g) if zero == "update" else g for name, g in gradients(weights, 1).items()}
    optimizer = ranks[0].optimizer
    if zero == "update":
        optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.bind(ranks[0].pieces, alone, list(weights))
    ranks[0].step(grads)
    got = gather(ranks, weights)["matrix.0"]
    # At the first step the update is the gradient's sign.
    expected = weights["matrix.0"] if zero == "update" else -LR * grads["matrix.0"].sign()
    assert torch.allclose(got, expected, rtol=1e-4, atol=0)
    assert optimizer.trust_ratios() == {"matrix.0": 1.0}


def test_the_ratio_is_cut_off() -> None:
    weights = make_weights([(20, 20)])
    weights["matrix.0"] *= 100
    ranks = one_rank(weights, max_trust_ratio=2.5)
    run_ranks(ranks, weights, steps=3)
    assert ranks[0].optimizer.trust_ratios() == {"matrix.0": 2.5}
    assert deviation(gather(ranks, weights), reference(weights, 3, max_trust_ratio=2.5)[0]) < 3e-6


def test_a_step_before_bind_and_a_step_without_gradients_do_nothing() -> None:
    weights = make_weights([(3, 4), (5,)])
    ranks = one_rank(weights)
    ranks[0].step({name: torch.zeros_like(weight) for name, weight in weights.items()})
    assert not ranks[0].optimizer.state
    ranks[0].optimizer.bind(ranks[0].pieces, alone, list(weights))
    for flat in ranks[0].flats:
        flat.grad = None
    ranks[0].optimizer.step()
    assert not ranks[0].optimizer.state
    assert deviation(gather(ranks, weights), weights) == 0


def test_a_new_optimizer_with_the_same_state_goes_on_bit_for_bit() -> None:
    weights = make_weights(SHAPES[:-1])
    through = halves(weights)
    run_ranks(through, weights, steps=8)

    first, second = halves(weights), halves(weights)
    run_ranks(first, weights, steps=3)
    for old, new in zip(first, second, strict=True):
        for old_flat, new_flat in zip(old.flats, new.flats, strict=True):
            new_flat.copy_(old_flat)
            state = old.optimizer.state[old_flat]
            assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
            assert state["step"].device.type == "cpu" and state["step"] == 3
            new.optimizer.state[new_flat] = {kind: tensor.clone() for kind, tensor in state.items()}
    run_ranks(second, weights, steps=5, first=3)
    for a, b in zip(through, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.flats, b.flats, strict=True))


def test_gradients_are_left_as_they_are() -> None:
    weights = make_weights([(8, 8), (8,)])
    ranks = one_rank(weights)
    ranks[0].optimizer.bind(ranks[0].pieces, alone, list(weights))
    grads = gradients(weights, 0)
    ranks[0].step(grads)
    for piece in ranks[0].pieces:
        assert piece.flat.grad is not None
        assert torch.equal(piece.view_of(piece.flat.grad), grads[piece.name].view(-1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_nothing_waits_and_the_result_is_the_same() -> None:
    weights = make_weights(SHAPES)
    flat = torch.cat([weight.view(-1) for name, weight in weights.items() if is_trusted(name)]).cuda()
    pieces, at = [], 0
    for name, weight in weights.items():
        if is_trusted(name):
            pieces.append(Slice(name, tuple(weight.shape), 0, weight.numel(), flat, at))
            at += weight.numel()
    optimizer = Lamb(
        [{"params": [flat], "weight_decay": DECAY}], LR, BETAS, EPS, weight_decay=0.0, max_trust_ratio=MAX_TRUST
    )
    optimizer.bind(pieces, alone, list(weights))
    for t in range(1, 31):
        grads = gradients(weights, t)
        flat.grad = torch.cat([grads[piece.name].view(-1) for piece in pieces]).cuda()
        # The first step moves the record of ratios over.
        torch.cuda.set_sync_debug_mode("error" if t > 1 else "default")
        optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
    got = {piece.name: piece.view_of(flat).cpu().view(piece.shape) for piece in pieces}
    expected = reference(weights, steps=30)[0]
    assert deviation(got, {name: expected[name] for name in got}) < 3e-6
