"""LAMB for ZeRO's flat buffers: trust ratios use the norms of whole tensors.

Algorithm 2 of You et al. 2020 (arXiv 1904.00962). Under ZeRO an optimizer gets flat buffers that hold slices of the
model's tensors; other ranks have the other slices. The moments and the update are elementwise, so slices are enough
for them. The trust ratio needs the norms of whole tensors: the squared norms of all slices are all-reduced over the
ranks, once for all tensors that a call of `step` updates.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multihop.pretrain.device_type import device_type
from multihop.pretrain.optim.norms import squared_norms
from multihop.pretrain.optim.slices import Slice, fused_adamw

# On a CPU, runs of this many elements stay in the cache during all operations, which is faster than whole buffers.
# Shorter runs are slower, because of the number of calls. A GPU processes a whole buffer at once.
_CPU_RUN = 2**18


@dataclass(frozen=True)
class _Layout:
    """The positions of slices of parameters in a flat buffer."""

    runs: list[list[slice]]
    """Slices that are updated together, in order; gaps between them are padding."""
    owners: Tensor
    """int64 (slices of all runs,): the parameter of each, as an index into the names given to `bind`."""


@dataclass(frozen=True)
class _PendingUpdate:
    """An update without its trust ratios; each list has one item per slice of the layout."""

    lr: float
    owners: Tensor
    weights: list[Tensor]
    updates: list[Tensor]
    squares: list[Tensor]
    """For each run of slices, float64 (2, slices): the squared norms of weights and updates."""


class Lamb(torch.optim.Optimizer):
    """LAMB with bias correction, decoupled weight decay and a clipped trust ratio.

    r = m_hat / (sqrt(v_hat) + eps) + weight_decay * w;  w <- w - lr * min(|w| / |r|, max_trust_ratio) * r

    The ratio is 1 where either norm is 0. A group with `trust=False` (biases and norms) always has the ratio 1, which
    makes it AdamW.

    State of a parameter (here: flat buffer), as torch.optim.AdamW's: `step`, float32 () on the CPU; `exp_avg` and
    `exp_avg_sq`, float32, like the parameter. Parameters and gradients are float32. A step never waits for the GPU.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_trust_ratio: float,
    ) -> None:
        """`params` are tensors or parameter groups; a group may set `trust` and all arguments but `max_trust_ratio`.

        Args:
            max_trust_ratio: Upper bound of the trust ratios.
        """
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "trust": True})
        self._max_trust = max_trust_ratio
        self._names: list[str] = []
        self._layouts: dict[Tensor, _Layout] = {}
        self._all_reduce: Callable[[Tensor], None] | None = None
        self._scratch = torch.empty(0)
        self._ratios = torch.empty(0, dtype=torch.float64)

    def bind(self, slices: Sequence[Slice], all_reduce: Callable[[Tensor], None], names: Sequence[str]) -> None:
        """Set the positions of the slices in the flat buffers. Before this call a step does nothing: some of
        DeepSpeed's wrappers call step() while they are initialized.

        Args:
            slices: The slices that this rank owns; in ZeRO stage 0 whole parameters, on every rank.
            all_reduce: Sums a float64 (2, len(names)) tensor over the ranks that share parameters, in place. Each
                step that has trusted parameters calls it once, also on a rank that owns none of their elements.
            names: The names of all parameters, in the same order on every rank.
        """
        position = {name: i for i, name in enumerate(names)}
        slices_by_flat: dict[Tensor, list[Slice]] = {}
        for piece in slices:
            if piece.numel:
                slices_by_flat.setdefault(piece.flat, []).append(piece)
        self._names, self._ratios = list(names), torch.zeros(len(names), dtype=torch.float64)
        self._layouts = {flat: _layout(flat, pieces, position) for flat, pieces in slices_by_flat.items()}
        self._all_reduce = all_reduce

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have a gradient; returns what `closure` returned."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        if self._all_reduce is None:
            return loss
        trusted: list[tuple[dict[str, Any], list[Tensor]]] = []
        for group in self.param_groups:
            flats = [flat for flat in group["params"] if flat.grad is not None]
            if not group["trust"]:
                self._step_without_trust(group, flats)
            elif group["params"]:
                trusted.append((group, flats))
        if trusted:
            self._step_with_trust(trusted, trusted[0][0]["params"][0].device)
        return loss

    def trust_ratios(self) -> dict[str, float]:
        """The latest trust ratio of each parameter that has had one. Waits for the GPU."""
        return {n: r for n, r in zip(self._names, self._ratios.tolist(), strict=True) if r > 0}

    def _step_without_trust(self, group: dict[str, Any], flats: list[Tensor]) -> None:
        for flat in flats:
            assert flat.grad is not None
            exp_avg, exp_avg_sq, step = self._advance(flat)
            fused_adamw(group, flat, flat.grad, exp_avg, exp_avg_sq, step, group["lr"], group["weight_decay"])

    def _step_with_trust(self, trusted: list[tuple[dict[str, Any], list[Tensor]]], device: torch.device) -> None:
        assert self._all_reduce is not None
        pending, used = [], 0
        scratch = self._scratch_buffer(device, sum(flat.numel() for _, flats in trusted for flat in flats))
        for group, flats in trusted:
            for flat in flats:
                if flat in self._layouts:  # else all of it is padding
                    pending.append(self._compute_update(group, flat, scratch[used : used + flat.numel()]))
                    used += flat.numel()

        squares = torch.zeros(2, len(self._names), dtype=torch.float64, device=device)
        for update in pending:
            squares.index_add_(1, update.owners, torch.cat(update.squares, 1))
        self._all_reduce(squares)
        weight_norms, update_norms = squares.sqrt()
        ratios = (weight_norms / update_norms).clamp(max=self._max_trust)
        ratios = torch.where((weight_norms == 0) | (update_norms == 0), 1.0, ratios)
        self._ratios = torch.where(squares.sum(0) > 0, ratios, self._ratios.to(device))

        for update in pending:
            slice_ratios = ratios[update.owners].float().unbind()
            for weight, direction, ratio in zip(update.weights, update.updates, slice_ratios, strict=True):
                weight.addcmul_(direction, ratio, value=-update.lr)

    def _compute_update(self, group: dict[str, Any], flat: Tensor, out: Tensor) -> _PendingUpdate:
        """Advance the moments and write the update, without its trust ratios, to `out`."""
        assert flat.grad is not None
        exp_avg, exp_avg_sq, step = self._advance(flat)
        buffers = flat.view(-1), flat.grad.reshape(-1), exp_avg.view(-1), exp_avg_sq.view(-1), out
        layout = self._layouts[flat]
        pending = _PendingUpdate(group["lr"], layout.owners, [], [], [])
        for run in layout.runs:
            weight, grad, mean, square, update = (buffer[run[0].start : run[-1].stop] for buffer in buffers)
            torch.mul(weight, group["weight_decay"], out=update)
            # With lr=-1 and no weight decay, AdamW adds m_hat / (sqrt(v_hat) + eps) to its weight argument.
            fused_adamw(group, update, grad, mean, square, step, lr=-1.0, weight_decay=0.0)
            weights, updates = [buffers[0][piece] for piece in run], [out[piece] for piece in run]
            pending.weights.extend(weights)
            pending.updates.extend(updates)
            pending.squares.append(squared_norms([*weights, *updates]).view(2, -1))
        return pending

    def _advance(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Count an update of a flat buffer; returns its moments, and the count on the buffer's device."""
        state = self.state[flat]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(flat), torch.zeros_like(flat)
        state["step"] += 1.0
        # torch.full instead of a copy, because a copy from the CPU would wait for the GPU.
        return state["exp_avg"], state["exp_avg_sq"], torch.full((), float(state["step"]), device=flat.device)

    def _scratch_buffer(self, device: torch.device, numel: int) -> Tensor:
        """A buffer for the updates, which are applied once the norms are known.

        On a CPU it is kept, because touching fresh pages in each step would take longer than the step; a GPU's caching
        allocator reuses the memory, also for activations between steps.
        """
        if device_type(device) != "cpu":
            return torch.empty(numel, device=device)
        if self._scratch.numel() < numel:
            self._scratch = torch.empty(numel)
        return self._scratch


def _layout(flat: Tensor, slices: list[Slice], position: dict[str, int]) -> _Layout:
    longest = _CPU_RUN if device_type(flat.device) == "cpu" else flat.numel()
    pieces, owners = [], []
    for whole in sorted(slices, key=lambda whole: whole.flat_start):
        end = whole.flat_start + whole.numel
        for start in range(whole.flat_start, end, longest):
            pieces.append(slice(start, min(start + longest, end)))
            owners.append(position[whole.name])
    runs = [[piece] for piece in pieces] if device_type(flat.device) == "cpu" else [pieces]
    return _Layout(runs, torch.tensor(owners, device=flat.device))
