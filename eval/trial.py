"""One trial: (task, checkpoint or random weights, hyper-parameters, seed) in, one row of results.jsonl out."""

import math
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from data_prep.files import sha256_json
from data_prep.rows import Row
from eval.config import EvalConfig
from eval.tasks import Task, load_task
from pretrain.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from data_prep.shards import TokenDataset
    from pretrain.checkpoint import CheckpointManifest
    from pretrain.models import Model

Init = Literal["pretrained", "random"]

FINE_TUNING = ("epochs", "max_examples", "max_dev_examples", "batch_size", "lr", "seq_len")
ZERO_SHOT = ("seq_len",)


@dataclass(frozen=True)
class Trial:
    """Everything one worker needs; plain values, so that it can be sent anywhere as JSON."""

    task: str
    task_fingerprint: str
    init: Init
    seed: int
    checkpoint_dir: str | None
    """An absolute path or s3://BUCKET/PREFIX; None where `init` is random, as the next two."""
    checkpoint_sha256: str | None
    """What tells this checkpoint's content from any other."""
    checkpoint_step: int | None
    model: dict[str, Any]
    """The recipe's `model` section."""
    data_path: str
    data_fingerprint: str
    eval: dict[str, Any]
    """The recipe's `eval` section."""
    threads: int
    """What torch may use of the machine; no part of what makes the result."""


def plan_trials(
    config: EvalConfig,
    model: ModelConfig,
    checkpoint_dir: str,
    checkpoint_sha256: str,
    checkpoint_step: int,
    data_path: Path,
    data_fingerprint: str,
    threads: int = 1,
) -> list[Trial]:
    """Each task with each seed from the checkpoint and from random weights.

    Without training a seed changes nothing but random weights: a zero-shot task has one trial of each kind.

    Raises:
        ValueError: a task is not known or its files are missing.
    """
    if config.data_dir is not None:  # a worker starts in another folder
        config = config.model_copy(update={"data_dir": str(Path(config.data_dir).absolute())})
    trials = []
    for name in config.tasks:
        task = load_task(name, config.data_dir)
        for seed in config.seeds[:1] if task.kind == "zero-shot" else config.seeds:
            for init in ("pretrained", "random"):
                pretrained = init == "pretrained"
                trials.append(
                    Trial(
                        task=name,
                        task_fingerprint=task.fingerprint,
                        init="pretrained" if pretrained else "random",
                        seed=seed,
                        checkpoint_dir=checkpoint_dir if pretrained else None,
                        checkpoint_sha256=checkpoint_sha256 if pretrained else None,
                        checkpoint_step=checkpoint_step if pretrained else None,
                        model=model.model_dump(mode="json"),
                        data_path=str(data_path),
                        data_fingerprint=data_fingerprint,
                        eval=config.model_dump(mode="json"),
                        threads=threads,
                    )
                )
    return trials


def trial_key(trial: Trial) -> str:
    """SHA-256 of what makes the trial's result: neither paths nor threads, so that a moved run keeps its rows."""
    made_of = {
        "task": trial.task,
        "task_fingerprint": trial.task_fingerprint,
        "hyperparameters": hyperparameters(trial),
        "seed": trial.seed,
        "init": trial.init,
        "checkpoint": trial.checkpoint_sha256,
        # The preset's name says nothing that the sizes do not.
        "model": {name: value for name, value in trial.model.items() if name != "preset"},
        "data_fingerprint": trial.data_fingerprint,
    }
    return sha256_json(made_of)


def hyperparameters(trial: Trial) -> dict[str, Any]:
    """Those settings of the recipe's `eval` section that the result depends on."""
    used = ZERO_SHOT if trial.task == "heldout-perplexity" else FINE_TUNING
    return {name: trial.eval[name] for name in used}


def run_trial(trial: Trial) -> Row:
    """Run it on this machine: on its GPU where torch sees one, else on `trial.threads` cores.

    Returns:
        The row. Its status is "failed", with the reason, when the loss did not stay finite: the same trial would
        fail again.

    Raises:
        ValueError: the data, the task's files or the checkpoint are missing, or are not those of the plan.
    """
    import torch

    from eval.finetune import NonFiniteLossError

    started = time.monotonic()
    torch.set_num_threads(trial.threads)
    config = EvalConfig.model_validate(trial.eval)
    task = load_task(trial.task, config.data_dir)
    if task.fingerprint != trial.task_fingerprint:
        raise ValueError(
            f"the files of task {trial.task} on this machine are not those the trials were planned with; "
            "install the same packages on every machine"
        )
    try:
        outcome = _perplexity(trial, config) if task.kind == "zero-shot" else _finetuned(trial, task, config)
    except NonFiniteLossError as error:
        return failed_row(trial, str(error), time.monotonic() - started)
    return {**_identity(trial, task), **outcome, "status": "ok", "seconds": round(time.monotonic() - started, 3)}


def failed_row(trial: Trial, error: str, seconds: float) -> Row:
    """The row of a trial that has no result.

    Args:
        error: one sentence that says why.
    """
    task = load_task(trial.task, trial.eval["data_dir"])
    empty: Row = {"value": None, "dev_value": None, "other_metrics": {}, "examples": {}}
    return {**_identity(trial, task), **empty, "status": "failed", "error": error, "seconds": round(seconds, 3)}


def _identity(trial: Trial, task: Task) -> Row:
    return {
        "task": trial.task,
        "kind": task.kind,
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "seed": trial.seed,
        "init": trial.init,
        "checkpoint_step": trial.checkpoint_step,
        "hyperparameters": hyperparameters(trial),
        "key": trial_key(trial),
        "source": task.source,
        "notes": task.notes,
    }


def _finetuned(trial: Trial, task: Task, config: EvalConfig) -> Row:
    from data_prep.tokenizers.tokenizer import load
    from eval.encode import encode
    from eval.finetune import finetune
    from eval.heads import TaskModel
    from eval.tasks.task import at_most

    manifest = _open_data(trial).manifest
    tokenizer = load(Path(trial.data_path) / manifest.tokenizer.file)
    encoder = _model(trial, manifest.tokenizer.vocab_size)
    seq_len = min(config.seq_len, encoder.config.max_positions)
    examples = {
        "train": at_most(task.train, config.max_examples),
        "dev": at_most(task.dev, config.max_dev_examples),
        "test": list(task.test),
    }
    train, dev, test = (
        encode(part, task.kind, tokenizer, manifest.tokenizer.special_ids, seq_len) for part in examples.values()
    )
    model = TaskModel(encoder, task, trial.seed).to(_device())
    result = finetune(model, task, train, dev, test, config, trial.seed)
    return {
        "value": result.value,
        "dev_value": result.dev_value,
        "best_epoch": result.best_epoch,
        "other_metrics": result.other_metrics,
        "examples": {name: len(part) for name, part in examples.items()},
    }


def _perplexity(trial: Trial, config: EvalConfig) -> Row:
    from data_prep.manifest import read_token_counts
    from eval.finetune import NonFiniteLossError
    from eval.perplexity import cross_entropy, unigram_cross_entropy
    from pretrain.models.gpt import GPT
    from pretrain.models.gpt2 import GPT2

    data = _open_data(trial)
    tokenizer = data.manifest.tokenizer
    model = _model(trial, tokenizer.vocab_size).to(_device())
    assert isinstance(model, GPT | GPT2), "check_tasks lets no other model through"
    seq_len = min(config.seq_len, model.config.max_positions)
    if not len(data.heldout):
        raise ValueError("task heldout-perplexity needs held-out documents; raise data.heldout_fraction")
    loss, pieces = cross_entropy(model, data.heldout, tokenizer.special_ids["end"], seq_len)
    if not math.isfinite(loss):
        raise NonFiniteLossError(f"the cross-entropy on held-out text is {loss}")
    counts = read_token_counts(trial.data_path, data.manifest)
    return {
        "value": math.exp(loss),
        "dev_value": None,
        "other_metrics": {
            "cross-entropy": loss,
            "unigram perplexity": math.exp(unigram_cross_entropy(data.heldout, counts)),
            "uniform perplexity": float(tokenizer.vocab_size),
            "pieces": pieces,
        },
        "examples": {"test": len(data.heldout)},
    }


def _open_data(trial: Trial) -> "TokenDataset":
    from data_prep.shards import open_dataset

    data = open_dataset(trial.data_path)
    if data.manifest.fingerprint != trial.data_fingerprint:
        raise ValueError(f"the data in {trial.data_path} is not that of the run; run `multihop prep` again")
    return data


def _model(trial: Trial, vocab_size: int) -> "Model":
    """The checkpoint's weights, or random ones of the trial's seed."""
    from pretrain.checkpoint import CheckpointReader
    from pretrain.models import build_model, initialise

    model = build_model(ModelConfig.model_validate(trial.model), vocab_size)
    if trial.checkpoint_dir is None:
        initialise(model, trial.seed)
        return model
    assert trial.checkpoint_sha256 is not None
    with CheckpointReader(trial.checkpoint_dir, _verified(trial.checkpoint_dir, trial.checkpoint_sha256)) as reader:
        model.load_state_dict(dict(reader.weights()))
    return model


@lru_cache(maxsize=1)
def _verified(checkpoint: str, sha256: str) -> "CheckpointManifest":
    """The manifest, once in this process for all trials of a checkpoint.

    Raises:
        ValueError: a file is missing or damaged, or it is another one than the trial was planned with.
    """
    from pretrain.checkpoint import verify

    manifest = verify(checkpoint)
    if manifest.content_hash() != sha256:
        raise ValueError(f"{checkpoint} is another checkpoint than the trials were planned with; start again")
    return manifest


def _device() -> "torch.device":
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
