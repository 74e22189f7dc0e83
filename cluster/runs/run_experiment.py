"""Run an experiment: each run through all stages, and the report over all. What is done already is not done again."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from multihop.cluster.console import console
from multihop.cluster.locks import InUseError
from multihop.cluster.ray import TrainingFailed, WorkerDiedError
from multihop.cluster.runs.evaluation import check_evaluation
from multihop.cluster.runs.experiment import Plan
from multihop.cluster.runs.folder import check_recipe
from multihop.cluster.runs.recipe import Recipe
from multihop.cluster.runs.stages import run_stages
from multihop.common.errors import DONE, FAILED, STOPPED, UserError
from multihop.common.json_lines import read_rows
from multihop.common.redaction import safe_text
from multihop.data_prep.reading.errors import ReadFailed
from multihop.data_prep.reading.sources import list_files
from multihop.eval.report.compared_runs import training_clock
from multihop.eval.report.comparison import write_comparison
from multihop.pretrain.data.phases import total_steps

_AS_LONG = 0.1
"""Share of the first run's seconds within which a run took as long, and is not repeated."""


def run_experiment(plan: Plan, runs: Path, out: Path | None) -> int:
    """Run the stages of all runs that are not done, then write the report; returns the exit code.

    A run that fails does not stop the others. A run that is stopped by a signal does.

    Args:
        out: the report's folder; None: NAME in the folder of the runs.

    Raises:
        UserError: a mistake of the user's, found before anything is started where possible.
    """
    experiment = plan.experiment
    out = out or runs / experiment.name
    if (out / "recipe.json").exists():
        raise UserError(f"{out} is a run, whose report would be replaced; set name=… or --out")
    recipes = [variant.recipe() for variant in plan.variants]
    for recipe in recipes:
        _check(recipe, runs)
    failed: dict[str, str] = {}
    total = len(recipes) + len(plan.repeated)
    names = []
    for number, recipe in enumerate(_all_recipes(plan, recipes, runs, failed)):
        console.print(f"run {number + 1}/{total}   {recipe.name}")
        names.append(recipe.name)
        try:
            code = run_stages(recipe, runs)
        except InUseError:
            raise
        except (UserError, TrainingFailed, WorkerDiedError, ReadFailed) as error:
            failed[recipe.name] = safe_text(str(error))
            console.print(f"{recipe.name} failed: {failed[recipe.name]}")
            continue
        if code == STOPPED:
            return STOPPED
        if code != DONE:
            failed[recipe.name] = "trials failed"
    started = [runs / name for name in names if (runs / name / "recipe.json").exists()]
    if started:
        write_comparison(started, out, experiment.name, experiment.question, experiment.x, experiment.series)
        console.print(f"report    {out / 'report.html'} and report.md beside it")
    for name, reason in failed.items():
        console.print(f"failed    {name}: {reason}")
    return FAILED if failed else DONE


def _check(recipe: Recipe, runs: Path) -> None:
    """Check what `run_stages` would refuse, before the first run takes hours."""
    check_evaluation(recipe)
    list_files(recipe.data.sources)
    if (runs / recipe.name / "recipe.json").exists():
        check_recipe(runs / recipe.name, recipe, ())


def _all_recipes(plan: Plan, recipes: Sequence[Recipe], runs: Path, failed: dict[str, str]) -> Iterator[Recipe]:
    """Yield the recipes of the variants, then of the repeated ones, whose steps depend on the seconds of the others."""
    yield from recipes
    for variant, recipe in zip(plan.repeated, recipes[1:], strict=False):
        of_first, of_this = _seconds(runs, recipes[0]), _seconds(runs, recipe)
        if of_first is None or of_this is None:
            failed[variant.name] = f"{recipe.name if of_first else recipes[0].name} is not trained to its end"
            continue
        share = of_first / of_this
        if abs(share - 1) < _AS_LONG:
            console.print(
                f"{variant.name} is not needed: {recipe.name} took {1 / share:.2f} times the first run's seconds"
            )
            continue
        steps = [(f"phases[{n}].steps", max(1, round(share * phase.steps))) for n, phase in enumerate(recipe.phases)]
        yield variant.recipe(*steps)


def _seconds(runs: Path, recipe: Recipe) -> float | None:
    """Return the seconds of training; None if it did not reach its last step."""
    steps, _, seconds = training_clock(read_rows(runs / recipe.name / "metrics.jsonl"))
    return seconds[-1] if steps[-1] == total_steps(recipe.phases) else None
