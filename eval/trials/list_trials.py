"""Plans the trials of a run."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from multihop.common.counter_rng import key_of
from multihop.eval.config import MIN_SEQ_LEN, EvalConfig, Init, ReportOn, TrialSettings, settings_of
from multihop.eval.model.model_under_test import ModelUnderTest
from multihop.eval.tasks.known_tasks import HELDOUT, TaskSource
from multihop.eval.tasks.task import UNTRAINED, Task
from multihop.eval.trials.trial import Trial, describe_task
from multihop.pretrain.models.families import FAMILIES


def plan_trials(
    config: EvalConfig,
    tasks: Sequence[TaskSource],
    evaluated: ModelUnderTest,
    weights_dir: Path | None = None,
    parent: ModelUnderTest | None = None,
    average_with: ModelUnderTest | None = None,
) -> list[Trial]:
    """Plan a trial for each task, each of its settings and seeds, and each initialization.

    A task that trains nothing is run with the first seed only. `multihop.eval.trials.start_from` adds the source of a
    trial with `start_from` once it is known.

    Args:
        tasks: the recipe's tasks, from `open_tasks`.
        weights_dir: folder for the weights of tasks that others start from, on a file system that all workers share.
        parent: the model with the initial weights of its training, if `eval.inits` has "parent".
        average_with: the model of `eval.average_with`.

    Raises:
        UserError: the files of a task are missing or not in their official format.
    """
    # Workers start in another directory.
    task_dir = str(Path(config.data_dir).absolute()) if config.data_dir is not None else None
    sources = {task_config.start_from for task_config in config.tasks}
    models = {"pretrained": evaluated, "parent": parent, "random": None}
    assert parent is not None or "parent" not in config.inits
    trials = []
    references = {task_config.name: source.reference for task_config, source in zip(config.tasks, tasks, strict=True)}
    for task_config, source in zip(config.tasks, tasks, strict=True):
        task = source.task
        untrained = task.kind in UNTRAINED
        # A grid has thousands of settings, and a task hundreds of thousands of examples.
        characters = cache(partial(_characters, task))
        describe = cache(partial(describe_task, task))
        test_fingerprint = evaluated.heldout_sha256 if task_config.name == HELDOUT else None
        shares = task_config.start_from is not None or task_config.name in sources
        assert weights_dir is not None or not shares
        for settings in settings_of(config, task_config, task.kind)[: 1 if untrained else None]:
            # The key and the row have the length that is used, not the requested one.
            positions = min(each.model.max_positions for each in (evaluated, average_with) if each is not None)
            seq_len = min(settings.seq_len, max(MIN_SEQ_LEN, positions))
            settings = settings.model_copy(update={"seq_len": seq_len})
            described = describe(settings.report_on, test_fingerprint)
            work = _work(settings, characters)
            if task.metric == "perplexity" and not FAMILIES[evaluated.model.family].causal:
                work *= settings.seq_len  # a forward pass for each token
            for seed in config.seeds[: 1 if untrained else None]:
                for init in config.inits:
                    weights = models[init]
                    trials.append(
                        Trial(
                            task=source.reference,
                            task_fingerprint=task.fingerprint,
                            kind=task.kind,
                            described=described,
                            init=init,
                            seed=seed,
                            settings=settings.model_dump(mode="json"),
                            checkpoint_dir=weights.checkpoint_dir if weights else None,
                            checkpoint_sha256=weights.checkpoint_sha256 if weights else None,
                            checkpoint_step=weights.checkpoint_step if weights else None,
                            model=(weights or evaluated).model.model_dump(mode="json"),
                            vocab_size=evaluated.vocab_size,
                            tokenizer_path=evaluated.tokenizer_path,
                            tokenizer_sha256=evaluated.tokenizer_sha256,
                            data_path=evaluated.data_path,
                            data_fingerprint=evaluated.data_fingerprint,
                            task_dir=task_dir,
                            threads=config.cpus,
                            work=work,
                            start_from=references[task_config.start_from]
                            if task_config.start_from is not None
                            else None,
                            weights_dir=str(weights_dir) if shares else None,
                            target_tokenizer_path=evaluated.target_tokenizer_path,
                            source_vocab_size=evaluated.source_vocab_size,
                            average_with=_fields_of(average_with, init, seed) if average_with is not None else None,
                        )
                    )
    return trials


def _fields_of(averaged: ModelUnderTest, init: Init, seed: int) -> dict[str, Any]:
    """Return the fields of a trial of the other model, with its trained weights, or random ones. It has a seed of its
    own: with the trial's, two models of one kind would be one where both begin with random weights."""
    weights = None if init == "random" else averaged
    return {
        "seed": key_of("average_with", seed) >> 1,
        "init": "random" if init == "random" else "pretrained",
        "checkpoint_dir": weights.checkpoint_dir if weights else None,
        "checkpoint_sha256": weights.checkpoint_sha256 if weights else None,
        "checkpoint_step": weights.checkpoint_step if weights else None,
        "model": averaged.model.model_dump(mode="json"),
        "vocab_size": averaged.vocab_size,
        "tokenizer_path": averaged.tokenizer_path,
        "tokenizer_sha256": averaged.tokenizer_sha256,
        "data_path": averaged.data_path,
        "data_fingerprint": averaged.data_fingerprint,
    }


def _work(settings: TrialSettings, characters: Callable[..., float]) -> float:
    """Estimate a trial's duration in characters read: forward and backward take three times as long as forward alone,
    and a frozen model has no backward.

    Args:
        characters: `_characters` of the task.
    """
    train = characters("train", settings.max_examples, settings.seq_len)
    dev = characters("dev", settings.max_dev_examples, settings.seq_len)
    test = characters("reported", None, settings.seq_len, settings.report_on)
    return settings.epochs * ((1 if settings.features else 3) * train + dev) + test


def _characters(
    task: Task,
    part: Literal["train", "dev", "reported"],
    limit: int | None,
    seq_len: int,
    report_on: ReportOn = "half",
) -> float:
    examples = task.reported(report_on)[0] if part == "reported" else task.train if part == "train" else task.dev
    used = len(examples) if limit is None else min(limit, len(examples))
    longest = 5 * seq_len  # a token has four or five characters
    total = sum(min(longest, sum(map(len, example.texts))) for example in examples)
    return total * used / max(1, len(examples))
