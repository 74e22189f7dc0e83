"""Refuses keys without an effect in combination with the others, such as the power of a linear schedule."""

from collections.abc import Iterator
from typing import Any

from multihop.common.config import Section
from multihop.common.errors import UserError
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.models.families import FAMILIES, PRESETS, families_with
from multihop.pretrain.objectives.config import objectives_with

_DECAYING = ("linear", "cosine", "polynomial", "warmup-stable-decay")


def check_effects(config: TrainingConfig) -> None:
    """Refuse values that would be ignored, because users who set them expect an effect.

    Call it for a user's recipe, not for a run's recipe.json, which an earlier version may have accepted.

    Raises:
        UserError: A value would be ignored.
    """
    for key, section, name, reads, instead in _conditions(config):
        value, default = getattr(section, name), type(section).model_fields[name].default
        if not reads and value != default:
            raise UserError(f"{key}={value} has no effect with {instead[0]}; remove it, or set {instead[1]}")


def _conditions(config: TrainingConfig) -> Iterator[tuple[str, Section, str, bool, tuple[Any, str]]]:
    """Yield (key, section, name, is read, (setting that ignores it, setting that reads it)) for each such key."""
    objective = config.objective
    for name in type(objective).model_fields:
        if name == "name":
            continue
        instead = f"objective.name={' or '.join(objectives_with(name))}"
        reads = name in objective.needs.keys
        yield f"objective.{name}", objective, name, reads, (f"objective.name={objective.name}", instead)
    has_thetas, rotary = hasattr(config.model, "global_rope_theta"), getattr(config.model, "positions", "") == "rotary"
    rotary_settings = "model.positions=learned", "model.positions=rotary"
    if not has_thetas:
        rotary_settings = f"model.family={config.model.family}", f"model.family={families_with('global_rope_theta')}"
    for number, phase in enumerate(config.phases):
        for name, schedules in (
            ("power", ("polynomial",)),
            ("decay_ratio", ("warmup-stable-decay",)),
            ("min_lr_ratio", _DECAYING),
        ):
            section, reads = f"phases[{number}]", phase.schedule in schedules
            settings = f"{section}.schedule={phase.schedule}", f"{section}.schedule={' or '.join(schedules)}"
            yield f"{section}.{name}", phase, name, reads, settings
        yield f"phases[{number}].global_rope_theta", phase, "global_rope_theta", rotary, rotary_settings
    every, of_preset = "model.global_attn_every_n_layers", PRESETS.get(str(config.model.preset), {})
    has_local_layers = config.model.layers > 1 and getattr(config.model, "global_attn_every_n_layers", 1) > 1
    for name in ("global_rope_theta", "local_rope_theta") if has_thetas else ():
        yield f"model.{name}", config.model, name, rotary or name in of_preset, rotary_settings
    has_one_layer = config.model.layers == 1
    local_settings = (
        ("model.layers=1", "model.layers=2 or more") if has_one_layer else (f"{every}=1", f"{every}=2 or more")
    )
    for name in ("local_attention", "local_rope_theta") if has_thetas else ():
        reads = has_local_layers or name in of_preset
        yield f"model.{name}", config.model, name, reads, local_settings
    if has_thetas:
        positions = config.model.max_positions
        # The widest window that leaves out a token: a causal one has half of it less one token before each token.
        widest = 2 * (positions - 1 if FAMILIES[config.model.family].causal else positions - 2)
        reads = getattr(config.model, "local_attention", 0) <= widest or "local_attention" in of_preset
        covered = f"model.max_positions={positions}", f"model.local_attention={widest} or less"
        yield "model.local_attention", config.model, "local_attention", reads, covered
    optimizer = config.optimizer
    for name, optimizers in (
        ("max_trust_ratio", ("lamb",)),
        ("momentum", ("muon",)),
        ("muon_scale", ("muon",)),
        ("adamw_lr_ratio", ("muon",)),
    ):
        reads = optimizer.name in optimizers
        instead = f"optimizer.name={' or '.join(optimizers)}"
        yield f"optimizer.{name}", optimizer, name, reads, (f"optimizer.name={optimizer.name}", instead)
    by_samples = any(phase.global_batch_tokens is None for phase in config.phases)
    by_tokens = ("phases[].global_batch_tokens", "engine.micro_batch_tokens")
    yield "engine.micro_batch_size", config.engine, "micro_batch_size", by_samples, by_tokens
