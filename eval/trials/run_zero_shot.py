"""Runs a trial without training: a zero-shot task, the perplexity of held-out text, or a translation."""

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from multihop.common.errors import UserError
from multihop.common.files import sha256_file
from multihop.common.json_lines import Row
from multihop.data_prep.dataset.manifest import read_token_counts
from multihop.data_prep.dataset.shards import TokenDataset, open_dataset
from multihop.data_prep.tokenizers.tokenizer import Tokenizer
from multihop.eval.config import TrialSettings
from multihop.eval.finetune.loop import NonFiniteLossError
from multihop.eval.inference.trained_model import TrainedModel, uses_any
from multihop.eval.model.load_model import device
from multihop.eval.tasks import zero_shot_sets
from multihop.eval.tasks.known_tasks import HELDOUT, TaskSource
from multihop.eval.tasks.running_text import Text, text_of
from multihop.eval.trials.open_trial import lacking_weights, trial_model, trial_task, trial_tokenizers
from multihop.eval.trials.trial import Trial
from multihop.eval.zero_shot.choice import evaluate_choices
from multihop.eval.zero_shot.completion import evaluate_completion
from multihop.eval.zero_shot.lambada import LambadaVariant, evaluate_lambada
from multihop.eval.zero_shot.minimal_pairs import evaluate_pairs
from multihop.eval.zero_shot.perplexity import cross_entropy, evaluate_perplexity, unigram_cross_entropy
from multihop.eval.zero_shot.scoring import ZeroShotResult
from multihop.eval.zero_shot.translation import evaluate_translation
from multihop.pretrain.checkpoint.huggingface_import import is_huggingface, missing_parameters
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.models.layers.model import Model

_LAMBADA_VARIANTS: dict[str, LambadaVariant] = {"lambada": "plain", "lambada-gpt2": "no stop words"}


def run_zero_shot(trial: Trial) -> tuple[Row, dict[str, Any] | None]:
    """Run a zero-shot trial; returns its fields of the row, and its predictions: None for held-out text."""
    if trial.task == HELDOUT:
        return _run_heldout(trial)
    task = trial_task(trial)
    [(tokenizer, info)] = trial_tokenizers(trial)
    model = trial_model(trial).to(device()).eval()
    _refuse_lacking(str(trial.checkpoint_dir), model, lacking_weights(trial, model), task.name)
    seq_len = min(TrialSettings.model_validate(trial.settings).seq_len, model.config.max_positions)
    if task.test:
        text = text_of([example.texts[0] for example in task.test], "text", False)
        result = evaluate_perplexity(model, tokenizer, info.special_ids, text, seq_len)
    else:
        content = zero_shot_sets.read(trial.task, trial.task_dir)
        result = _evaluate_set(trial.task, model, tokenizer, info.special_ids, content, seq_len)
    row = {
        "value": result.value,
        "dev_value": None,
        "other_metrics": result.other_metrics,
        "examples": {"test": len(result.statistics)},
        "reported_on": "test",
    }
    return row, {"statistics": result.statistics.tolist()}


def check_output_layer(source: Path, tasks: Sequence[TaskSource]) -> None:
    """Refuse tasks for which a Hugging Face model without its output layer would have to predict tokens.

    Args:
        source: directory of the model; nothing is refused if it is a run or a checkpoint, which are complete.

    Raises:
        UserError: the model's files lack the layer and one of the tasks needs it, or they are damaged.
    """
    untrained = [task.name for task in tasks if not task.is_trained]
    if untrained and is_huggingface(source):
        _refuse_lacking(str(source), *missing_parameters(source), untrained[0])


def _refuse_lacking(source: str, model: Model, lacking: Collection[str], task: str) -> None:
    if uses_any(model, model.lm_head, lacking):
        raise UserError(
            f"{source} has no weights for predicting tokens, which task {task} needs; use the model with its "
            "pretraining heads, or remove the task"
        )


def _evaluate_set(
    name: str, model: Model, tokenizer: Tokenizer, special_ids: dict[str, int], content: Any, seq_len: int
) -> ZeroShotResult:
    """Evaluate a model on a set.

    Args:
        name: a key of `ZERO_SHOT_SETS`.
        content: content of the set, as its reader returned it.
        seq_len: tokens of a window over running text.
    """
    if isinstance(content, Text):
        return evaluate_perplexity(model, tokenizer, special_ids, content, seq_len)
    if name in _LAMBADA_VARIANTS:
        return evaluate_lambada(model, tokenizer, special_ids, content, _LAMBADA_VARIANTS[name])
    if name == "blimp":
        return evaluate_pairs(model, tokenizer, special_ids, content)
    return evaluate_choices(model, tokenizer, special_ids, content)


def run_translation(trial: Trial) -> tuple[Row, dict[str, Any]]:
    """Run a translation trial; returns its fields of the row, and its predictions."""
    task = trial_task(trial)
    (tokenizer, info), *rest = trial_tokenizers(trial)
    target = rest[0][0] if rest else None
    trained = TrainedModel(trial.task, trial_model(trial).to(device()).eval(), tokenizer, info.special_ids, target)
    return evaluate_translation(trained, task)


def run_completion(trial: Trial) -> tuple[Row, dict[str, Any]]:
    """Run a completion trial; returns its fields of the row, and its predictions."""
    task = trial_task(trial)
    [(tokenizer, info)] = trial_tokenizers(trial)
    model = trial_model(trial).to(device()).eval()
    _refuse_lacking(str(trial.checkpoint_dir), model, lacking_weights(trial, model), task.name)
    return evaluate_completion(TrainedModel(trial.task, model, tokenizer, info.special_ids, completes=True), task)


def _run_heldout(trial: Trial) -> tuple[Row, None]:
    data = _open_data(trial)
    tokenizer = data.manifest.tokenizer
    model = trial_model(trial).to(device())
    _refuse_lacking(str(trial.checkpoint_dir), model, lacking_weights(trial, model), HELDOUT)
    assert FAMILIES[model.config.family].causal, "check_tasks refuses other models"
    seq_len = min(TrialSettings.model_validate(trial.settings).seq_len, model.config.max_positions)
    if not len(data.heldout):
        raise UserError("task heldout-perplexity needs held-out documents; raise data.heldout_fraction")
    loss, tokens = cross_entropy(model, data.heldout, tokenizer.special_ids["end"], seq_len)
    if not math.isfinite(loss):
        raise NonFiniteLossError(f"the cross-entropy on held-out text is {loss}")
    assert trial.data_path is not None
    counts = read_token_counts(trial.data_path, data.manifest)
    row = {
        "value": math.exp(loss),
        "dev_value": None,
        "other_metrics": {
            "cross-entropy": loss,
            "unigram perplexity": math.exp(unigram_cross_entropy(data.heldout, counts)),
            "uniform perplexity": float(tokenizer.vocab_size),
            "tokens": tokens,
        },
        "examples": {"test": len(data.heldout)},
        "reported_on": "test",
    }
    return row, None


def _open_data(trial: Trial) -> TokenDataset:
    assert trial.data_path is not None, "check_tasks refuses it"
    # A node may have no shards for training: they are not read here.
    data = open_dataset(trial.data_path, _needs_no_training_shard)
    if data.manifest.fingerprint != trial.data_fingerprint:
        raise UserError(f"the data in {trial.data_path} is not the run's data; run `multihop prep` again")
    for shard in data.manifest.of_split("heldout"):
        # `multihop prep` does not hash files whose size and modification time are unchanged.
        path = Path(trial.data_path) / shard.file
        if sha256_file(path) != shard.sha256:
            raise UserError(f"{path} is damaged: its SHA-256 is not the manifest's; run `multihop prep --verify`")
    return data


def _needs_no_training_shard(path: Path) -> None:
    raise AssertionError(path)
