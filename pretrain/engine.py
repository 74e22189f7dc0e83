"""The one file that knows DeepSpeed: a model goes in, optimizer steps and named slices of the state come out."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pretrain.config import TrainingConfig
from pretrain.deepspeed_config import fill_deepspeed_config
from pretrain.models import Model, decays
from pretrain.objectives.batch import Batch
from pretrain.ranks import Ranks
from pretrain.slices import Slice, owned_slices

MOMENTS = ("exp_avg", "exp_avg_sq")


class Engine:
    """A model under DeepSpeed, this process being one of its ranks."""

    def __init__(self, config: TrainingConfig, model: Model, ranks: Ranks) -> None:
        """Set `model` up for training. It has its weights, the same on every rank."""
        self.ranks = ranks
        self._deepspeed = _initialise(config, model)
        self._norm_of_stage_0 = math.nan
        if config.engine.zero_stage == 0:
            self._optimizer.register_step_pre_hook(self._clip_stage_0(config.optimizer.clip_norm))
        zero = self._deepspeed.optimizer if config.engine.zero_stage > 0 else None
        self.slices = owned_slices(self._deepspeed.module, zero, ranks.rank, ranks.world_size)

    @property
    def module(self) -> Model:
        """The model, in the precision it computes in."""
        module: Model = self._deepspeed.module
        return module

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        wrapped = self._deepspeed.optimizer
        inner: torch.optim.Optimizer = getattr(wrapped, "optimizer", wrapped)
        return inner

    def forward_backward(self, batch: Batch, global_counts: dict[str, float]) -> dict[str, float]:
        """Add a micro-batch's gradient; returns the sums that the model returned.

        The gradient is that of sum_name(sum / global_counts[name]): DeepSpeed averages over the ranks, which is
        undone here. A borrowed micro-batch (all counts 0) takes part with weight 0, because every rank has to.
        """
        sums = self._deepspeed(**self._on_device(batch))
        loss = sum(sums[name] / global_counts[name] for name in batch.counts)
        mine = any(batch.counts.values())
        self._deepspeed.backward(loss * (self.ranks.world_size if mine else 0.0), scale_wrt_gas=False)
        return {name: float(value.detach()) if mine else 0.0 for name, value in sums.items()}

    def step(self, lr: float) -> float:
        """Reduce and clip the gradient, update the weights; returns the gradient's global norm before clipping."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._deepspeed.step()
        norm = self._deepspeed.get_global_grad_norm()
        return self._norm_of_stage_0 if norm is None else float(norm)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """The model's sums over some batches of this rank, without dropout and without a gradient."""
        self.module.eval()
        totals: dict[str, float] = {}
        for batch in batches:
            sums = self.module(**self._on_device(batch))
            mine = any(batch.counts.values())
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + (float(value) if mine else 0.0)
        self.module.train()
        return totals

    def state(self) -> tuple[dict[str, Tensor], int]:
        """Copies of what this rank owns, on the CPU, as "KIND/NAME@START" -> float32 (numel,), and the update count."""
        tensors, updates = {}, 0
        for piece in self.slices:
            tensors[f"weight/{piece.name}@{piece.start}"] = _copy(piece.of(piece.flat.detach()))
            moments = self._optimizer.state[piece.flat]
            for kind in MOMENTS:
                tensors[f"{kind}/{piece.name}@{piece.start}"] = _copy(piece.of(moments[kind]))
            updates = int(moments["step"])
        return tensors, updates

    @torch.no_grad()
    def restore(self, read: Callable[[str, Slice], Tensor], updates: int) -> None:
        """Set what this rank owns from a checkpoint.

        Args:
            read: (kind, piece) -> float32 (numel,); the module's own weights are set before this engine is made.
            updates: how many updates the moments went through.
        """
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            for flat in group["params"]:
                state[flat] = {"step": torch.tensor(float(updates))}
                state[flat] |= {kind: torch.zeros_like(flat) for kind in MOMENTS}
        for piece in self.slices:
            piece.of(piece.flat.detach()).copy_(read("weight", piece))
            for kind in MOMENTS:
                piece.of(state[piece.flat][kind]).copy_(read(kind, piece))

    def _clip_stage_0(self, clip_norm: float) -> Callable[..., None]:
        """DeepSpeed does not tell the norm in stage 0, so this clips, between its reduction and the update."""

        def clip(*_: object) -> None:
            norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), clip_norm or math.inf)
            self._norm_of_stage_0 = float(norm)

        return clip

    def _on_device(self, batch: Batch) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array).to(self.ranks.device) for name, array in batch.inputs.items()}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)


def _initialise(config: TrainingConfig, model: Model) -> Any:
    import deepspeed

    # Its shared-memory reduction is compiled at the first start, for a minute, and a start that is killed meanwhile
    # leaves a lock on which every later one hangs. gloo does the same work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    settings = config.optimizer
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if decays(name, p)], "weight_decay": settings.weight_decay},
        {"params": [p for name, p in named if not decays(name, p)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
    assert isinstance(config.engine.deepspeed, dict)
    filled = fill_deepspeed_config(config.engine.deepspeed, config)
    if config.engine.zero_stage == 0:
        filled["gradient_clipping"] = 0.0
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=filled,
        dist_init_required=False,
    )
    return engine
