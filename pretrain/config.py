"""The recipe's sections that a training worker reads: model, objective, phases, optimizer, engine, checkpoint."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from data_prep.config import DataConfig, Section
from pretrain.presets import OBJECTIVES, PRESETS, Family


class ModelConfig(Section):
    """A Transformer. `preset` names a published size; any field beside it wins over the preset."""

    preset: str | None = None
    family: Family
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    """Width of the residual stream."""
    embedding: int = Field(ge=1)
    """Width of the embeddings; `hidden` unless given, and in every family but albert."""
    heads: int = Field(ge=1)
    intermediate: int = Field(ge=1)
    """Width between the two projections of a feed-forward block; 4 times `hidden` unless given."""
    max_positions: int = Field(ge=1)
    """The longest sequence, in pieces."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """After the embeddings, of the attention's weights, and after every block's projections."""
    init_from: str | None = None
    """A run's folder (its newest checkpoint), a checkpoint, or a folder with Hugging Face's config.json and
    model.safetensors, to take the first weights from; null: random ones."""

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
            filled.setdefault("embedding", filled["hidden"])
        return filled

    @model_validator(mode="after")
    def _widths_fit(self) -> "ModelConfig":
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} is not a multiple of heads={self.heads}; change one of them")
        if self.embedding != self.hidden and self.family != "albert":
            raise ValueError(
                f"embedding={self.embedding} is not hidden={self.hidden}, and family={self.family} has nothing between "
                "the two; set them equal, or family=albert"
            )
        return self


class ObjectiveConfig(Section):
    """What the model learns to predict."""

    name: Literal["mlm+nsp", "mlm+sop", "mlm", "clm"] = "mlm+nsp"
    """mlm+nsp: masked pieces and next sentence (bert); mlm+sop: masked pieces and the order of two segments (albert);
    mlm: masked pieces of full sentences (roberta); clm: the next piece (gpt, gpt2). Where it is not given, that of
    model.family."""
    mask_rate: float = Field(default=0.15, gt=0.0, lt=1.0)
    """Share of a sequence's pieces that are predicted under mlm."""
    max_predictions: int | None = Field(default=None, ge=1)
    """At most so many of a sequence; null: as many as mask_rate gives."""
    masking: Literal["pieces", "words", "spans", "ngrams"] = "pieces"
    """What is chosen as one: pieces (Devlin et al. 2018), whole words, spans of words of geometric length (Joshi et
    al. 2020), or n-grams of up to three words (Lan et al. 2020)."""
    static_masks: int | None = Field(default=None, ge=1)
    """So many different masks a sample, which the epochs use in turn (the original BERT: 10); null: a new one each
    epoch."""
    isolate_documents: bool = False
    """mlm, clm: no piece attends to another document's. Short documents share a sample all the same."""

    @model_validator(mode="after")
    def _parts_fit(self) -> "ObjectiveConfig":
        if self.isolate_documents and self.name not in ("mlm", "clm"):
            raise ValueError(
                f"isolate_documents does nothing under name={self.name}, whose samples are pairs; remove it"
            )
        return self


class RampStage(Section):
    """A stretch at the start of a phase with a batch size of its own."""

    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)


class LrScaling(Section):
    """How the learning rate follows the batch size."""

    rule: Literal["sqrt", "linear"]
    """sqrt: as LAMB was scaled (You et al. 2020, section 4); linear: as SGD was (Goyal et al. 2017, section 2.1)."""
    batch_size: int = Field(ge=1)
    """The batch size that `lr` is meant for."""


class PhaseConfig(Section):
    """A stretch of optimizer steps with one sequence length, batch size and learning-rate schedule."""

    seq_len: int = Field(default=128, ge=8)
    """Pieces a sample, special ones included."""
    batch_size: int = Field(default=256, ge=1)
    """Samples a step, over all ranks."""
    batch_ramp: list[RampStage] = Field(default_factory=list)
    """Smaller batches to begin with, one stage after the other; after them `batch_size` holds."""
    steps: int = Field(ge=1)
    skip_steps: list[int] = Field(default_factory=list)
    """Steps of the run, counted from 0, that use up their samples without being trained on; they lie in this phase."""
    lr: float = Field(default=1e-3, gt=0.0)
    """The highest learning rate."""
    lr_scaling: LrScaling | None = None
    """null: `lr` holds for every batch size."""
    schedule: Literal["linear", "cosine", "polynomial", "inverse-sqrt", "warmup-stable-decay", "constant"] = "linear"
    warmup: float | None = Field(default=0.05, ge=0.0, lt=1.0)
    """Share of the phase's steps in which the rate climbs from 0 to `lr`; null where `warmup_steps` is set."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """The same in steps; in place of the share."""
    power: float = Field(default=1.0, gt=0.0)
    """Exponent of the polynomial schedule."""
    decay: float = Field(default=0.1, gt=0.0, le=1.0)
    """Share of the phase's steps, the last ones, in which warmup-stable-decay decays."""
    final: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of `lr` at which linear, cosine, polynomial and warmup-stable-decay end."""

    @model_validator(mode="before")
    @classmethod
    def _steps_take_the_place_of_the_share(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("warmup_steps") is not None:
            return {"warmup": None, **given}
        return given

    @model_validator(mode="after")
    def _stretches_fit(self) -> "PhaseConfig":
        ramp = sum(stage.steps for stage in self.batch_ramp)
        if ramp >= self.steps:
            raise ValueError(f"batch_ramp takes {ramp} steps of {self.steps}; shorten it, `batch_size` comes after it")
        if (self.warmup is None) == (self.warmup_steps is None):
            raise ValueError(f"set one of warmup={self.warmup} and warmup_steps={self.warmup_steps}; the other is null")
        if self.warmup_steps is not None and self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} leaves nothing of {self.steps} steps; lower it")
        if self.schedule == "warmup-stable-decay" and self.warmup_length + self.decay_length > self.steps:
            raise ValueError(
                f"warm-up ({self.warmup_length} steps) and decay ({self.decay_length}) are longer than the phase "
                f"({self.steps}); lower one of them"
            )
        return self

    @property
    def warmup_length(self) -> int:
        """Steps of warm-up."""
        if self.warmup is not None:
            return round(self.warmup * self.steps)
        assert self.warmup_steps is not None
        return self.warmup_steps

    @property
    def decay_length(self) -> int:
        """Steps of decay under warmup-stable-decay."""
        return max(1, round(self.decay * self.steps))


class OptimizerConfig(Section):
    """The update rule."""

    name: Literal["adamw", "lamb"] = "adamw"
    """adamw: Loshchilov and Hutter 2019; lamb: You et al. 2020, for large batches."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    """Decoupled; biases and layer norms are never decayed."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-6, gt=0.0)
    clip_norm: float = Field(default=1.0, ge=0.0)
    """Largest global gradient norm; 0 turns clipping off."""
    max_trust: float = Field(default=10.0, gt=0.0)
    """lamb: what a tensor's trust ratio is cut off at."""


class EngineConfig(Section):
    """How DeepSpeed runs it. All but `precision` may change between two starts of one run."""

    deepspeed: str | dict[str, Any] = "ds_config.json"
    """A DeepSpeed configuration file. "auto" in it is filled in from the recipe; a contradiction is refused."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What the ranks share out: 1 the optimizer's state, 2 the gradients too, 3 the weights too."""
    offload: Literal["none", "optimizer", "optimizer+weights"] = "none"
    """What is kept in the host's memory: from stage 1 on the optimizer's state, in stage 3 the weights too."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What the model computes in; the optimizer works on fp32 weights. fp16 scales its loss."""
    micro_batch: int | Literal["auto"] = 32
    """Samples a rank takes through the model at once; auto: as many as fit, found at the first start."""
    activation_checkpointing: Literal["none", "keep-products", "keep-inputs"] = "none"
    """What the backward pass does not compute again: everything is kept; the results of each layer's matrix products
    and its attention; only each layer's input."""
    compile: bool = False
    """Compile each block with torch.compile."""
    deterministic: bool = False
    """On a GPU: only kernels that give the same bits each time. On a CPU they all do."""
    data_workers: int = Field(default=1, ge=0)
    """Processes a rank makes its batches in, ahead of time; 0: the training process itself."""
    max_skipped: int = Field(default=20, ge=1)
    """So many steps in a row without a finite loss and gradient end the run."""
    hang_timeout_s: float = Field(default=1800.0, gt=0.0)
    """A rank that gets nowhere for so many seconds writes its stacks to its log and ends."""
    log_every: int = Field(default=10, ge=1)
    """Steps between two rows of metrics.jsonl."""
    evaluate_every: int = Field(default=200, ge=1)
    """Steps between two held-out losses."""
    heldout_samples: int = Field(default=512, ge=1)
    """Samples the held-out loss is computed on: the same ones each time."""

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _was_a_switch(cls, given: Any) -> Any:
        """Runs of older versions have a bool in their recipe.json."""
        return {False: "none", True: "keep-inputs"}[given] if isinstance(given, bool) else given

    @model_validator(mode="after")
    def _parts_fit(self) -> "EngineConfig":
        if isinstance(self.micro_batch, int) and self.micro_batch < 1:
            raise ValueError(f"micro_batch={self.micro_batch} is not a number of samples; set at least 1, or auto")
        if self.precision != "fp32" and self.zero_stage == 0:
            raise ValueError(f"precision={self.precision} with zero_stage=0 keeps no fp32 weights; use stage 1, 2 or 3")
        if self.offload != "none" and self.zero_stage == 0:
            raise ValueError(f"offload={self.offload} needs a partition of the state; use zero_stage 1, 2 or 3")
        if self.offload == "optimizer+weights" and self.zero_stage != 3:
            raise ValueError(f"offload={self.offload} needs zero_stage=3, not {self.zero_stage}; or offload=optimizer")
        if self.compile and self.zero_stage == 3:
            raise ValueError("compile does not work with zero_stage=3, whose weights come and go; use 1 or 2")
        return self


class CheckpointConfig(Section):
    """When the run is saved, and what is kept."""

    every_steps: int = Field(default=200, ge=1)
    keep: int = Field(default=3, ge=1)
    """The newest so many committed checkpoints stay."""
    keep_every: int | None = Field(default=None, ge=1)
    """Checkpoints of steps that are multiples of this stay for good."""
    location: str | None = None
    """A folder or s3://BUCKET/PREFIX that the run's checkpoints go to, under its name; null: the run's own folder."""

    @field_validator("location")
    @classmethod
    def _is_a_place(cls, location: str | None) -> str | None:
        if location is not None and re.match(r"\w+:", location) and not re.match(r"s3://[^/]", location):
            raise ValueError(f"{location!r} is no place for checkpoints; give a folder or s3://BUCKET/PREFIX")
        return location


class TrainingConfig(Section):
    """All that a training worker reads of recipe.json."""

    name: str = "run"
    """Names the run's folder, and its checkpoints where they stand elsewhere."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    data: DataConfig | None = None
    """Training reads the sources' weights only."""
    model: ModelConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    phases: list[PhaseConfig] = Field(min_length=1)
    optimizer: OptimizerConfig = OptimizerConfig()
    engine: EngineConfig = EngineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="before")
    @classmethod
    def _objective_of_family(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("model"), dict):
            return given
        model, objective = given["model"], given.get("objective", {})
        family = model.get("family", PRESETS.get(model.get("preset"), {}).get("family"))
        if not isinstance(objective, dict) or family not in OBJECTIVES:
            return given
        return {**given, "objective": {"name": OBJECTIVES[family], **objective}}

    @model_validator(mode="after")
    def _parts_fit(self) -> "TrainingConfig":
        first = 0
        for number, phase in enumerate(self.phases):
            outside = [step for step in phase.skip_steps if not first <= step < first + phase.steps]
            if outside:
                raise ValueError(
                    f"phases[{number}].skip_steps={outside} lie outside of the phase, which has steps {first} to "
                    f"{first + phase.steps - 1} of the run; move or remove them"
                )
            first += phase.steps
            if phase.seq_len > self.model.max_positions:
                raise ValueError(
                    f"phases[{number}].seq_len={phase.seq_len} is longer than model.max_positions="
                    f"{self.model.max_positions}; shorten the one or raise the other"
                )
        if self.objective.name != OBJECTIVES[self.model.family]:
            raise ValueError(
                f"objective.name={self.objective.name} does not train model.family={self.model.family}, which learns "
                f"by {OBJECTIVES[self.model.family]}"
            )
        return self
