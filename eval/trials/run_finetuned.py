"""Runs a trial that fine-tunes: its inputs, the pretrained encoder with a new head, and the row of the result."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from safetensors.torch import load, save_file

from multihop.common.errors import UserError
from multihop.common.files import atomic_replace, make_folder, sha256_file
from multihop.common.json_lines import Row
from multihop.data_prep.tokenizers.info import TokenizerInfo
from multihop.data_prep.tokenizers.tokenizer import Tokenizer
from multihop.eval.config import TrialSettings
from multihop.eval.finetune.heads import TaskModel
from multihop.eval.finetune.input_cache import TaskInputs, task_inputs
from multihop.eval.finetune.labeled import Member, finetune_labeled
from multihop.eval.finetune.loop import History
from multihop.eval.finetune.span_inputs import span_inputs
from multihop.eval.finetune.spans import finetune_spans
from multihop.eval.finetune.templates import keeps_embeddings, template_of
from multihop.eval.model.load_model import device
from multihop.eval.tasks.known_tasks import task_name
from multihop.eval.tasks.task import Task
from multihop.eval.trials.open_trial import trial_model, trial_task, trial_tokenizers
from multihop.eval.trials.trial import Trial, trial_key, weights_file
from multihop.eval.trials.write_predictions import predictions_of
from multihop.pretrain.models.families import FAMILIES


def run_labeled(trial: Trial) -> tuple[Row, dict[str, Any]]:
    """Run a trial of classification, regression, tagging or choice; returns its fields of the row, and its
    predictions."""
    settings = TrialSettings.model_validate(trial.settings)
    model, inputs, tokenizer, info = _open_labeled(trial, settings)
    others = []
    if trial.average_with is not None:
        its_trial = replace(trial, **trial.average_with, average_with=None)
        other, inputs_of_other, _, _ = _open_labeled(its_trial, settings)
        others = [Member(other, inputs_of_other.sets, its_trial.seed)]
    own = Member(model, inputs.sets, trial.seed)
    result = finetune_labeled(own, inputs.task, settings, others)
    special = set(info.special_ids.values())
    predictions = predictions_of(
        inputs.task,
        inputs,
        result,
        lambda ids: tokenizer.decode([i for i in ids if i not in special and i < info.vocab_size]),
    )
    sizes = {name: len(examples) for name, examples in inputs.sets.items()}
    row = _row(result.value, result.other_metrics, result.history, sizes, inputs.reported_on)
    return row | _layer_weights(model) | _keep_weights(trial, model), predictions


def _open_labeled(trial: Trial, settings: TrialSettings) -> tuple[TaskModel, TaskInputs, Tokenizer, TokenizerInfo]:
    """Return the model with a new head, the examples as it reads them, and its tokenizer."""
    both_orders = FAMILIES[trial.model["family"]].reads_one_way
    inputs, tokenizer, info = _read_inputs(trial, settings, task_inputs, both_orders)
    return _with_head(trial, inputs.task, settings), inputs, tokenizer, info


def run_spans(trial: Trial) -> tuple[Row, dict[str, Any]]:
    """Run a trial of answer spans; returns its fields of the row, and its predictions."""
    settings = TrialSettings.model_validate(trial.settings)
    family = FAMILIES[trial.model["family"]]
    inputs, _, _ = _read_inputs(trial, settings, span_inputs, family.causal or family.cls_last)
    model = _with_head(trial, inputs.task, settings)
    result = finetune_spans(model, inputs, settings, trial.seed)
    row = _row(result.value, result.other_metrics, result.history, inputs.sizes, inputs.reported_on)
    return row | _layer_weights(model) | _keep_weights(trial, model), result.predictions


_Inputs = TypeVar("_Inputs")


def _read_inputs(
    trial: Trial, settings: TrialSettings, read: Callable[..., _Inputs], of_family: bool
) -> tuple[_Inputs, Tokenizer, TokenizerInfo]:
    """Return the encoded examples of the trial's task, by `task_inputs` or `span_inputs`, and the tokenizer.

    Args:
        of_family: the argument that depends on the family: `both_orders`, or `null_last`.
    """
    [(tokenizer, info)] = trial_tokenizers(trial)
    family = trial.model["family"]
    inputs = read(
        lambda: trial_task(trial),
        trial.task_fingerprint,
        tokenizer,
        info.sha256,
        template_of(family, info.special_ids, trial.vocab_size, keeps_embeddings(settings)),
        of_family,
        settings,
    )
    return inputs, tokenizer, info


def _with_head(trial: Trial, task: Task, settings: TrialSettings) -> TaskModel:
    """Return the encoder with a new head; with the weights of the source's trial if it starts from one.

    Raises:
        UserError: those weights are missing or damaged.
    """
    encoder = trial_model(trial)
    model = TaskModel(encoder, task, trial.seed, settings.head_dropout, settings.features, settings.pooling)
    if trial.source_key is not None:
        assert trial.weights_dir is not None and trial.start_from is not None
        path = weights_file(trial.weights_dir, trial.source_key)
        content = path.read_bytes() if path.exists() else None
        if content is None or hashlib.sha256(content).hexdigest() != trial.source_sha256:
            raise UserError(
                f"{path}, the weights of {task_name(trial.start_from)} that the trial starts from, is "
                f"{'missing' if content is None else 'damaged'}; rerun the same command to train them again"
            )
        model.encoder.load_state_dict(load(content))
    return model.to(device())


def _keep_weights(trial: Trial, model: TaskModel) -> Row:
    """Keep the encoder's weights, if other trials may start from them; returns their hash for the row."""
    if trial.weights_dir is None or trial.start_from is not None:
        return {}
    path = weights_file(trial.weights_dir, trial_key(trial))
    make_folder(path.parent)
    with atomic_replace(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in model.encoder.state_dict().items()}, temporary)
        sha256 = sha256_file(temporary)
    return {"weights_sha256": sha256}


def _layer_weights(model: TaskModel) -> Row:
    """Return the learned shares of the hidden states, if there are any, for the row."""
    weights = model.features.layer_weights() if model.features is not None else {}
    return {"layer_weights": weights} if weights else {}


def _row(
    value: float, other_metrics: dict[str, float], history: History, sizes: Mapping[str, int], reported_on: str
) -> Row:
    return {
        "value": value,
        "dev_value": history.dev_value,
        "best_epoch": history.best_epoch,
        "other_metrics": other_metrics,
        "examples": dict(sizes),
        "reported_on": reported_on,
        "curve": {"loss": history.loss_curve, "dev": history.dev_curve},
    }
