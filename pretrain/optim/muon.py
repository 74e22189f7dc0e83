"""Muon for ZeRO's flat buffers: each matrix is orthogonalized whole, on one rank.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon), as torch.optim.Muon has it. Under ZeRO an optimizer gets
flat buffers that hold slices of the model's tensors. The momentum is elementwise, so slices are enough for it; the
orthogonalization needs the whole matrix. Each matrix is assigned to one rank: the others send it their slices of the
momentum and get their slices of the update back, in one exchange each way for all matrices that a call of
`step` updates. A rank that holds most of a matrix gets it, as long as the work stays even.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multihop.pretrain.device_type import device_type
from multihop.pretrain.optim.norms import squared_norms
from multihop.pretrain.optim.slices import Slice, fused_adamw

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration (Jordan et al. 2024): steepest at zero, with singular values that
end between 0.7 and 1.2."""
_ITERATIONS = 5
_EPS = 1e-7
_ELEMENTS_AT_ONCE = 2**24
"""Elements of matrices of one shape that are orthogonalized as one batch."""
_MAX_IMBALANCE = 1.1
"""How much more than its equal share of the work a rank may get, so that less is sent."""

Span = tuple[str, int, int]
"""A slice of a flattened matrix: the matrix's name, the offset, and the number of elements."""
AllToAll = Callable[[Tensor, list[int], list[int]], Tensor]
"""Sends runs of a (N,) tensor, of these numbers of elements, to the ranks in order; returns what they sent, of these
numbers of elements."""


@dataclass(frozen=True)
class StepGroup:
    """Matrices that one call of `step` updates: all of the model's or, under ZeRO, those of a parameter group (stages 1
    and 2) or a sub-group (stage 3)."""

    flats: Sequence[Tensor]
    """The flat buffers with this rank's slices of them."""
    shapes: Mapping[str, tuple[int, int]]
    """The shapes of the matrices by name, in the same order on every rank."""


@dataclass(frozen=True)
class _Exchange:
    """The slices that this rank sends to each rank, and gets from each; none to and from itself."""

    sent: list[list[Span]]
    received: list[list[Span]]

    def run(self, all_to_all: AllToAll, slice_of: Callable[[Span], Tensor], empty: Tensor) -> dict[Span, Tensor]:
        """Send slices; returns those received, flat.

        Args:
            slice_of: Returns a slice that is sent, flat.
            empty: An empty tensor with the dtype and device of the exchanged slices.
        """
        order = [span for spans in self.received for span in spans]
        received = all_to_all(
            torch.cat([empty, *(slice_of(span).to(empty) for spans in self.sent for span in spans)]),
            [sum(numel for _, _, numel in spans) for spans in self.sent],
            [sum(numel for _, _, numel in spans) for spans in self.received],
        )
        return dict(zip(order, received.split([numel for _, _, numel in order]), strict=True))


@dataclass(frozen=True)
class _Plan:
    """How the matrices of a call of `step` are updated."""

    assigned: dict[str, list[Span]]
    """The matrices that this rank orthogonalizes, and the slices that make them up."""
    momenta: _Exchange
    updates: _Exchange


class Muon(torch.optim.Optimizer):
    """Muon for the groups with `muon=True`, which have matrices only, and AdamW for the others.

    m <- momentum * m + (1 - momentum) * g;  u = momentum * m + (1 - momentum) * g;
    w <- (1 - lr * weight_decay) * w - lr * scale(w) * orthogonalize(u)

    State of a parameter (here: flat buffer): `step`, float32 () on the CPU; `momentum_buffer`, or under AdamW `exp_avg`
    and `exp_avg_sq`, float32, like the parameter. Parameters and gradients are float32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        scale: Callable[[int, int], float],
    ) -> None:
        """`params` are tensors or parameter groups; a group may set `muon` and all arguments.

        Args:
            betas, eps: Used by groups with `muon=False` alone.
            scale: Returns the factor of an update for the numbers of rows and columns of its matrix.
        """
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "scale": scale, "muon": True})
        self._shapes: dict[str, tuple[int, int]] = {}
        self._slices: dict[Tensor, list[Slice]] = {}
        self._plans: dict[Tensor, _Plan] = {}
        self._all_to_all: AllToAll | None = None
        self._device = torch.device("cpu")
        self._scratch = torch.empty(0)

    def bind(
        self,
        groups: Sequence[StepGroup],
        slices: Sequence[Slice],
        held: Sequence[Sequence[Span]],
        rank: int,
        device: torch.device,
        all_to_all: AllToAll,
    ) -> None:
        """Set where the slices of the matrices are. Before that a step does nothing: some of DeepSpeed's wrappers call
        step() while they are initialized.

        Args:
            groups: What each call of `step` updates.
            slices: The slices of all parameters that this rank holds.
            held: By rank, what it holds of all parameters: in ZeRO stage 0 everything, in the others a part of its own.
            rank: This rank.
            device: Where matrices are orthogonalized.
            all_to_all: Exchanges tensors on `device` with all ranks; with several ranks each call of `step` that has
                matrices calls it twice.
        """
        self._device, self._all_to_all = device, all_to_all
        self._shapes = {name: shape for group in groups for name, shape in group.shapes.items()}
        self._slices = {}
        for piece in slices:
            if piece.name in self._shapes and piece.numel:
                self._slices.setdefault(piece.flat, []).append(piece)
        spans: dict[str, list[list[Span]]] = {name: [[] for _ in held] for name in self._shapes}
        for holder, spans_of_rank in enumerate(held):
            for span in sorted(spans_of_rank, key=lambda span: span[1]):
                if span[0] in self._shapes and span[2]:
                    spans[span[0]][holder].append(span)
        self._plans = {}
        for group in groups:
            plan = _plan({name: spans[name] for name in group.shapes}, group.shapes, rank, len(held))
            self._plans |= dict.fromkeys(group.flats, plan)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have a gradient; returns what `closure` returned."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        if self._all_to_all is None:
            return loss
        of_matrices: list[tuple[dict[str, Any], Tensor]] = []
        for group in self.param_groups:
            flats = [flat for flat in group["params"] if flat.grad is not None]
            if group["muon"]:
                of_matrices.extend((group, flat) for flat in flats)
            else:
                for flat in flats:
                    self._step_adamw(group, flat)
        if of_matrices:
            self._step_muon(of_matrices)
        return loss

    def _step_adamw(self, group: dict[str, Any], flat: Tensor) -> None:
        assert flat.grad is not None
        state = self._advance(flat, ("exp_avg", "exp_avg_sq"))
        step = torch.full((), float(state["step"]), device=flat.device)  # filled in: a copy would wait for the device
        fused_adamw(
            group, flat, flat.grad, state["exp_avg"], state["exp_avg_sq"], step, group["lr"], group["weight_decay"]
        )

    def _step_muon(self, flats: list[tuple[dict[str, Any], Tensor]]) -> None:
        assert self._all_to_all is not None
        plan = self._plans[flats[0][1]]
        momenta: dict[Span, Tensor] = {}
        used, scratch = 0, self._scratch_of([flat for _, flat in flats])
        for group, flat in flats:
            assert flat.grad is not None
            momentum, gradient = self._advance(flat, ("momentum_buffer",))["momentum_buffer"], flat.grad
            momentum.lerp_(gradient, 1 - group["momentum"])
            nesterov = scratch[used : used + flat.numel()]
            torch.lerp(gradient.view(-1), momentum.view(-1), group["momentum"], out=nesterov)
            used += flat.numel()
            for piece in self._slices.get(flat, ()):
                momenta[piece.name, piece.start, piece.numel] = piece.view_of(nesterov)

        # In bf16 the iteration converges as well; a CPU is slower in it.
        dtype = torch.bfloat16 if device_type(self._device) == "cuda" else torch.float32
        empty = torch.empty(0, dtype=dtype).to(self._device)
        is_single_rank = len(plan.momenta.sent) == 1
        received = {} if is_single_rank else plan.momenta.run(self._all_to_all, momenta.__getitem__, empty)
        whole = {
            name: torch.cat([received[s] if s in received else momenta[s].to(empty) for s in spans])
            if len(spans) > 1
            else (received[spans[0]] if spans[0] in received else momenta[spans[0]].to(empty))
            for name, spans in plan.assigned.items()
        }
        updates = orthogonalize_all({name: flat.view(self._shapes[name]) for name, flat in whole.items()})

        def computed(span: Span) -> Tensor:
            name, start, numel = span
            return updates[name].reshape(-1)[start : start + numel]

        results = {} if is_single_rank else plan.updates.run(self._all_to_all, computed, empty)
        for group, flat in flats:
            for piece in self._slices.get(flat, ()):
                span = (piece.name, piece.start, piece.numel)
                update = results[span] if span in results else computed(span)
                weight = piece.view_of(flat)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update.to(weight), alpha=-group["lr"] * group["scale"](*self._shapes[piece.name]))

    def _advance(self, flat: Tensor, moments: Sequence[str]) -> dict[str, Any]:
        """The state of a flat buffer, with its number of updates, this one included."""
        state = self.state[flat]
        if not state:
            state["step"] = torch.tensor(0.0)
            for moment in moments:
                state[moment] = torch.zeros_like(flat)
        state["step"] += 1.0
        return state

    def _scratch_of(self, flats: list[Tensor]) -> Tensor:
        """Room for what is orthogonalized. Kept on a CPU, where fresh pages each step would cost more than the step."""
        numel, device = sum(flat.numel() for flat in flats), flats[0].device
        if device_type(device) != "cpu":
            return torch.empty(numel, device=device)
        if self._scratch.numel() < numel:
            self._scratch = torch.empty(numel)
        return self._scratch


def assign_matrices(
    shapes: Mapping[str, tuple[int, int]], held: Mapping[str, Sequence[int]], world_size: int
) -> dict[str, int]:
    """The rank that orthogonalizes each matrix: the one that holds most of it, unless that makes the work uneven.

    Args:
        held: How many elements of each matrix each rank holds.
    """
    costs = {name: math.prod(shape) * min(shape) for name, shape in shapes.items()}
    ranks = range(world_size)
    limit = _MAX_IMBALANCE * max(sum(costs.values()) / world_size, max(costs.values(), default=0))
    loads, workers = [0 for _ in ranks], {}
    for name in sorted(costs, key=lambda name: -costs[name]):
        most = max(ranks, key=lambda rank: (held[name][rank], -loads[rank]))
        worker = most if loads[most] + costs[name] <= limit else min(ranks, key=lambda rank: loads[rank])
        workers[name] = worker
        loads[worker] += costs[name]
    return workers


def _plan(
    held: Mapping[str, list[list[Span]]], shapes: Mapping[str, tuple[int, int]], rank: int, world_size: int
) -> _Plan:
    """Deal the matrices to the ranks, and list what this rank exchanges with the others.

    Args:
        held: By matrix and rank, the slices that the rank holds.
    """
    ranks = range(world_size)
    numels = {name: [sum(span[2] for span in spans) for spans in of_ranks] for name, of_ranks in held.items()}
    workers = assign_matrices(shapes, numels, world_size)
    assigned = [[name for name in shapes if workers[name] == worker] for worker in ranks]

    def sources(name: str) -> list[list[Span]]:
        """By rank, the slices that make up what the worker orthogonalizes: its own alone, if it holds the matrix."""
        worker = workers[name]
        is_whole = numels[name][worker] == math.prod(shapes[name])
        return [spans if each == worker or not is_whole else [] for each, spans in enumerate(held[name])]

    def except_own_rank(spans: Callable[[int], list[Span]]) -> list[list[Span]]:
        return [spans(other) if other != rank else [] for other in ranks]

    return _Plan(
        {
            name: sorted((span for spans in sources(name) for span in spans), key=lambda span: span[1])
            for name in assigned[rank]
        },
        _Exchange(
            except_own_rank(lambda to: [span for name in assigned[to] for span in sources(name)[rank]]),
            except_own_rank(lambda of: [span for name in assigned[rank] for span in sources(name)[of]]),
        ),
        _Exchange(
            except_own_rank(lambda to: [span for name in assigned[rank] for span in held[name][to]]),
            except_own_rank(lambda of: [span for name in assigned[of] for span in held[name][rank]]),
        ),
    )


def orthogonalize_all(matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`orthogonalize` each matrix, those of one shape in batches."""
    by_shape: dict[torch.Size, list[str]] = {}
    for name, matrix in matrices.items():
        by_shape.setdefault(matrix.shape, []).append(name)
    done: dict[str, Tensor] = {}
    for shape, names in by_shape.items():
        batch_size = max(1, _ELEMENTS_AT_ONCE // shape.numel())
        for first in range(0, len(names), batch_size):
            batch = names[first : first + batch_size]
            done |= dict(zip(batch, orthogonalize(torch.stack([matrices[name] for name in batch])), strict=True))
    return done


def orthogonalize(matrices: Tensor) -> Tensor:
    """(B, m, n) -> (B, m, n): the singular values of each matrix brought near 1 by five Newton-Schulz iterations."""
    a, b, c = _COEFFICIENTS
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
    norms = squared_norms(list(matrices.float())).sqrt().clamp(min=_EPS)
    x = wide / norms[:, None, None].to(wide.dtype)
    for _ in range(_ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide is matrices else x.mT


def original_scale(rows: int, columns: int) -> float:
    """The factor of an update in Jordan et al. 2024."""
    return math.sqrt(max(1.0, rows / columns))


def adamw_rms_scale(rows: int, columns: int) -> float:
    """The factor with which an update is about as large as AdamW's, so that the learning rates of AdamW can be used
    (Liu et al. 2025, arXiv 2502.16982, section 2.2)."""
    return 0.2 * math.sqrt(max(rows, columns))
