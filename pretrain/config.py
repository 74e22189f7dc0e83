"""The recipe's sections that a training worker reads: model, objective, phases, optimizer, engine, checkpoint."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from multihop.common.config import LOCATION, LOGGING, MEMORY, ORDER, SPEED, UPDATES, Section
from multihop.common.errors import UserError
from multihop.data_prep.config import DataConfig
from multihop.pretrain.models.families import FAMILIES, PRESETS, AnyModelConfig
from multihop.pretrain.objectives.config import OBJECTIVES, ObjectiveConfig

_DecayRate = Annotated[float, Field(ge=0.0, lt=1.0)]


class RampSegment(Section):
    """The first steps of a phase, or the next ones, with a different batch size."""

    steps: Annotated[int, ORDER] = Field(ge=1)
    global_batch_size: Annotated[int, ORDER] = Field(ge=1)


class LrScaling(Section):
    """How the learning rate depends on the batch size."""

    rule: Annotated[Literal["sqrt", "linear"], UPDATES]
    """sqrt: as LAMB was scaled (You et al. 2020, section 4); linear: as SGD was (Goyal et al. 2017, section 2.1)."""
    global_batch_size: Annotated[int, UPDATES] = Field(ge=1)
    """The batch size for which `lr` was chosen."""


class PhaseConfig(Section):
    """Optimizer steps with one sequence length, batch size and learning-rate schedule."""

    seq_len: Annotated[int, ORDER | MEMORY] = Field(default=128, ge=8)
    """Tokens per sample, special tokens included."""
    global_batch_size: Annotated[int, ORDER] = Field(default=256, ge=1)
    """Samples per step, over all ranks."""
    global_batch_tokens: Annotated[int | None, ORDER] = Field(default=None, ge=8)
    """Objectives that read pairs: maximum tokens of each side per step, with completion of both sides together, over
    all ranks, instead of `global_batch_size`: as many pairs of similar length as fit (25,000 in Vaswani et al. 2017,
    section 5.1); null: `global_batch_size` pairs of any length."""
    batch_ramp: list[RampSegment] = Field(default_factory=list)
    """Segments of smaller batches at the start of the phase; `global_batch_size` holds after them."""
    steps: Annotated[int, ORDER] = Field(ge=1)
    skip_steps: Annotated[list[int], UPDATES] = Field(default_factory=list)
    """0-based steps of the run that are not trained on; their samples are used up. They must be in this phase."""
    lr: Annotated[float, UPDATES] = Field(default=1e-3, gt=0.0)
    """Peak learning rate."""
    lr_scaling: LrScaling | None = None
    """null: `lr` holds for every batch size."""
    schedule: Annotated[
        Literal["linear", "cosine", "polynomial", "inverse-sqrt", "warmup-stable-decay", "constant"], UPDATES
    ] = "linear"
    warmup_ratio: Annotated[float | None, UPDATES] = Field(default=0.05, ge=0.0, lt=1.0)
    """Share of the phase's steps in which the rate increases from 0 to `lr`; null if `warmup_steps` is set."""
    warmup_steps: Annotated[int | None, UPDATES] = Field(default=None, ge=0)
    """Warm-up in steps, instead of `warmup_ratio`."""
    power: Annotated[float, UPDATES] = Field(default=1.0, gt=0.0)
    """Exponent of the polynomial schedule."""
    decay_ratio: Annotated[float, UPDATES] = Field(default=0.1, gt=0.0, le=1.0)
    """Share of the phase's steps, at its end, in which warmup-stable-decay decays."""
    min_lr_ratio: Annotated[float, UPDATES] = Field(default=0.0, ge=0.0, le=1.0)
    """Final learning rate of linear, cosine, polynomial and warmup-stable-decay, as a share of `lr`."""
    global_rope_theta: Annotated[float | None, UPDATES] = Field(default=None, ge=1.0)
    """modernbert and modernbert-decoder: base of the wavelengths of the rotary positions in global layers during this
    phase; null: that of `model`. A phase of longer sequences has a larger base."""

    @model_validator(mode="before")
    @classmethod
    def _tokens_replace_samples(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("global_batch_tokens") is not None:
            default = cls.model_fields["global_batch_size"].default
            others = {"global_batch_size": default, "batch_ramp": [], "lr_scaling": None}
            for name, unset in others.items():
                if values.get(name, unset) != unset:
                    raise UserError(
                        f"global_batch_tokens={values['global_batch_tokens']} makes steps by tokens, and "
                        f"{name}={values[name]} counts samples; remove one of them"
                    )
        return values

    @model_validator(mode="before")
    @classmethod
    def _warmup_steps_replace_ratio(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("warmup_steps") is not None:
            return {"warmup_ratio": None, **values}
        return values

    @model_validator(mode="after")
    def _check_steps(self) -> "PhaseConfig":
        if self.global_batch_tokens is not None and self.global_batch_tokens < self.seq_len:
            raise UserError(
                f"global_batch_tokens={self.global_batch_tokens} has no room for a side of seq_len={self.seq_len} "
                "tokens; raise it or shorten seq_len"
            )
        ramp = sum(segment.steps for segment in self.batch_ramp)
        if ramp >= self.steps:
            raise UserError(
                f"batch_ramp takes {ramp} of {self.steps} steps; shorten it to leave steps for `global_batch_size`"
            )
        if (self.warmup_ratio is None) == (self.warmup_steps is None):
            raise UserError(
                f"set one of warmup_ratio={self.warmup_ratio} and warmup_steps={self.warmup_steps}; the other is null"
            )
        if self.warmup_steps is not None and self.warmup_steps >= self.steps:
            raise UserError(f"warmup_steps={self.warmup_steps} must be below steps={self.steps}; lower it")
        if self.schedule == "warmup-stable-decay" and self.warmup_length + self.decay_length > self.steps:
            raise UserError(
                f"warm-up ({self.warmup_length} steps) and decay ({self.decay_length}) are longer than the phase "
                f"({self.steps}); lower one of them"
            )
        return self

    @property
    def warmup_length(self) -> int:
        """Steps of warm-up."""
        if self.warmup_ratio is not None:
            return round(self.warmup_ratio * self.steps)
        assert self.warmup_steps is not None
        return self.warmup_steps

    @property
    def decay_length(self) -> int:
        """Steps of decay under warmup-stable-decay."""
        return max(1, round(self.decay_ratio * self.steps))


class OptimizerConfig(Section):
    """The update rule."""

    name: Annotated[Literal["adamw", "lamb", "muon"], UPDATES] = "adamw"
    """adamw: Loshchilov and Hutter 2019; lamb: You et al. 2020, for large batches; muon: Jordan et al. 2024, for the
    matrices of the layers, with AdamW for everything else."""
    weight_decay: Annotated[float, UPDATES] = Field(default=0.01, ge=0.0)
    """Decoupled weight decay; not applied to biases and layer norms."""
    betas: Annotated[tuple[_DecayRate, _DecayRate], UPDATES] = (0.9, 0.999)
    eps: Annotated[float, UPDATES] = Field(default=1e-6, gt=0.0)
    max_grad_norm: Annotated[float, UPDATES] = Field(default=1.0, ge=0.0)
    """Maximum global gradient norm; 0 disables clipping."""
    max_trust_ratio: Annotated[float, UPDATES] = Field(default=10.0, gt=0.0)
    """lamb: upper bound of the trust ratio."""
    momentum: Annotated[float, UPDATES] = Field(default=0.95, ge=0.0, lt=1.0)
    """muon: decay rate of the momentum, which is Nesterov's."""
    muon_scale: Annotated[Literal["match_rms_adamw", "original"], UPDATES] = "match_rms_adamw"
    """muon: factor of an orthogonalized update. match_rms_adamw: 0.2 * sqrt(max(rows, columns)), with which updates are
    as large as AdamW's and its learning rates apply (Liu et al. 2025); original: sqrt(max(1, rows / columns)), for
    rates near 0.02 (Jordan et al. 2024)."""
    adamw_lr_ratio: Annotated[float, UPDATES] = Field(default=1.0, gt=0.0)
    """muon: the learning rate of what AdamW updates, as a multiple of `phases[].lr`."""
    layer_lr_decay: Annotated[float, UPDATES | MEMORY] = Field(default=1.0, gt=0.0, le=1.0)
    """Layer-wise learning rate decay: a layer's rate as a multiple of that of the layer above it (Howard and Ruder
    2018, section 3.2); 1: one rate for all. `phases[].lr` is that of the output, with the token embedding."""


class EngineConfig(Section):
    """How DeepSpeed runs the training. All keys but `precision` may change when a run is resumed."""

    deepspeed: Annotated[str | dict[str, Any], SPEED | MEMORY] = Field(default_factory=dict)
    """A DeepSpeed configuration or the path of its file. Missing keys and "auto" are replaced by the recipe's values; a
    contradiction is an error."""
    zero_stage: Annotated[Literal[0, 1, 2, 3], SPEED | MEMORY] = 1
    """What is partitioned over the ranks: 1 the optimizer state, 2 also gradients, 3 also weights."""
    offload: Annotated[Literal["none", "optimizer", "optimizer+weights"], SPEED | MEMORY] = "none"
    """What is kept in host memory: the optimizer state (ZeRO stage 1 and up), or also the weights (ZeRO stage 3)."""
    precision: Annotated[Literal["fp32", "bf16", "fp16"], UPDATES | MEMORY] = "fp32"
    """Precision of the model; the optimizer updates fp32 weights. fp16 uses a dynamic loss scale."""
    micro_batch_size: Annotated[int | Literal["auto"], SPEED] = 32
    """Samples per forward pass of a rank; auto: as many as fit into memory, planned at the first start."""
    micro_batch_tokens: Annotated[int | None, SPEED] = Field(default=None, ge=8)
    """With phases[].global_batch_tokens, instead of `micro_batch_size`: maximum tokens of each side in a rank's forward
    pass; null: the rank's whole share."""
    activation_checkpointing: Annotated[Literal["none", "selective", "full"], SPEED | MEMORY] = "none"
    """What is recomputed in the backward pass. selective: all but the results of matrix products and of attention
    without dropout (Korthikanti et al. 2022); full: all but the input of each layer (Chen et al. 2016)."""
    compile: Annotated[bool, SPEED | MEMORY] = False
    """Compile each layer with torch.compile."""
    deterministic: Annotated[bool, SPEED | MEMORY] = False
    """On a GPU: use deterministic kernels only. On a CPU all kernels are."""
    data_workers: Annotated[int, SPEED] = Field(default=1, ge=0)
    """Data loader processes per rank; 0: the training process makes the batches."""
    max_consecutive_nonfinite_steps: Annotated[int, LOGGING] = Field(default=20, ge=1)
    """Maximum number of consecutive steps with a non-finite loss or gradient; then the run stops with an error."""
    hang_timeout_s: Annotated[float, LOGGING] = Field(default=1800.0, gt=0.0)
    """Seconds without progress after which a rank writes the stacks of its threads to its log and exits."""
    replica_check_interval: Annotated[int | None, LOGGING] = Field(default=None, ge=1)
    """Steps between two checks that all ranks have the same weights and counters; each also writes checksums of
    the whole state to metrics.jsonl. null: only before each save, without those checksums."""
    log_interval: Annotated[int, LOGGING] = Field(default=10, ge=1)
    """Steps between two rows of metrics.jsonl."""
    eval_interval: Annotated[int, LOGGING] = Field(default=200, ge=1)
    """Steps between two held-out losses."""
    heldout_samples: Annotated[int, LOGGING] = Field(default=512, ge=1)
    """Samples for the held-out loss, the same each time."""

    @model_validator(mode="after")
    def _check_combinations(self) -> "EngineConfig":
        if isinstance(self.micro_batch_size, int) and self.micro_batch_size < 1:
            raise UserError(
                f"micro_batch_size={self.micro_batch_size} is not a number of samples; set at least 1, or auto"
            )
        if self.precision != "fp32" and self.zero_stage == 0:
            raise UserError(
                f"precision={self.precision} with zero_stage=0 has no fp32 weights; set zero_stage to 1, 2 or 3"
            )
        if self.offload != "none" and self.zero_stage == 0:
            raise UserError(f"offload={self.offload} needs a partitioned state; set zero_stage to 1, 2 or 3")
        if self.offload == "optimizer+weights" and self.zero_stage != 3:
            raise UserError(f"offload={self.offload} needs zero_stage=3, not {self.zero_stage}; or offload=optimizer")
        if self.compile and self.zero_stage == 3:
            raise UserError("compile does not work with zero_stage=3; set zero_stage to 1 or 2")
        return self


class AuditConfig(Section):
    """Audits of checkpoints while the run goes on, where the cluster has room, and at its end."""

    every: Annotated[int, LOGGING] = Field(ge=1)
    """Checkpoints of steps that are multiples of this are audited, each from the one before it."""


class CheckpointConfig(Section):
    """When checkpoints are saved, and which ones are kept."""

    save_interval: Annotated[int, LOGGING] = Field(default=200, ge=1)
    keep: Annotated[int, LOGGING] = Field(default=3, ge=1)
    """Number of newest committed checkpoints that are kept."""
    keep_every: Annotated[int | None, LOGGING] = Field(default=None, ge=1)
    """Checkpoints of steps that are multiples of this are never removed."""
    location: Annotated[str | None, LOCATION] = None
    """A folder or s3://BUCKET/PREFIX, in which NAME gets the run's checkpoints; null: the run's folder."""
    audit: Annotated[AuditConfig | None, LOGGING] = None

    @field_validator("location")
    @classmethod
    def _is_location(cls, location: str | None) -> str | None:
        if location is not None and re.match(r"\w+:", location) and not re.match(r"s3://[^/]", location):
            raise UserError(f"{location!r} cannot hold checkpoints; give a directory or s3://BUCKET/PREFIX")
        return location

    @model_validator(mode="after")
    def _are_audited_checkpoints_saved(self) -> Self:
        if self.audit is not None and self.audit.every % self.save_interval:
            raise UserError(
                f"audit.every={self.audit.every} must be a multiple of save_interval={self.save_interval}: only "
                "checkpoints that were saved can be audited"
            )
        return self


class TrainingConfig(Section):
    """The part of recipe.json that a training worker reads."""

    name: Annotated[str, LOCATION] = "run"
    """Name of the run's folder, and of its checkpoints if they are elsewhere."""
    seed: Annotated[int, ORDER | UPDATES] = Field(default=1, ge=0, lt=2**63)
    data: DataConfig | None = None
    """Training reads only the weights of the sources and `shuffle_window_shards`."""
    model: AnyModelConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    phases: list[PhaseConfig] = Field(min_length=1)
    optimizer: OptimizerConfig = OptimizerConfig()
    engine: EngineConfig = EngineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="before")
    @classmethod
    def _objective_of_family(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
            return values
        model, objective = values["model"], values.get("objective", {})
        family = model.get("family", PRESETS.get(str(model.get("preset")), {}).get("family"))
        if not isinstance(objective, dict) or str(family) not in FAMILIES:
            return values
        return {**values, "objective": {"name": FAMILIES[family].default_objective, **objective}}

    @model_validator(mode="after")
    def _check_combinations(self) -> "TrainingConfig":
        if (reason := self.model.untrainable) is not None:
            raise UserError(reason)
        first = 0
        for number, phase in enumerate(self.phases):
            outside = [step for step in phase.skip_steps if not first <= step < first + phase.steps]
            if outside:
                raise UserError(
                    f"phases[{number}].skip_steps={outside} lie outside of the phase, which has steps {first} to "
                    f"{first + phase.steps - 1} of the run; move or remove them"
                )
            first += phase.steps
            if phase.seq_len > self.model.max_positions:
                raise UserError(
                    f"phases[{number}].seq_len={phase.seq_len} is longer than model.max_positions="
                    f"{self.model.max_positions}; shorten the one or raise the other"
                )
            if phase.global_batch_tokens is not None and not self.objective.needs.reads_pairs:
                of_pairs = " or ".join(name for name, needs in OBJECTIVES.items() if needs.reads_pairs)
                raise UserError(
                    f"phases[{number}].global_batch_tokens={phase.global_batch_tokens} is for "
                    f"objective.name={of_pairs}, not {self.objective.name}; set phases[{number}].global_batch_size"
                )
            if phase.global_batch_tokens is not None and self.engine.micro_batch_size == "auto":
                raise UserError(
                    f"engine.micro_batch_size=auto counts samples, and phases[{number}].global_batch_tokens="
                    f"{phase.global_batch_tokens} tokens; remove it, or set engine.micro_batch_tokens"
                )
            micro_tokens = self.engine.micro_batch_tokens
            if micro_tokens is not None and phase.global_batch_tokens is None:
                raise UserError(
                    f"engine.micro_batch_tokens={micro_tokens} has no effect on phases[{number}], which has no "
                    "global_batch_tokens; set engine.micro_batch_size, or phases[].global_batch_tokens"
                )
            if micro_tokens is not None and micro_tokens < phase.seq_len:
                raise UserError(
                    f"engine.micro_batch_tokens={micro_tokens} has no room for a side of phases[{number}].seq_len="
                    f"{phase.seq_len} tokens; raise it"
                )
        window = self.data.shuffle_window_shards if self.data else None
        reason = self.objective.needs.reads_all_shards
        if window is not None and reason is not None:
            raise UserError(
                f"data.shuffle_window_shards={window} reads some shards at a time, and objective.name="
                f"{self.objective.name} {reason}; remove it, or set another objective"
            )
        if self.optimizer.name == "muon" and self.model.layers == 0:
            raise UserError(
                f"optimizer.name=muon updates the matrices of layers, and model.family={self.model.family} has none; "
                "set optimizer.name=adamw or lamb"
            )
        objectives = FAMILIES[self.model.family].objectives
        if self.objective.name not in objectives:
            raise UserError(
                f"objective.name={self.objective.name} does not train model.family={self.model.family}; set "
                f"objective.name={' or '.join(objectives)}"
            )
        return self
