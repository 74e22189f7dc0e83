"""The one file that knows DeepSpeed: a model goes in, optimizer steps and named slices of the state come out."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pretrain.config import TrainingConfig
from pretrain.deepspeed_config import fill_deepspeed_config
from pretrain.lamb import Lamb
from pretrain.models import Model
from pretrain.models.inputs import on_device
from pretrain.objectives.batch import Batch
from pretrain.optimizers import MOMENTS, build_optimizer
from pretrain.ranks import Ranks
from pretrain.slices import held_slices, owned_slices, whole_shape

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._flash_attention_forward.default,
    _aten._efficient_attention_forward.default,
}
"""Operations whose results are worth their memory: projections and attention (not where it is made of products)."""
_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class Step:
    """What became of an optimizer step."""

    grad_norm: float
    """The gradient's global norm before clipping."""
    applied: bool
    """False where a loss or gradient was not finite: weights and state are as they were, on every rank."""


Fill = Callable[[str, Tensor], None]
"""Sets the parameter of that name."""


class Engine:
    """A model under DeepSpeed, this process being one of its ranks."""

    def __init__(
        self, config: TrainingConfig, model: Model, ranks: Ranks, micro_batch: int, fill: Fill | None = None
    ) -> None:
        """Set `model` up for training.

        Args:
            model: with its weights, the same on every rank; or on the meta device, in which case its memory is taken
                here: under ZeRO-3 a module at a time, so that no rank ever holds the whole.
            micro_batch: the most samples that a micro-batch will have.
            fill: sets the weights of a model on the meta device; None leaves them to `restore`.
        """
        self.ranks, self._stage = ranks, config.engine.zero_stage
        self._deepspeed = _initialise(config, model, ranks, micro_batch, fill)
        outer: Any = self._deepspeed.optimizer
        self._zero: Any = outer if self._stage > 0 else None
        self._optimizer: torch.optim.Optimizer = outer.optimizer if self._stage > 0 else outer
        self._last_of_stage_0 = Step(math.nan, True)
        if self._stage == 0:
            self._optimizer.register_step_pre_hook(self._guard_stage_0(config.optimizer.clip_norm))
        self._scaler: Any = outer.loss_scaler if config.engine.precision == "fp16" else None
        if self._scaler is not None:
            self._scaler.raise_error_at_min_scale = False  # engine.max_skipped decides when to give up
        self.parameters = {name: whole_shape(parameter) for name, parameter in model.named_parameters()}
        self.slices = owned_slices(model, self._zero, self._stage, ranks.rank, ranks.world_size)
        self._held = held_slices(model, self.slices, self._stage)
        for piece in self._held:
            self._allocate_state(piece.flat)
        if isinstance(self._optimizer, Lamb):
            all_reduce = ranks.sum_in_place if self._stage > 0 else _keep  # in stage 0 every rank holds everything
            self._optimizer.bind(self._held, all_reduce, list(self.parameters))

    @property
    def module(self) -> Model:
        """The model, in the precision it computes in."""
        module: Model = self._deepspeed.module
        return module

    def forward_backward(self, batch: Batch, global_counts: dict[str, float]) -> dict[str, Tensor]:
        """Add a micro-batch's gradient; returns the sums that the model returned, float64 on the device.

        The gradient is that of sum_name(sum / global_counts[name]): DeepSpeed averages over the ranks, which is
        undone here. A borrowed micro-batch (all counts 0) takes part with weight 0, because every rank has to.
        """
        sums = self._deepspeed(**on_device(batch.inputs, self.ranks.device))
        loss = sum(sums[name] / global_counts[name] for name in batch.counts)
        mine = any(batch.counts.values())
        # A loss that is not finite may have a gradient that is: it is spoilt here, so that one look at the gradient
        # finds both, on every rank, without waiting for the device.
        weight = torch.where(torch.isfinite(loss.detach()), self.ranks.world_size if mine else 0.0, math.nan)
        self._deepspeed.backward(loss * weight, scale_wrt_gas=False)
        return {name: value.detach().double() * mine for name, value in sums.items()}

    def step(self, lr: float) -> Step:
        """Reduce and clip the gradient and update the weights, unless the gradient is not finite on some rank."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._deepspeed.step()
        if self._stage == 0:
            return self._last_of_stage_0
        return Step(float(self._deepspeed.get_global_grad_norm()), self._deepspeed.was_step_applied())

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """The model's sums over some batches of this rank, without dropout and without a gradient."""
        self.module.eval()
        totals: dict[str, Tensor] = {}
        for batch in batches:
            sums = self.module(**on_device(batch.inputs, self.ranks.device))
            mine = bool(any(batch.counts.values()))
            for name, value in sums.items():
                totals[name] = totals.get(name, torch.zeros((), dtype=torch.float64)) + value.double().cpu() * mine
        self.module.train()
        return {name: float(value) for name, value in totals.items()}

    def state(self) -> tuple[dict[str, Tensor], int, dict[str, float]]:
        """What a checkpoint needs: views of what this rank owns as "KIND/NAME@START" -> float32 (numel,), the number
        of updates so far, and the loss scaler's numbers under fp16."""
        tensors, updates = {}, 0
        for piece in self.slices:
            state = self._optimizer.state[piece.flat]
            tensors[f"weight/{piece.name}@{piece.start}"] = piece.of(piece.flat.detach())
            for kind in MOMENTS:
                tensors[f"{kind}/{piece.name}@{piece.start}"] = piece.of(state[kind])
            updates = int(state["step"])
        numbers = {key: float(getattr(self._scaler, key)) for key in _SCALER_STATE if hasattr(self._scaler, key)}
        return tensors, updates, numbers

    def wanted(self, with_state: bool) -> list[tuple[str, str, int, int]]:
        """What `restore` has to be given, as (kind, parameter, start, elements)."""
        kinds = ("weight", *MOMENTS) if with_state else ("weight",)
        return [(kind, piece.name, piece.start, piece.numel) for piece in self._held for kind in kinds]

    @torch.no_grad()
    def restore(self, values: Iterator[Tensor], updates: int | None, counters: dict[str, float]) -> None:
        """Set the weights, and unless `updates` is None the optimizer's state, from a checkpoint; all ranks together.

        Args:
            values: float32, for each of `wanted` in its order.
            updates: how many updates the moments went through; None leaves them and `counters` as they are.
            counters: as `state` gave them.
        """
        for piece in self._held:
            piece.of(piece.flat.detach()).copy_(next(values))
            if updates is not None:
                state = self._optimizer.state[piece.flat]
                state["step"].fill_(float(updates))
                for kind in MOMENTS:
                    piece.of(state[kind]).copy_(next(values))
        self._spread_weights()
        for key, value in counters.items() if updates is not None else ():
            if hasattr(self._scaler, key):
                setattr(self._scaler, key, value if key == "cur_scale" else int(value))

    def numbers(self) -> dict[str, float]:
        """What else a row of metrics shows."""
        return {} if self._scaler is None else {"loss_scale": float(self._scaler.cur_scale)}

    def destroy(self) -> None:
        """Give the memory back."""
        self._deepspeed.destroy()

    def _allocate_state(self, flat: Tensor) -> None:
        """As the optimizers do in their first step, which may be a skipped one when the first checkpoint is due."""
        state = self._optimizer.state[flat]
        if not state:
            on_device = isinstance(self._optimizer, torch.optim.AdamW)  # its fused kernel counts where it computes
            state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device if on_device else "cpu")
            for kind in MOMENTS:
                state[kind] = torch.zeros_like(flat, requires_grad=False)

    def _spread_weights(self) -> None:
        """From the fp32 slices of all ranks to the weights that the model computes with."""
        zero = self._zero
        if self._stage in (1, 2):
            zero.update_lp_params()
        elif self._stage == 3:
            for sub_group in range(len(zero.fp16_groups)):
                zero._reassign_or_swap_out_partitioned_parameters(sub_group)
            if zero.persistent_parameters:
                zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def _guard_stage_0(self, clip_norm: float) -> Callable[..., None]:
        """DeepSpeed neither tells the norm in stage 0 nor looks whether it is finite, so this does, and clips, between
        its reduction and the update. Without gradients an optimizer changes nothing."""

        def guard(*_: object) -> None:
            norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), clip_norm or math.inf))
            self._last_of_stage_0 = Step(norm, math.isfinite(norm))
            if not math.isfinite(norm):
                self.module.zero_grad(set_to_none=True)

        return guard


def checkpoint_activations(model: Model, kept: str) -> None:
    """Let each layer keep less, and compute the rest again in the backward pass (Chen et al. 2016).

    Args:
        kept: engine.activation_checkpointing: keep-inputs, or keep-products: what is cheap to compute and large to
            keep is computed again (Korthikanti et al. 2022, section 5).
    """
    again: Any = partial(checkpoint, use_reentrant=False)
    if kept == "keep-products":
        again = partial(again, context_fn=partial(create_selective_checkpoint_contexts, _keep_products))
    for layer in model.layers:
        layer.forward = partial(again, layer.forward)


def _keep_products(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def _keep(tensor: Tensor) -> None:
    """The sum over ranks of what every rank has whole."""


def _initialise(config: TrainingConfig, model: Model, ranks: Ranks, micro_batch: int, fill: Fill | None) -> Any:
    import deepspeed

    # One line a collective: DeepSpeed calls torch's functions by their old names.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    # Its shared-memory reduction is compiled at the first start, for a minute, and a start that is killed meanwhile
    # leaves a lock on which every later one hangs. gloo does the same work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if config.engine.precision == "fp16" and not torch.cuda.is_available():
        # DeepSpeed looks for fp16 kernels in the processor. Without them torch is slow, and right all the same.
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    if config.engine.compile:
        for layer in model.layers:
            layer.compile(dynamic=True)  # each batch has another number of pieces
    if config.engine.activation_checkpointing != "none":
        checkpoint_activations(model, config.engine.activation_checkpointing)
    assert isinstance(config.engine.deepspeed, dict)
    filled = fill_deepspeed_config(config.engine.deepspeed, config, micro_batch)
    if config.engine.zero_stage == 0:
        filled["gradient_clipping"] = 0.0  # done by the engine above
    if next(model.parameters()).is_meta:
        if config.engine.zero_stage == 3:
            _fill_and_partition(model, filled, ranks, fill)
        else:
            model.to_empty(device="cpu")
            if fill:
                for name, parameter in model.named_parameters():
                    fill(name, parameter)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=build_optimizer(model, config.optimizer),
        config=filled,
        dist_init_required=False,
    )
    if config.engine.zero_stage == 0 and ranks.world_size == 1:
        engine.enable_backward_allreduce = False  # with nobody else there, it would copy all gradients to and fro
    return engine


def _fill_and_partition(model: Model, deepspeed_config: dict[str, Any], ranks: Ranks, fill: Fill | None) -> None:
    """Module by module: take its memory, set its weights on rank 0, from which they go to all, and keep a part."""
    from deepspeed.runtime.zero.partition_parameters import Init

    dtype = next((wide for key, wide in _NARROW.items() if deepspeed_config.get(key, {}).get("enabled")), torch.float32)
    # Children before their parents: what is partitioned already is passed over.
    for path, module in reversed(list(model.named_modules())):
        module.to_empty(device="cpu", recurse=False)
        for name, parameter in module.named_parameters(recurse=False):
            if fill and ranks.rank == 0:
                fill(f"{path}.{name}" if path else name, parameter)
            parameter.data = parameter.data.to(dtype)
        Init(module=module, config_dict_or_path=deepspeed_config, mem_efficient_linear=False)
