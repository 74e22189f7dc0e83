"""A trial, (task, model, settings, seed), and the key that identifies it. Its result is a row of results.jsonl."""

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from multihop.common.config import FINE_TUNING, ZERO_SHOT, Effect, select_by_effect
from multihop.common.files import sha256_json
from multihop.common.json_lines import Row
from multihop.eval.config import Init, ReportOn, TrialSettings
from multihop.eval.tasks.known_tasks import task_name
from multihop.eval.tasks.task import UNTRAINED, Kind, Task
from multihop.pretrain.models.families import FAMILIES, parse_model_config

_IN_NAMES = {"lr": "lr", "batch_size": "batch", "epochs": "epochs"}


@dataclass(frozen=True)
class Trial:
    """Everything that a worker needs to run a trial, in plain values that can be sent as JSON."""

    task: str
    """The name of the task, or the path of the YAML file that describes it."""
    task_fingerprint: str
    kind: Kind
    """The kind of the task."""
    described: dict[str, Any]
    """The fields of the row that describe the task (`describe_task`); not part of the key."""
    init: Init
    seed: int
    settings: dict[str, Any]
    """`TrialSettings`."""
    checkpoint_dir: str | None
    """An absolute path or s3://BUCKET/PREFIX, of a checkpoint of ours or a Hugging Face model: the evaluated
    weights, or the initial weights of their training; None for random weights, like the next two."""
    checkpoint_sha256: str | None
    """The checkpoint's content hash."""
    checkpoint_step: int | None
    """The step of the checkpoint; None for a Hugging Face model."""
    model: dict[str, Any]
    """The recipe's `model` section, or what a Hugging Face model's config.json says."""
    vocab_size: int
    tokenizer_path: str
    tokenizer_sha256: str
    """The hash of the tokenizer; of both tokenizers of an encoder-decoder model with two vocabularies."""
    data_path: str | None
    """The run's data set, for tasks on its held-out text; None for a Hugging Face model."""
    data_fingerprint: str | None
    task_dir: str | None
    """`eval.data_dir`."""
    threads: int
    """CPU threads for torch; not part of the key."""
    work: float
    """Estimated work, in characters read; trials run longest first. Not part of the key."""
    start_from: str | None = None
    """The task, as `task` names it, whose fine-tuned weights the trial begins with; None: `checkpoint_dir`'s."""
    source_key: str | None = None
    """The key of that task's trial; None while it is not chosen, and without `start_from`."""
    source_sha256: str | None = None
    """The hash of the file with that trial's weights."""
    weights_dir: str | None = None
    """The folder of the weights that other trials begin with; not part of the key. A trial without `start_from` writes
    its weights into it; None: no trial begins with them."""
    average_with: dict[str, Any] | None = None
    """Of a trial whose probabilities are averaged with those of another model that is fine-tuned in the same way: the
    fields in which that model's trial differs from this one."""
    target_tokenizer_path: str | None = None
    """The target's tokenizer of an encoder-decoder model with two vocabularies."""
    source_vocab_size: int | None = None
    """The size of such a model's source vocabulary; `vocab_size` is the target's."""


_KEY_VERSION = 2
"""Increased when the same trial gives another result or row than in earlier versions, so that it is run again."""


def describe_task(task: Task, report_on: ReportOn, test_fingerprint: str | None = None) -> dict[str, Any]:
    """Return the fields of a row that describe its task.

    Args:
        report_on: `TrialSettings.report_on`.
        test_fingerprint: replaces the task's own, for held-out text.
    """
    return {
        "task": task.name,
        "kind": task.kind,
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "labels": list(task.labels),
        "source": task.source,
        "notes": task.notes,
        "task_fingerprint": task.fingerprint,
        "test_fingerprint": test_fingerprint or task.test_fingerprint(report_on),
    }


def trial_key(trial: Trial) -> str:
    """Return the SHA-256 of everything that the result depends on. Paths and threads are left out: a run that is moved
    keeps its rows."""
    return sha256_json(_identity(trial))


def _identity(trial: Trial) -> dict[str, Any]:
    identity: dict[str, Any] = {
        "rules": _KEY_VERSION,
        "task": trial.task_fingerprint,
        "hyperparameters": hyperparameters(trial),
        "seed": trial.seed,
        "init": trial.init,
        "checkpoint": trial.checkpoint_sha256,
        "model": _select_of_model(json.dumps(trial.model), _relevant_effects(trial)),
        "vocab_size": trial.vocab_size,  # a Hugging Face model may have more rows than its tokenizer has tokens
        "tokenizer": trial.tokenizer_sha256,
        "data_fingerprint": trial.data_fingerprint if trial.kind in UNTRAINED else None,
    }
    if trial.start_from is not None:
        assert trial.source_key is not None, "multihop.eval.trials.start_from chooses it first"
        identity["source"] = trial.source_key
    gradual = identity["hyperparameters"].get("gradual_unfreezing", False)  # a trial that trains nothing has none
    if gradual and FAMILIES[trial.model["family"]].reads_one_way:
        identity["template"] = "end of text"  # earlier versions added tokens: see `keeps_embeddings`
    if trial.average_with is not None:
        identity["average_with"] = _identity(replace(trial, **trial.average_with, average_with=None))
    return identity


def weights_file(weights_dir: str, key: str) -> Path:
    """Return the path of the weights of a trial with this key."""
    return Path(weights_dir) / f"{key}.safetensors"


def hyperparameters(trial: Trial) -> dict[str, Any]:
    """Return the settings that the result depends on."""
    return dict(_select_of_settings(json.dumps(trial.settings), _relevant_effects(trial)))


# Thousands of trials have the same model, and some the same settings: validating them takes longer than all else.
@lru_cache(maxsize=4096)
def _select_of_settings(text: str, effects: Effect) -> dict[str, Any]:
    return select_by_effect(TrialSettings.model_validate(json.loads(text)), effects)


@lru_cache(maxsize=16)
def _select_of_model(text: str, effects: Effect) -> dict[str, Any]:
    return select_by_effect(parse_model_config(json.loads(text)), effects)


def trial_name(row: Row) -> str:
    """Return the name of a row's trial, for people: it differs from those of other trials of the run."""
    settings_of_row = row.get("hyperparameters") or {}
    settings = [f"{short} {settings_of_row[key]:g}" for key, short in _IN_NAMES.items() if key in settings_of_row]
    frozen = ["frozen"] if settings_of_row.get("features") else []
    # MLflow shows the first forty characters of it.
    return " ".join([row["task"], row["init"], f"seed {row['seed']}", *frozen, *settings])


def _relevant_effects(trial: Trial) -> Effect:
    return ZERO_SHOT if trial.kind in UNTRAINED else FINE_TUNING


def failed_row(trial: Trial, error: str, seconds: float, retry: bool = False) -> Row:
    """Return the row of a trial that has no result.

    Args:
        error: the reason, in one sentence.
        retry: whether a rerun of the command tries the trial again, because the reason was external.
    """
    empty: Row = {"value": None, "dev_value": None, "other_metrics": {}, "examples": {}}
    failure = {"status": "failed", "error": error, "retry": retry, "seconds": round(seconds, 3)}
    return {**describe_trial(trial), **empty, **failure}


def describe_trial(trial: Trial) -> Row:
    """Return the fields of a row that are known before the trial runs."""
    return {
        **trial.described,
        "seed": trial.seed,
        "init": trial.init,
        "checkpoint_step": trial.checkpoint_step,
        "checkpoint_sha256": trial.checkpoint_sha256,
        "tokenizer_sha256": trial.tokenizer_sha256,
        "hyperparameters": hyperparameters(trial),
        "key": trial_key(trial),
        **({"average_with_sha256": trial.average_with["checkpoint_sha256"]} if trial.average_with else {}),
        **({"start_from": task_name(trial.start_from), "source_key": trial.source_key} if trial.start_from else {}),
    }
