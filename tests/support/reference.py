"""Train without ranks, shards, micro-batches or DeepSpeed, in a plain loop over whole tensors, as a reference."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from rank_jobs import VOCABULARY, some_batches
from torch import Tensor

from multihop.pretrain.config import OptimizerConfig, TrainingConfig
from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.models.build import build_model, init_weights, uses_weight_decay
from multihop.pretrain.optim.optimizers import is_orthogonalized

Update = Callable[[str, Tensor, Tensor, OptimizerConfig, float, dict[str, Any]], None]


@dataclass
class PlainTraining:
    """The loss and the gradient norm of each step, and the final weights."""

    weights: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def train_plainly(settings: dict[str, Any], steps: int, sequences: int, skipped: tuple[int, ...] = ()) -> PlainTraining:
    """Run the same training as `rank_jobs.train_on_pairs`.

    Args:
        skipped: steps whose gradient is discarded.
    """
    config = TrainingConfig.model_validate(settings)
    model = build_model(config.model, VOCABULARY)
    init_weights(model, config.seed)
    update: Update = {"adamw": adamw, "lamb": lamb, "muon": muon}[config.optimizer.name]
    state: dict[str, dict[str, Any]] = {}
    seen = PlainTraining({name: weight.detach() for name, weight in model.named_parameters()})
    depths = {name: depth_of(name, config.model.layers) for name in seen.weights}
    for step in range(steps):
        batches = some_batches(config.seed, step, sequences, 16)
        model.zero_grad()
        loss = torch.zeros(())
        for batch in batches:
            sums = model(**to_device(batch.inputs, torch.device("cpu")))
            for name in batch.counts:
                loss = loss + sums[name] / sum(other.counts[name] for other in batches)
        loss.backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        global_norm = math.hypot(*map(norm, gradients))
        seen.losses.append(float(loss.detach()))
        seen.norms.append(global_norm)
        if step in skipped:
            continue
        with torch.no_grad():
            for name, weight in model.named_parameters():
                assert weight.grad is not None
                weight.grad.mul_(min(1.0, config.optimizer.max_grad_norm / (global_norm + 1e-6)))
                excluded = not uses_weight_decay(name)
                decay = 0.0 if excluded else config.optimizer.weight_decay
                settings_ = config.optimizer.model_copy(update={"weight_decay": decay})
                moments = state.setdefault(name, {"excluded": excluded, "t": 0})
                lr = config.phases[0].lr * config.optimizer.layer_lr_decay ** depths[name]
                update(name, weight, weight.grad, settings_, lr, moments)
    return seen


def depth_of(name: str, layers: int) -> int:
    """Return 0 for a parameter of a BERT's output and its token embedding, `layers` + 1 for other embeddings, and for
    layers the number in between."""
    part, *rest = name.split(".")
    if part == "layers":
        return layers - int(rest[0])
    return layers + 1 if part in ("position", "segment", "embedding_norm") else 0


def norm(tensor: Tensor) -> float:
    """Return the norm in float64: torch's float32 norm of a large tensor is too small."""
    return float(tensor.detach().double().norm())


def adamw(name: str, weight: Tensor, grad: Tensor, config: OptimizerConfig, lr: float, state: dict[str, Any]) -> None:
    """Update a weight by Loshchilov and Hutter 2019, algorithm 2, with a fixed schedule multiplier folded into lr."""
    direction = _adam_direction(weight, grad, config, state)
    weight.sub_(lr * (direction + config.weight_decay * weight))


def lamb(name: str, weight: Tensor, grad: Tensor, config: OptimizerConfig, lr: float, state: dict[str, Any]) -> None:
    """Update a weight by You et al. 2020, algorithm 2, line by line; phi is a cut-off of the ratio."""
    update = _adam_direction(weight, grad, config, state) + config.weight_decay * weight
    of_weight, of_update = norm(weight), norm(update)
    plain = state["excluded"] or of_weight == 0 or of_update == 0
    weight.sub_(lr * (1.0 if plain else min(of_weight / of_update, config.max_trust_ratio)) * update)


def muon(name: str, weight: Tensor, grad: Tensor, config: OptimizerConfig, lr: float, state: dict[str, Any]) -> None:
    """Update a whole matrix of a layer by torch.optim.Muon, without its conversion to bf16, and others by AdamW."""
    if not is_orthogonalized(name, tuple(weight.shape)):
        adamw(name, weight, grad, config, lr * config.adamw_lr_ratio, state)
        return
    if "optimizer" not in state:
        parameter = torch.nn.Parameter(weight)
        state["optimizer"] = torch.optim.Muon(
            [parameter], lr, config.weight_decay, config.momentum, adjust_lr_fn=config.muon_scale
        )
    (parameter,) = state["optimizer"].param_groups[0]["params"]
    parameter.grad = grad
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
        state["optimizer"].step()
    weight.copy_(parameter)


def _adam_direction(weight: Tensor, grad: Tensor, config: OptimizerConfig, state: dict[str, Any]) -> Tensor:
    beta1, beta2 = config.betas
    state["t"] += 1
    state["m"] = beta1 * state.get("m", torch.zeros_like(weight)) + (1 - beta1) * grad
    state["v"] = beta2 * state.get("v", torch.zeros_like(weight)) + (1 - beta2) * grad.square()
    m_hat, v_hat = state["m"] / (1 - beta1 ** state["t"]), state["v"] / (1 - beta2 ** state["t"])
    return m_hat / (v_hat.sqrt() + config.eps)
