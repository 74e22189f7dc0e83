"""Trials that start from the fine-tuned weights of another task's trials, as RTE, STS-B and MRPC from MNLI
(Liu et al. 2019, section 5.1; Lan et al. 2019 likewise).

run all trials without `start_from`; those of a task that others start from keep their encoder's weights
for each initialization of such a task: choose its settings by the development score
run the others, each from the chosen trial of its initialization and seed
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from multihop.common.files import canonical_json, sha256_file
from multihop.common.json_lines import Row
from multihop.eval.statistics.choose import choose
from multihop.eval.tasks.known_tasks import task_name
from multihop.eval.trials.trial import Trial, failed_row, hyperparameters, trial_key, weights_file

_WEIGHTS = re.compile(r"[0-9a-f]{64}\.safetensors")


@dataclass(frozen=True)
class Wave:
    """The trials that can run now."""

    trials: list[Trial]
    failed: list[Row]
    """Rows of trials that cannot be run, because the trial that they start from failed."""


def next_wave(trials: Sequence[Trial], rows: Sequence[Row], tried: Collection[str] = ()) -> Wave:
    """Return the missing trials whose source weights exist; empty when all trials have their rows.

    A trial that failed for an external reason is run again, unless it was tried. So are trials whose weights are needed
    and missing or damaged.

    Args:
        trials: trials from `multihop.eval.trials.list_trials.plan_trials`.
        rows: rows of results.jsonl; the last one of a key counts.
        tried: keys of trials that this command ran.
    """
    last = last_rows(rows)
    first = [trial for trial in trials if trial.start_from is None and _is_left(trial, last, tried)]
    if first:
        return Wave(first, [])
    known = [trial for trial in with_sources(trials, last) if trial.start_from is not None]
    left = [(trial, last[str(trial.source_key)]) for trial in known if _is_left(trial, last, tried)]
    able = [trial for trial, source in left if source["status"] == "ok"]
    lost = _without_weights(able) - set(tried)
    if lost:
        return Wave([trial for trial in trials if trial.start_from is None and trial_key(trial) in lost], [])
    return Wave(able, [_failed(trial, source) for trial, source in left if source["status"] != "ok"])


def remove_unneeded(weights_dir: Path, trials: Sequence[Trial], rows: Sequence[Row], tried: Collection[str]) -> None:
    """Remove the weights that no trial will start from: those that were not chosen, and those whose trials are done."""
    last = last_rows(rows)
    known = [trial for trial in with_sources(trials, last) if trial.start_from is not None]
    needed = {trial.source_key for trial in known if _is_left(trial, last, ())}
    first = [trial for trial in trials if trial.start_from is None and trial.weights_dir is not None]
    unfinished = {trial.task for trial in first if _is_left(trial, last, tried)}
    needed |= {trial_key(trial) for trial in first if trial.task in unfinished}
    for path in weights_dir.glob("*.safetensors") if weights_dir.is_dir() else ():
        if _WEIGHTS.fullmatch(path.name) and path.stem not in needed:
            path.unlink(missing_ok=True)


def last_rows(rows: Iterable[Row]) -> dict[str, Row]:
    """Return rows by their keys; of several with one key, the last."""
    return {row["key"]: row for row in rows}


def _is_left(trial: Trial, last: Mapping[str, Row], tried: Collection[str]) -> bool:
    key = trial_key(trial)
    row = last.get(key)
    return row is None or (row.get("retry", False) and key not in tried)


def with_sources(trials: Sequence[Trial], last: Mapping[str, Row]) -> list[Trial]:
    """Return the trials whose keys are known, in their order.

    The key of a trial with `start_from` is known once its source task has all rows: its source is the trial of the same
    initialization and seed with the settings that are chosen for that task.

    Args:
        last: rows by key, from `last_rows`.
    """
    chosen: dict[tuple[str | None, str, int], str] = {}
    for name in dict.fromkeys(trial.start_from for trial in trials if trial.start_from is not None):
        sources = [(trial, trial_key(trial)) for trial in trials if trial.task == name]
        rows = [last[key] for _, key in sources if key in last]
        if len(rows) < len(sources):
            continue
        best = {group.init: canonical_json(choice.chosen.hyperparameters) for group, choice in choose(rows).items()}
        chosen |= {
            (name, source.init, source.seed): key
            for source, key in sources
            if canonical_json(hyperparameters(source)) == best[source.init]
        }
    with_keys = []
    for trial in trials:
        key = chosen.get((trial.start_from, trial.init, trial.seed))
        if key is not None:
            with_keys.append(replace(trial, source_key=key, source_sha256=last[key].get("weights_sha256")))
        elif trial.start_from is None:
            with_keys.append(trial)
    return with_keys


def _without_weights(trials: Sequence[Trial]) -> set[str]:
    """Return the keys of source trials whose weights are missing, or differ from the hashes in their rows."""
    needed = {(str(trial.source_key), trial.source_sha256, str(trial.weights_dir)) for trial in trials}
    return {
        key
        for key, sha256, folder in needed
        if not (path := weights_file(folder, key)).exists() or sha256_file(path) != sha256
    }


def _failed(trial: Trial, source: Row) -> Row:
    assert trial.start_from is not None
    error = f"the trial of {task_name(trial.start_from)} that it starts from failed: {source['error']}"
    return failed_row(trial, error, 0.0, retry=source.get("retry", False))
