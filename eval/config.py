"""The recipe's `eval` section: which tasks, and the settings of their trials, or grids of them."""

from itertools import product
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from multihop.common.config import FINE_TUNING, LOGGING, ZERO_SHOT, Section
from multihop.common.errors import UserError

Init = Literal["pretrained", "parent", "random"]
"""Initial weights of a trial: the evaluated ones, the initial weights of their training, or random ones."""
MIN_SEQ_LEN = 8
"""Minimum of `seq_len`, in tokens."""
ReportOn = Literal["half", "dev"]
Schedule = Literal["linear", "slanted_triangular"]
MAX_HOPS = 20
"""Maximum of `pooling: {hops: N}`, and of a memory network."""
_LSTM_WIDTH = 768
"""Units of a BiLSTM on features in each direction (Devlin et al. 2018, section 5.3)."""
_Positive = Annotated[float, Field(gt=0.0)]
_NotNegative = Annotated[float, Field(ge=0.0)]
_Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
_Decay = Annotated[float, Field(gt=0.0, le=1.0)]
_Count = Annotated[int, Field(ge=1)]
_Length = Annotated[int, Field(ge=MIN_SEQ_LEN)]


class Features(Section):
    """Feature-based use of a frozen model (Devlin et al. 2018, section 5.3); the defaults are the best of table 7."""

    layers: list[int] = Field(default=[-4, -3, -2, -1], min_length=1)
    """Hidden states, as transformers counts them: 0 is the output of the embeddings, 1 that of the first layer, -1 that
    of the last."""
    combine: Literal["concat", "sum", "mix", "mix_both", "taglm"] = "concat"
    """mix: a sum with learned weights (Peters et al. 2018, equation 1); mix_both: such a sum below the BiLSTM, and one
    with weights of its own beside its output (section 3.3); taglm: the first of `layers` below the BiLSTM, and the
    others beside the output of its first layer (Peters et al. 2017, equation 5)."""
    head: Literal["linear", "bilstm", "bilstm_crf"] = "bilstm"
    """The layers that are trained on top; bilstm: two BiLSTM layers before the linear one; bilstm_crf: also a
    conditional random field after it, for tagging."""
    # Left out of keys of trials where it is the default, so that those from before it are still theirs.
    lstm_width: int = Field(default=_LSTM_WIDTH, ge=1, exclude_if=lambda width: width == _LSTM_WIDTH)
    """Units of the BiLSTM in each direction."""

    @model_validator(mode="after")
    def _both_are_beside_an_lstm(self) -> "Features":
        if self.lstm_width != _LSTM_WIDTH and self.head == "linear":
            raise UserError(
                f"lstm_width={self.lstm_width} is for a BiLSTM, but head=linear has none; remove it, or set head=bilstm"
            )
        if self.combine in ("mix_both", "taglm") and self.head == "linear":
            raise UserError(
                f"combine={self.combine} needs a BiLSTM, and head=linear has none; set head=bilstm, or combine=mix"
            )
        if self.combine == "taglm" and len(self.layers) < 2:
            raise UserError(
                f"combine=taglm reads the first of features.layers={self.layers} below the BiLSTM and the others "
                "beside its first layer, but only one is given; set at least two, such as [0, -1]"
            )
        return self

    def indexes(self, layers: int) -> list[int]:
        """Return the indexes of the hidden states, from 0, in a model with so many layers.

        Raises:
            UserError: a hidden state does not exist, or is named twice.
        """
        indexes = [layer + layers + 1 if layer < 0 else layer for layer in self.layers]
        for layer, index in zip(self.layers, indexes, strict=True):
            if not 0 <= index <= layers:
                raise UserError(
                    f"features.layers={self.layers}: the model has {layers} layers and no hidden state {layer}; "
                    f"expected 0 (the embeddings) to {layers}, or {-layers - 1} to -1"
                )
            if indexes.count(index) > 1:
                raise UserError(
                    f"features.layers={self.layers} names hidden state {index} of {layers} twice; remove one"
                )
        return indexes


class Hops(Section):
    """Pooling by hops of attention over the states of all tokens, as in a memory network (Sukhbaatar et al. 2015)."""

    hops: int = Field(ge=1, le=MAX_HOPS)
    """Number of hops; 1: attention pooling."""


Pooling = Literal["family", "mean", "max", "concat"] | Hops


class TrialSettings(Section):
    """The settings of one trial."""

    epochs: Annotated[_Positive, FINE_TUNING] = 3.0
    """Passes over a task's training examples."""
    batch_size: Annotated[_Count, FINE_TUNING] = 16
    """Examples per step."""
    lr: Annotated[_Positive, FINE_TUNING] = 5e-5
    """Peak learning rate of the head, and with `layer_lr_decay: 1` of all weights."""
    warmup_ratio: Annotated[_Fraction, FINE_TUNING] = 0.1
    """Fraction of the steps over which the learning rate grows."""
    schedule: Annotated[Schedule, FINE_TUNING] = Field(default="linear", exclude_if=lambda name: name == "linear")
    """linear: linear warm-up, then linear decay to 0; slanted_triangular: the same from and to a 32nd of the rate
    (Howard and Ruder 2018, equation 3), whose `cut_frac` is `warmup_ratio`."""
    layer_lr_decay: Annotated[_Decay, FINE_TUNING] = Field(default=1.0, exclude_if=lambda factor: factor == 1.0)
    """The learning rate of each group of layers in terms of that of the group above it; 1: one rate for all. 0.385 is
    the 1 / 2.6 of Howard and Ruder (2018, section 3.2)."""
    gradual_unfreezing: Annotated[bool, FINE_TUNING] = Field(default=False, exclude_if=lambda gradual: not gradual)
    """Train the head alone in the first epoch, and in each further one a group of layers more, from the last to the
    embeddings (Howard and Ruder 2018, section 3.3)."""
    weight_decay: Annotated[_NotNegative, FINE_TUNING] = 0.01
    """Weight decay of AdamW, for matrices only."""
    dropout: Annotated[_Fraction | None, FINE_TUNING] = None
    """Dropout rate of the pretrained model while it is fine-tuned; null: `model.dropout`."""
    head_dropout: Annotated[_Fraction | None, FINE_TUNING] = None
    """Dropout rate before the head; null: the one of the pretrained model while it is fine-tuned."""
    pooling: Annotated[Pooling, FINE_TUNING] = "family"
    """The vector that represents a text. family: one token's state, as the family was published (`Family.pooling`);
    mean, max: the mean, or the maximum of each dimension, of all its tokens' states; concat: the state of the
    token that is read last, the maxima and the mean, one after the other (Howard and Ruder 2018, section 3.3);
    {hops: N}: hops of attention over them."""
    seq_len: Annotated[_Length, FINE_TUNING | ZERO_SHOT] = 128
    """Maximum length of an example in tokens; longer examples are truncated. null in a recipe: 384 for answer spans,
    1024, or as many positions as the model has, for zero-shot tasks, 128 for others."""
    stride: Annotated[_Count, FINE_TUNING] = 128
    """Answer spans: tokens from the start of a window of a long context to the start of the next one; at most half of
    the context's tokens in a window."""
    document_context: Annotated[bool, FINE_TUNING] = False
    """Tagging: fill a sentence's sequence with the neighboring sentences of its document."""
    features: Annotated[Features | None, FINE_TUNING] = None
    """Freeze the model and train a head on its hidden states; null: fine-tune all weights."""
    max_examples: Annotated[_Count | None, FINE_TUNING] = None
    """Maximum number of training examples, chosen by hash; null: all."""
    max_dev_examples: Annotated[_Count | None, FINE_TUNING] = None
    """Maximum number of development examples, chosen by hash; null: all. The test set is never reduced."""
    report_on: Annotated[ReportOn, FINE_TUNING] = "half"
    """The examples that are reported where a task has no labeled test set. half: one half of the development set
    chooses, the other is reported; dev: the whole development set does both, as in most papers."""


SETTING_KINDS = {
    "stride": ("spans",),
    "document_context": ("tagging",),
    "pooling": ("classification", "regression", "choice"),
    "seq_len": ("classification", "regression", "tagging", "choice", "spans", "zero-shot"),
}
"""The kinds of task that a setting matters for, of those that do not matter for every kind."""


class Grid(Section):
    """Settings for the trials of a task. Of several values the best is chosen by the development score."""

    epochs: Annotated[list[_Positive] | None, FINE_TUNING] = Field(default=None, min_length=1)
    batch_size: Annotated[list[_Count] | None, FINE_TUNING] = Field(default=None, min_length=1)
    lr: Annotated[list[_Positive] | None, FINE_TUNING] = Field(default=None, min_length=1)
    warmup_ratio: Annotated[_Fraction | None, FINE_TUNING] = None
    schedule: Annotated[Schedule | None, FINE_TUNING] = None
    layer_lr_decay: Annotated[_Decay | None, FINE_TUNING] = None
    gradual_unfreezing: Annotated[bool | None, FINE_TUNING] = None
    weight_decay: Annotated[_NotNegative | None, FINE_TUNING] = None
    dropout: Annotated[_Fraction | None, FINE_TUNING] = None
    head_dropout: Annotated[_Fraction | None, FINE_TUNING] = None
    pooling: Annotated[Pooling | None, FINE_TUNING] = None
    seq_len: Annotated[_Length | None, FINE_TUNING | ZERO_SHOT] = None
    stride: Annotated[_Count | None, FINE_TUNING] = None
    document_context: Annotated[bool | None, FINE_TUNING] = None
    features: Annotated[Features | None, FINE_TUNING] = None
    max_examples: Annotated[_Count | None, FINE_TUNING] = None
    max_dev_examples: Annotated[_Count | None, FINE_TUNING] = None
    report_on: Annotated[ReportOn | None, FINE_TUNING] = None

    @field_validator("epochs", "batch_size", "lr", mode="before")
    @classmethod
    def _one_value_is_a_list_of_one(cls, values: Any) -> Any:
        return values if values is None or _is_list(values) else [values]


SETTINGS = tuple(TrialSettings.model_fields)
assert set(SETTINGS) == set(Grid.model_fields)


class TaskConfig(Grid):
    """A task, with settings for it alone; null: as for all tasks."""

    name: Annotated[str, LOGGING]
    """The name of a task, or the path of a YAML file that describes another one."""
    start_from: Annotated[str | None, FINE_TUNING] = None
    """Another task of `eval.tasks`: trials begin with the encoder of its fine-tuned trial with the same initialization
    and seed, at that task's chosen settings (Liu et al. 2019, section 5.1); null: with the initialization itself."""


_DEFAULT = TrialSettings()


class EvalConfig(Grid):
    """The downstream tasks and how their trials are fine-tuned."""

    epochs: Annotated[list[_Positive], FINE_TUNING] = Field(default=[_DEFAULT.epochs], min_length=1)
    batch_size: Annotated[list[_Count], FINE_TUNING] = Field(default=[_DEFAULT.batch_size], min_length=1)
    lr: Annotated[list[_Positive], FINE_TUNING] = Field(default=[_DEFAULT.lr], min_length=1)
    warmup_ratio: Annotated[_Fraction, FINE_TUNING] = _DEFAULT.warmup_ratio
    schedule: Annotated[Schedule, FINE_TUNING] = _DEFAULT.schedule
    layer_lr_decay: Annotated[_Decay, FINE_TUNING] = _DEFAULT.layer_lr_decay
    gradual_unfreezing: Annotated[bool, FINE_TUNING] = _DEFAULT.gradual_unfreezing
    weight_decay: Annotated[_NotNegative, FINE_TUNING] = _DEFAULT.weight_decay
    pooling: Annotated[Pooling, FINE_TUNING] = _DEFAULT.pooling
    stride: Annotated[_Count, FINE_TUNING] = _DEFAULT.stride
    document_context: Annotated[bool, FINE_TUNING] = _DEFAULT.document_context
    report_on: Annotated[ReportOn, FINE_TUNING] = _DEFAULT.report_on
    tasks: Annotated[list[TaskConfig], LOGGING] = Field(default=[])
    """Names of tasks, or mappings of a name and the settings for this task alone."""
    seeds: Annotated[list[int], LOGGING] = Field(default=[0, 1, 2], min_length=1)
    inits: Annotated[list[Init], LOGGING] = Field(default=["pretrained", "random"], min_length=1)
    """Random weights cost as much as the checkpoint again, and show what pretraining is worth."""
    data_dir: Annotated[str | None, LOGGING] = None
    """Directory with the official files of those tasks that no installed package contains; null:
    `share/multihop` in the Python environment, where `make demo` puts them."""
    cpus: Annotated[int, LOGGING] = Field(default=1, ge=1)
    """CPU cores of a trial."""
    gpus: Annotated[_Positive, LOGGING] = 1.0
    """GPUs of a trial where the cluster has GPUs; 0.25: four trials share one."""
    memory_gb: Annotated[_Positive | None, LOGGING] = None
    """Memory that a trial reserves on its node, in GB; null: none."""
    examples: Annotated[list[str], LOGGING] = Field(default=[])
    """Texts with mask tokens, or prompts for a causal model: the report shows the model's output before and after
    pretraining."""
    checkpoint: Annotated[str | None, LOGGING] = None
    """Directory of a Hugging Face model with its tokenizer: evaluate this instead of the run's own checkpoint."""

    average_with: Annotated[str | None, LOGGING] = None
    """Directory of another run, or of a Hugging Face model with its tokenizer: its newest checkpoint is fine-tuned in
    the same way, and the class probabilities of both models are averaged, as of a forward and a backward language model
    (Howard and Ruder 2018, section 3.3). For classification and choices; null: none."""

    @field_validator("tasks", mode="before")
    @classmethod
    def _a_name_is_enough(cls, tasks: Any) -> Any:
        return [{"name": each} if isinstance(each, str) else each for each in tasks] if _is_list(tasks) else tasks

    @field_validator("tasks", "seeds", "inits", "examples")
    @classmethod
    def _no_duplicates(cls, values: list[Any]) -> list[Any]:
        names = [each.name if isinstance(each, TaskConfig) else each for each in values]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"{twice} is listed twice; remove one")
        return values


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def usual_seq_len(kind: str | None) -> int:
    """Return the maximum length in tokens that `seq_len: null` means for a kind of task.

    The lengths are those of the code published with Devlin et al. 2018, and GPT-2's context (Radford et al. 2019,
    section 2.3), of which a model uses as much as it has positions.
    """
    return {"spans": 384, "zero-shot": 1024}.get(kind or "", _DEFAULT.seq_len)


def settings_of(config: EvalConfig, task: TaskConfig, kind: str | None = None) -> list[TrialSettings]:
    """Return the settings of a task's trials: all combinations of the values in its grid, in their order, once each,
    because a trial that counted twice would look like two seeds."""
    grid: dict[str, list[Any]] = {"seq_len": [usual_seq_len(kind)]}
    for name in SETTINGS:
        of_task, shared = getattr(task, name), getattr(config, name)
        values = of_task if of_task is not None else shared
        if values is not None:
            grid[name] = list(dict.fromkeys(values)) if isinstance(values, list) else [values]
    return [TrialSettings.model_validate(dict(zip(grid, values, strict=True))) for values in product(*grid.values())]
