"""Training under DeepSpeed: optimizer steps of a model, and its state as named slices."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multihop.pretrain.config import EngineConfig, TrainingConfig
from multihop.pretrain.engine.activation_checkpointing import checkpoint_activations
from multihop.pretrain.engine.deepspeed_internals import (
    drop_gradients,
    held_slices,
    initialize,
    owned_slices,
    replicated_weights,
    spans_of_rank,
    update_model_weights,
    updated_together,
)
from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.engine.ranks import Ranks
from multihop.pretrain.models.build import Model, ParamInit
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.optim.lamb import Lamb
from multihop.pretrain.optim.muon import Muon, StepGroup
from multihop.pretrain.optim.norms import clip_grad_norm_
from multihop.pretrain.optim.optimizers import is_orthogonalized, moments_of, parameter_groups
from multihop.pretrain.optim.slices import whole_shape
from multihop.pretrain.uncompiled import load_compiler

_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class StepResult:
    """The outcome of an optimizer step."""

    grad_norm: float
    """The gradient's global norm before clipping."""
    applied: bool
    """False where a loss or gradient was non-finite: weights and optimizer state are unchanged, on every rank."""


def read_scalars(tensors: dict[str, Tensor]) -> dict[str, float]:
    """The values of scalar tensors of one dtype and device, in one copy to the host."""
    return dict(zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True)) if tensors else {}


class Engine:
    """A model under DeepSpeed, on this process's rank."""

    def __init__(
        self,
        config: TrainingConfig,
        model: Model,
        ranks: Ranks,
        micro_batch_size: int,
        param_init: ParamInit | None = None,
    ) -> None:
        """Initialize DeepSpeed with `model`.

        Args:
            model: a model with weights, the same on every rank; or on the meta device, in which case its memory is
                allocated here: under ZeRO-3 module by module, so that no rank ever holds the whole model.
            micro_batch_size: the maximum number of samples in a micro-batch.
            param_init: sets the weights of a model on the meta device; None leaves that to `restore`.
        """
        self.ranks, self._stage = ranks, config.engine.zero_stage
        _transform(model, config.engine)
        self._deepspeed, self.zero = initialize(config, model, ranks, micro_batch_size, param_init)
        outer: Any = self._deepspeed.optimizer
        self._optimizer: torch.optim.Optimizer = outer if self.zero is None else outer.optimizer
        self._stage_0_result = StepResult(math.nan, True)
        if self._stage == 0:
            self._optimizer.register_step_pre_hook(self._guard_stage_0(config.optimizer.max_grad_norm))
        self._scaler: Any = outer.loss_scaler if config.engine.precision == "fp16" else None
        if self._scaler is not None:
            # engine.max_consecutive_nonfinite_steps decides when to give up.
            self._scaler.raise_error_at_min_scale = False
        self.parameters = {name: whole_shape(parameter) for name, parameter in model.named_parameters()}
        self.slices = owned_slices(model, self.zero, self._stage, ranks.rank, ranks.world_size)
        self._held = held_slices(model, self.slices, self._stage)
        self._of_recipe = [
            {name: value for name, value in group.items() if name != "params"}
            for group in parameter_groups(self.module, config.optimizer)
        ]
        self._moments = {name: moments_of(config.optimizer, name, shape) for name, shape in self.parameters.items()}
        for piece in self._held:
            self._allocate_state(piece.flat, self._moments[piece.name])
        if isinstance(self._optimizer, Muon):
            self._bind_muon(self._optimizer)
        if isinstance(self._optimizer, Lamb):
            all_reduce_sum_ = ranks.all_reduce_sum_ if self._stage > 0 else _no_reduction  # stage 0 splits no tensor
            self._optimizer.bind(self._held, all_reduce_sum_, list(self.parameters))

    @property
    def module(self) -> Model:
        """The model, in the precision it computes in."""
        module: Model = self._deepspeed.module
        return module

    def forward_backward(self, batch: Batch, global_counts: dict[str, float]) -> dict[str, Tensor]:
        """Accumulate a micro-batch's gradient; returns the model's sums, float64 () on the device, without a sync.

        The gradient is that of sum_name(sum / global_counts[name]): DeepSpeed's average over the ranks is undone
        here. A borrowed micro-batch (all counts 0) has weight 0; it runs because every rank must take part in
        collectives.
        """
        sums = self._deepspeed(**to_device(batch.inputs, self.ranks.device))
        loss = sum(sums[name] / global_counts[name] for name in batch.counts)
        is_counted = any(batch.counts.values())
        # A non-finite loss may have a finite gradient. A weight of NaN makes that gradient non-finite too, so that the
        # single check of the gradient detects both, on every rank, without waiting for the device.
        weight = torch.where(torch.isfinite(loss.detach()), self.ranks.world_size if is_counted else 0.0, math.nan)
        self._deepspeed.backward(loss * weight, scale_wrt_gas=False)
        return {name: value.detach().double() * is_counted for name, value in sums.items()}

    def step(self, lr: float) -> StepResult:
        """Reduce and clip the gradient and update the weights, unless the gradient is non-finite on any rank.

        Waits for the device once, for the gradient's norm.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["lr_ratio"]
        self._deepspeed.step()
        if self._stage == 0:
            return self._stage_0_result
        applied: bool = self._deepspeed.was_step_applied()
        if not applied:
            drop_gradients(self.zero, self._stage)
        return StepResult(float(self._deepspeed.get_global_grad_norm()), applied)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """The sums of the model's outputs over some batches of this rank, without dropout and gradients."""
        self.module.eval()
        totals: dict[str, Tensor] = {}
        zero = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for batch in batches:
            sums = self.module(**to_device(batch.inputs, self.ranks.device))
            is_counted = bool(any(batch.counts.values()))
            for name, value in sums.items():
                totals[name] = totals.get(name, zero) + value.double() * is_counted
        self.module.train()
        return read_scalars(totals)

    def state(self) -> tuple[dict[str, Tensor], int, dict[str, float]]:
        """The state to save in a checkpoint: views of the slices that this rank owns, "KIND/NAME@START" -> float32
        (numel,); the number of updates so far; the counters of a dynamic loss scale."""
        tensors = {}
        for piece in self.slices:
            state = self._optimizer.state[piece.flat]
            tensors[f"weight/{piece.name}@{piece.start}"] = piece.view_of(piece.flat.detach())
            for kind in self._moments[piece.name]:
                tensors[f"{kind}/{piece.name}@{piece.start}"] = piece.view_of(state[kind])
        updates = int(self._optimizer.state[self.slices[-1].flat]["step"]) if self.slices else 0
        return tensors, updates, self._scaler_state()

    @property
    def state_names(self) -> list[str]:
        """KIND/NAME of each tensor of which `state` returns slices on some rank."""
        return [f"{kind}/{name}" for name in self.parameters for kind in ("weight", *self._moments[name])]

    def slices_to_restore(self, with_state: bool) -> list[tuple[str, str, int, int]]:
        """The slices that `restore` needs, as (kind, parameter, start, elements)."""
        return [
            (kind, piece.name, piece.start, piece.numel)
            for piece in self._held
            for kind in ("weight", *(self._moments[piece.name] if with_state else ()))
        ]

    @torch.no_grad()
    def restore(self, values: Iterator[Tensor], updates: int | None, counters: dict[str, float]) -> None:
        """Set the weights, and unless `updates` is None the optimizer's state, from a checkpoint. A collective call.

        Args:
            values: float32, one for each of `slices_to_restore`, in that order.
            updates: the number of updates of the moments; None leaves moments and `counters` as they are.
            counters: those of `state`; used only if the loss scale is dynamic and was dynamic when it was saved.
        """
        for piece in self._held:
            piece.view_of(piece.flat.detach()).copy_(next(values))
            if updates is not None:
                state = self._optimizer.state[piece.flat]
                state["step"].fill_(float(updates))
                for kind in self._moments[piece.name]:
                    piece.view_of(state[kind]).copy_(next(values))
        update_model_weights(self.zero, self._stage)
        if updates is not None and self._scaler_state().keys() == counters.keys():
            for key, value in counters.items():
                setattr(self._scaler, key, value if key == "cur_scale" else int(value))

    def replicated_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are equal on all ranks, by name: weights, buffers, and in stage 0 the moments.

        In stage 3 all ranks must take all of them.
        """
        yield from replicated_weights(self.module, self._stage)
        yield from self.module.named_buffers()
        if self._stage == 0:
            for piece in self._held:
                for kind in self._moments[piece.name]:
                    yield f"{kind} of {piece.name}", self._optimizer.state[piece.flat][kind]

    def changed_hyperparameters(self) -> list[str]:
        """Hyperparameters of the optimizer that are not the recipe's, such as "betas (0.9, 0.95) for (0.9, 0.999)"."""
        groups = zip(self._optimizer.param_groups, self._of_recipe, strict=True)
        changed = [
            f"{name} {group[name]} for {value}"
            for group, of_recipe in groups
            for name, value in of_recipe.items()
            if group[name] != value
        ]
        return list(dict.fromkeys(changed))

    def metrics(self) -> dict[str, float]:
        """Additional metrics for a row."""
        return {} if self._scaler is None else {"loss_scale": float(self._scaler.cur_scale)}

    def destroy(self) -> None:
        """Free the memory."""
        self._deepspeed.destroy()

    def _scaler_state(self) -> dict[str, float]:
        """The counters of a dynamic loss scale; empty for a static one, which is not state."""
        is_dynamic = self._scaler is not None and self._scaler.dynamic
        return {key: float(getattr(self._scaler, key)) for key in _SCALER_STATE} if is_dynamic else {}

    def _bind_muon(self, optimizer: Muon) -> None:
        held = [
            spans_of_rank(self.module, self.zero, self._stage, rank, self.ranks.world_size)
            for rank in range(self.ranks.world_size)
        ]
        assert held[self.ranks.rank] == [(piece.name, piece.start, piece.numel) for piece in self._held]
        groups = []
        for flats, updated in updated_together(self.module, self._optimizer, self.zero, self._stage):
            shapes = {name: self.parameters[name] for name in updated if is_orthogonalized(name, self.parameters[name])}
            groups.append(StepGroup(flats, {name: (shape[0], shape[1]) for name, shape in shapes.items()}))
        optimizer.bind(
            groups,
            self._held,
            held,
            self.ranks.rank,
            self.ranks.device,
            self.ranks.all_to_all,
        )

    def _allocate_state(self, flat: Tensor, moments: tuple[str, ...]) -> None:
        """Allocate state as the optimizers do in their first step, which may be skipped: checkpoints need the state."""
        state = self._optimizer.state[flat]
        if not state:
            fused = isinstance(self._optimizer, torch.optim.AdamW)  # its kernel counts steps on the device
            state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device if fused else "cpu")
            for kind in moments:
                state[kind] = torch.zeros_like(flat, requires_grad=False)

    def _guard_stage_0(self, max_grad_norm: float) -> Callable[..., None]:
        """A hook between DeepSpeed's all-reduce and the update that clips, and checks and stores the gradient's norm.

        In stage 0 DeepSpeed does neither. To skip the update, the hook removes the gradients.
        """

        def guard(*_: object) -> None:
            norm = float(clip_grad_norm_(self.module.parameters(), max_grad_norm))
            self._stage_0_result = StepResult(norm, math.isfinite(norm))
            if not math.isfinite(norm):
                self.module.zero_grad(set_to_none=True)

        return guard


def _no_reduction(tensor: Tensor) -> None:
    """Replaces an all-reduce where every rank has the norms of whole tensors."""


def _transform(model: Model, config: EngineConfig) -> None:
    """Apply compilation and activation checkpointing to the layers."""
    if config.compile:
        load_compiler()
        for layer in model.layers:
            # Dynamic, because the number of tokens differs between batches. `forward` is compiled instead of the layer,
            # so that activation checkpointing calls compiled code: compiled around it, nothing would be, because
            # attention is not.
            layer.forward = torch.compile(layer.forward, dynamic=True)
    if config.activation_checkpointing != "none":
        checkpoint_activations(model, config.activation_checkpointing)
