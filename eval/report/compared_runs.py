"""Read the files of runs that are compared."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from multihop.common.config import COMPATIBILITY, DATA, ORDER, UPDATES, effect_of
from multihop.common.errors import UserError
from multihop.common.files import read_json_object
from multihop.common.json_lines import Row, read_rows
from multihop.eval.report.run_metrics import by_step, heldout
from multihop.eval.statistics.choose import Choice, choose, merged
from multihop.eval.statistics.read_predictions import RunRow
from multihop.eval.statistics.verdict import trials_of
from multihop.eval.trials.plan_file import Results, read_results
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.objectives.config import OBJECTIVES, TOKEN_LOSSES, ObjectiveConfig
from multihop.pretrain.run.changes import differences, flatten, format_diff

_NOT_OF_RESULTS = ("tracking", "cluster", "checkpoint")
_NOT_OF_SCORES = ("cpus", "gpus", "memory_gb", "examples")
"""Sections of a recipe, and keys of its `eval` section, that do not change results or scores."""
Choices = dict[tuple[str, str], Choice]
"""Choices by task and initial weights."""


@dataclass(frozen=True)
class ComparedRun:
    """A run as read from its files; fields whose files do not exist yet are empty."""

    name: str
    folder: Path
    recipe: dict[str, Any]
    """The resolved recipe, without keys that its objective does not read."""
    summary: dict[str, Any]
    metrics: tuple[Row, ...]
    choices: Choices
    """Choices among the trials of the last evaluation."""
    notes: tuple[str, ...] = ()
    """Caveats about its scores, one sentence each."""
    seeds: tuple["ComparedRun", ...] = ()
    """The runs that this one represents: see `over_seeds`."""

    @property
    def keys(self) -> dict[str, Any]:
        """The recipe's values by dotted key."""
        return flatten(self.recipe)

    @property
    def compared_init(self) -> str:
        """The initial weights of fine-tuning whose scores are compared with other runs': the pretrained ones if the
        recipe evaluates them, else the parent's, else random ones."""
        evaluated = self.recipe["eval"].get("inits", [])
        return next((init for init in ("pretrained", "parent", "random") if init in evaluated), "pretrained")

    def trials(self, task: str, init: str) -> list[RunRow]:
        """The trials at the chosen settings; none if the run has no results of this task and initialization."""
        choice = self.choices.get((task, init))
        if not self.seeds or choice is None:
            return trials_of(self.folder, choice)
        folders = {
            row["key"]: run.folder
            for run in self.seeds
            if (task, init) in run.choices
            for setting in run.choices[task, init].grid
            for row in setting.rows
        }
        return [(folders[row["key"]], row) for row in choice.chosen.rows]

    @property
    def loss_name(self) -> str:
        """Name of the token loss, such as `mlm_loss`; empty before a held-out loss was measured."""
        names = (name for name in TOKEN_LOSSES if by_step(self.metrics, heldout(name)))
        return next(names, "")

    @property
    def heldout_loss(self) -> dict[int, float]:
        """The held-out token loss by step, in nats. The total loss would also depend on other objectives."""
        return by_step(self.metrics, heldout(self.loss_name))

    @property
    def final_losses(self) -> list[float]:
        """The last held-out loss of each training seed that has one."""
        losses = [run.heldout_loss for run in self.seeds or (self,)]
        return [each[max(each)] for each in losses if each]

    @property
    def predicted_tokens(self) -> tuple[str, str, str] | None:
        """A key that is equal for runs with the same held-out tokens; None before losses are measured."""
        references = (self.summary.get("unigram_loss"), self.summary.get("uniform_loss"))
        if not self.loss_name or None in references:
            return None
        unigram, uniform = (f"{value:.5f}" for value in references)
        return self.loss_name, unigram, uniform


def read_run(folder: Path) -> ComparedRun:
    """Read recipe.json and, if they exist, summary.json, metrics.jsonl, eval/plan.json and eval/results.jsonl.

    Raises:
        UserError: a file is damaged, or recipe.json is not a resolved recipe.
    """
    recipe = without_unread_keys(_read_recipe(folder / "recipe.json"))
    try:
        summary = read_json_object(folder / "summary.json", advice="rerun the same command: it is rewritten")
    except FileNotFoundError:
        summary = {}
    results = read_results(folder)
    choices = {(group.task, group.init): each for group, each in choose(results.rows).items() if each.chosen.rows}
    metrics = tuple(read_rows(folder / "metrics.jsonl"))
    name = folder.resolve().name
    return ComparedRun(name, folder, recipe, summary, metrics, choices, tuple(_notes(name, recipe, summary, results)))


def without_unread_keys(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a resolved recipe without the keys of `objective` that its objective does not read, such as the label
    smoothing of ctc: they have no effect."""
    objective = recipe.get("objective")
    if not isinstance(objective, dict) or (needs := OBJECTIVES.get(str(objective.get("name")))) is None:
        return recipe
    unread = ObjectiveConfig.model_fields.keys() - needs.keys - {"name"}
    return {**recipe, "objective": {key: value for key, value in objective.items() if key not in unread}}


def read_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """Read several runs as `read_run` does. Runs whose directories have the same name are named by their paths."""
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    return [replace(run, name=str(run.folder)) if names.count(run.name) > 1 else run for run in runs]


def _notes(name: str, recipe: dict[str, Any], summary: dict[str, Any], results: Results) -> Iterator[str]:
    again = "run `multihop eval` again"
    if results.lacks_plan:
        yield f"The results of {name} were written by an older version without plan.json and are not shown; {again}"
    now = {key: value for key, value in recipe["eval"].items() if key not in _NOT_OF_SCORES}
    then = {key: value for key, value in (results.plan.section if results.plan else now).items() if key in now}
    if changed := differences(then, now):
        yield (
            f"The scores of {name} are those of its last evaluation; since then its recipe changed "
            f"({format_diff([(f'eval.{key}', *values) for key, *values in changed])}); {again}"
        )
    if results.unfinished:
        yield f"{results.unfinished} in {name}"
    steps = {row["checkpoint_step"] for row in results.rows if row["init"] == "pretrained"} - {None}
    trained = summary.get("steps") or 0
    if steps and recipe["eval"].get("checkpoint") is None and max(steps) < trained:
        yield (
            f"The scores of {name} are those of its checkpoint at step {max(steps):,}, but it is trained to step "
            f"{trained:,}; {again}"
        )


def over_seeds(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Merge runs whose names differ only in `-seedN`, where N is the seed of their recipe; keep the others unchanged.

    A merged run is named without the seed. It has the trials of all its runs, at settings that are chosen for all of
    them together; everything else is that of the first one. Runs that differ in more than their seed are not merged.
    """
    groups: list[list[ComparedRun]] = []
    for run in runs:
        seed = run.recipe.get("seed")
        others = (group for group in groups if all(each.recipe.get("seed") != seed for each in group))
        same = next((group for group in others if _differ_only_in_seed(group[0], run)), None)
        if same is None:
            groups.append([run])
        else:
            same.append(run)
    return [_as_one(_without_seed(group[0]), group) if len(group) > 1 else group[0] for group in groups]


def _differ_only_in_seed(one: ComparedRun, other: ComparedRun) -> bool:
    """Return whether two runs differ only in their training seed, and were tested on the same examples."""
    rows = [{key: choice.chosen.rows[0] for key, choice in run.choices.items()} for run in (one, other)]
    tested = [{key: (row["metric"], row["test_fingerprint"]) for key, row in by_task.items()} for by_task in rows]
    changed = (key for key, _, _ in differences(one.recipe, other.recipe) if key not in ("name", "seed"))
    return (
        _without_seed(one) == _without_seed(other)
        and tested[0] == tested[1]
        and not any(map(_decides_results, changed))
    )


def _decides_results(key: str) -> bool:
    if key.partition(".")[0] in _NOT_OF_RESULTS:
        return False
    try:
        return bool(effect_of(TrainingConfig, key) & (DATA | ORDER | COMPATIBILITY | UPDATES))
    except KeyError:  # a key of another section or another version
        return True


def _without_seed(run: ComparedRun) -> str:
    return re.sub(rf"(^|-)seed{run.recipe.get('seed')}(-|$)", lambda match: "-" * all(match.groups()), run.name)


def _as_one(name: str, runs: Sequence[ComparedRun]) -> ComparedRun:
    keys = dict.fromkeys(key for run in runs for key in run.choices)
    choices = {key: merged([run.choices[key] for run in runs if key in run.choices]) for key in keys}
    return replace(runs[0], name=name, seeds=tuple(runs), choices=choices)


def comparable(runs: Sequence[ComparedRun]) -> str:
    """Return a sentence on which held-out losses are of the same tokens, as equal unigram losses show."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for run in runs:
        if run.predicted_tokens:
            groups.setdefault(run.predicted_tokens, []).append(run.name)
    if len(groups) == 1:
        return "All held-out losses are of the same tokens, and comparable."
    shared = [", ".join(names) for names in groups.values() if len(names) > 1]
    only = f"Comparable are those of {'; those of '.join(shared)}." if shared else "None of these are comparable."
    return f"Held-out losses are comparable only where the same tokens are predicted. {only}" if groups else ""


def _read_recipe(path: Path) -> dict[str, Any]:
    recipe = read_json_object(path)
    section = recipe.get("eval")
    if not isinstance(section, dict) or not all(isinstance(section.get(key), list) for key in ("tasks", "seeds")):
        raise UserError(
            f"{path} is not a resolved recipe: eval.tasks or eval.seeds is missing; restore it from a backup"
        )
    return recipe
