"""The recipe's sections that a training worker reads: model, objective, phases, optimizer, engine, checkpoint."""

from typing import Any, Literal

from pydantic import Field, model_validator

from data_prep.config import Section

# Devlin et al. 2018 (base, large) and Turc et al. 2019 (the small ones); Radford et al. 2019 (gpt2).
PRESETS: dict[str, dict[str, Any]] = {
    name: {"family": family, "layers": layers, "hidden": hidden, "heads": heads, "max_positions": positions}
    for name, family, layers, hidden, heads, positions in [
        ("bert-tiny", "bert", 2, 128, 2, 512),
        ("bert-mini", "bert", 4, 256, 4, 512),
        ("bert-small", "bert", 4, 512, 8, 512),
        ("bert-medium", "bert", 8, 512, 8, 512),
        ("bert-base", "bert", 12, 768, 12, 512),
        ("bert-large", "bert", 24, 1024, 16, 512),
        ("gpt2", "gpt2", 12, 768, 12, 1024),
        ("gpt2-medium", "gpt2", 24, 1024, 16, 1024),
    ]
}


class ModelConfig(Section):
    """A Transformer. `preset` names a published size; any field beside it wins over the preset."""

    preset: str | None = None
    family: Literal["bert", "gpt2"]
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    """Width of the residual stream."""
    heads: int = Field(ge=1)
    intermediate: int = Field(ge=1)
    """Width between the two projections of a feed-forward block; 4 times `hidden` unless given."""
    max_positions: int = Field(ge=1)
    """The longest sequence, in pieces."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """After the embeddings, of the attention's weights, and after every block's projections."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        preset = given.get("preset")
        if preset is not None and preset not in PRESETS:
            raise ValueError(f"preset {preset!r} is not known; there are: {', '.join(PRESETS)}")
        filled = {**(PRESETS[preset] if preset else {}), **given}
        if isinstance(filled.get("hidden"), int):
            filled.setdefault("intermediate", 4 * filled["hidden"])
        return filled

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> "ModelConfig":
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} is not a multiple of heads={self.heads}; change one of them")
        return self


class ObjectiveConfig(Section):
    """What the model learns to predict."""

    name: Literal["mlm+nsp", "clm"] = "mlm+nsp"
    """mlm+nsp: masked pieces and next sentence (BERT); clm: the next piece (GPT-2)."""
    mask_rate: float = Field(default=0.15, gt=0.0, lt=1.0)
    """Share of a sequence's pieces that are predicted under mlm."""


class PhaseConfig(Section):
    """A stretch of optimizer steps with one sequence length, batch size and learning-rate schedule."""

    seq_len: int = Field(default=128, ge=8)
    """Pieces a sample, special ones included."""
    batch_size: int = Field(default=256, ge=1)
    """Samples a step, over all ranks."""
    steps: int = Field(ge=1)
    lr: float = Field(default=1e-3, gt=0.0)
    """The highest learning rate."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Share of the phase's steps in which the rate climbs from 0 to `lr`."""


class OptimizerConfig(Section):
    """The update rule."""

    name: Literal["adamw"] = "adamw"
    weight_decay: float = Field(default=0.01, ge=0.0)
    """Decoupled; biases and layer norms are never decayed."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-6, gt=0.0)
    clip_norm: float = Field(default=1.0, ge=0.0)
    """Largest global gradient norm; 0 turns clipping off."""


class EngineConfig(Section):
    """How DeepSpeed runs it."""

    deepspeed: str | dict[str, Any] = "ds_config.json"
    """A DeepSpeed configuration file. "auto" in it is filled in from the recipe; a contradiction is refused."""
    zero_stage: Literal[0, 1, 2] = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    micro_batch: int = Field(default=32, ge=1)
    """Samples a rank takes through the model at once."""
    log_every: int = Field(default=10, ge=1)
    """Steps between two rows of metrics.jsonl."""
    evaluate_every: int = Field(default=200, ge=1)
    """Steps between two held-out losses."""
    heldout_samples: int = Field(default=512, ge=1)
    """Samples the held-out loss is computed on: the same ones each time."""

    @model_validator(mode="after")
    def _bf16_needs_a_partition(self) -> "EngineConfig":
        if self.precision == "bf16" and self.zero_stage == 0:
            raise ValueError("precision=bf16 with zero_stage=0 keeps no fp32 weights; use zero_stage=1 or 2")
        return self


class CheckpointConfig(Section):
    """When the run is saved, and what is kept."""

    every_steps: int = Field(default=200, ge=1)
    keep: int = Field(default=3, ge=1)
    """The newest so many committed checkpoints stay."""


class TrainingConfig(Section):
    """All that a training worker reads of recipe.json."""

    seed: int = Field(default=1, ge=0, lt=2**63)
    model: ModelConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    phases: list[PhaseConfig] = Field(min_length=1)
    optimizer: OptimizerConfig = OptimizerConfig()
    engine: EngineConfig = EngineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _parts_fit(self) -> "TrainingConfig":
        for number, phase in enumerate(self.phases):
            if phase.seq_len > self.model.max_positions:
                raise ValueError(
                    f"phases[{number}].seq_len={phase.seq_len} is longer than model.max_positions="
                    f"{self.model.max_positions}; shorten the one or raise the other"
                )
        if (self.model.family == "gpt2") != (self.objective.name == "clm"):
            raise ValueError(
                f"objective.name={self.objective.name} does not train model.family={self.model.family}: "
                "bert learns by mlm+nsp, gpt2 by clm"
            )
        return self
