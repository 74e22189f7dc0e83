"""The trials of a run."""

from collections.abc import Sequence
from pathlib import Path

from multihop.eval.config import SHORTEST, EvalConfig, TrialSettings, settings_of
from multihop.eval.model.model_under_test import ModelUnderTest
from multihop.eval.tasks.known_tasks import HELDOUT, TaskSource
from multihop.eval.tasks.task import UNTRAINED, Example, Task
from multihop.eval.trials.trial import Trial, describe_task


def plan_trials(
    config: EvalConfig,
    tasks: Sequence[TaskSource],
    evaluated: ModelUnderTest,
    weights_dir: Path | None = None,
    parent: ModelUnderTest | None = None,
) -> list[Trial]:
    """Each task with each of its settings and seeds, from each start.

    A task that trains nothing is run with the first seed only. Trials with `start_from` are given their
    source by `multihop.eval.trials.start_from` once it is known.

    Args:
        tasks: of the recipe, from `open_tasks`.
        weights_dir: for the weights of tasks that others start from, on a file system that all workers share.
        parent: the initial weights of the evaluated model's training, for the start "parent".

    Raises:
        UserError: the files of a task are missing or not in their official format.
    """
    # Workers start in another directory.
    task_dir = str(Path(config.data_dir).absolute()) if config.data_dir is not None else None
    sources = {asked.start_from for asked in config.tasks}
    models = {"pretrained": evaluated, "parent": parent, "random": None}
    assert parent is not None or "parent" not in config.inits
    trials = []
    references = {asked.name: source.reference for asked, source in zip(config.tasks, tasks, strict=True)}
    for asked, source in zip(config.tasks, tasks, strict=True):
        task = source.task
        untrained = task.kind in UNTRAINED
        shares = asked.start_from is not None or asked.name in sources
        assert weights_dir is not None or not shares
        for settings in settings_of(config, asked, task.kind)[: 1 if untrained else None]:
            # The key and the row have the length that is used, not the requested one.
            seq_len = min(settings.seq_len, max(SHORTEST, evaluated.model.max_positions))
            settings = settings.model_copy(update={"seq_len": seq_len})
            described = describe_task(task, settings, evaluated.heldout_sha256 if asked.name == HELDOUT else None)
            work = _work(task, settings)
            for seed in config.seeds[: 1 if untrained else None]:
                for init in config.inits:
                    start = models[init]
                    trials.append(
                        Trial(
                            task=source.reference,
                            task_fingerprint=task.fingerprint,
                            kind=task.kind,
                            described=described,
                            init=init,
                            seed=seed,
                            settings=settings.model_dump(mode="json"),
                            checkpoint_dir=start.checkpoint_dir if start else None,
                            checkpoint_sha256=start.checkpoint_sha256 if start else None,
                            checkpoint_step=start.checkpoint_step if start else None,
                            model=evaluated.model.model_dump(mode="json"),
                            vocab_size=evaluated.vocab_size,
                            tokenizer_path=evaluated.tokenizer_path,
                            tokenizer_sha256=evaluated.tokenizer_sha256,
                            data_path=evaluated.data_path,
                            data_fingerprint=evaluated.data_fingerprint,
                            task_dir=task_dir,
                            threads=config.cpus,
                            work=work,
                            start_from=references[asked.start_from] if asked.start_from is not None else None,
                            weights_dir=str(weights_dir) if shares else None,
                            target_tokenizer_path=evaluated.target_tokenizer_path,
                            source_vocab_size=evaluated.source_vocab_size,
                        )
                    )
    return trials


def _work(task: Task, settings: TrialSettings) -> float:
    """A step forward and backward is three times as long as one forward; a frozen model has no backward."""
    train = _characters(task.train, settings.max_examples, settings.seq_len)
    dev = _characters(task.dev, settings.max_dev_examples, settings.seq_len)
    test = _characters(task.reported(settings.report_on)[0], None, settings.seq_len)
    return settings.epochs * ((1 if settings.features else 3) * train + dev) + test


def _characters(examples: Sequence[Example], limit: int | None, seq_len: int) -> float:
    used = len(examples) if limit is None else min(limit, len(examples))
    longest = 5 * seq_len  # a token has four or five characters
    total = sum(min(longest, sum(map(len, example.texts))) for example in examples)
    return total * used / max(1, len(examples))
