"""Reports and comparisons show the rows that the last plan selects, whatever was evaluated before."""

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from reported_runs import RECIPE, read_report, reported_run

from multihop.common.json_lines import append_row, read_rows
from multihop.data_prep.dataset.shards import open_dataset
from multihop.eval.config import EvalConfig
from multihop.eval.model.model_under_test import of_run
from multihop.eval.report.compared_runs import read_run
from multihop.eval.report.run_report import write_report
from multihop.eval.statistics.formatting import spread
from multihop.eval.tasks.known_tasks import open_tasks
from multihop.eval.trials.list_trials import plan_trials
from multihop.eval.trials.plan_file import PLAN, RESULTS, EvaluationPlan, make_plan, read_plan, read_results, write_plan
from multihop.eval.trials.start_from import next_wave
from multihop.eval.trials.trial import Trial, failed_row
from multihop.pretrain.models.families import parse_model_config

Cell = tuple[str, str | None, int, int, float]
"""Task, weights, version of the task's files, seed and learning rate, which identify a trial."""


@dataclass(frozen=True)
class Evaluation:
    """The inputs of an evaluation in a run's history, and how it ends."""

    weights: tuple[str, int | None]
    """Content and step of a checkpoint of the run, or a Hugging Face model without a step."""
    files: int
    """Version of the first task's files."""
    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    until: int
    """Number of trials that are run before it is interrupted."""
    fails: int
    """Index of the trial that fails, to be repeated."""


def some(values: list[int] | list[float] | list[str]) -> st.SearchStrategy[tuple[int | float | str, ...]]:
    """Return a strategy for one or more of the values, in any order."""
    return st.lists(st.sampled_from(values), min_size=1, unique=True).map(tuple)


EVALUATIONS = st.builds(
    Evaluation,
    weights=st.sampled_from([("a", 10), ("b", 20), ("c", 30), ("A", None), ("B", None)]),
    files=st.integers(0, 1),
    tasks=some(["one", "two"]),
    seeds=some([0, 1, 2]),
    rates=some([1e-3, 2e-3]),
    until=st.integers(0, 20),
    fails=st.integers(0, 20),
)


MODEL = parse_model_config({"family": "bert", "layers": 1, "hidden": 32, "heads": 2, "max_positions": 64})


def planned(evaluation: Evaluation, folder: Path, data: Path) -> tuple[EvalConfig, list[Trial]]:
    """Return the settings and trials of an evaluation; also writes its version of the tasks' files to `folder`."""
    for name in ("one", "two"):
        version = evaluation.files if name == "one" else 0
        lines = [f"river {number},{(number + version * (number == 3)) % 2}\n" for number in range(40)]
        (folder / f"{name}.csv").write_text("what,how\n" + "".join(lines))
        (folder / f"{name}.yaml").write_text(
            f"kind: classification\ntrain: {name}.csv\nfields: {{text: what, label: how}}\n"
        )
    section = {"tasks": [str(folder / f"{name}.yaml") for name in evaluation.tasks], "seeds": evaluation.seeds}
    config = EvalConfig.model_validate({**section, "lr": evaluation.rates})
    evaluated = of_run(MODEL, str(folder), evaluation.weights[0], 0, data, open_dataset(data).manifest)
    return config, plan_trials(config, open_tasks(config), replace(evaluated, checkpoint_step=evaluation.weights[1]))


def cell(trial: Trial, files: int) -> Cell:
    task = trial.described["task"]
    return task, trial.checkpoint_sha256, files if task == "one" else 0, trial.seed, trial.settings["lr"]


def cells(evaluation: Evaluation, weights: list[str | None]) -> list[Cell]:
    """Return all planned trials of an evaluation, in the order of its recipe."""
    return [
        (task, content, evaluation.files if task == "one" else 0, seed, rate)
        for task in evaluation.tasks
        for rate in evaluation.rates
        for seed in evaluation.seeds
        for content in weights
    ]


@settings(max_examples=25)
@given(history=st.lists(EVALUATIONS, min_size=1, max_size=6))
def test_after_any_history_of_evaluations_the_rows_of_the_last_plan_are_shown(
    bert_data: Path, history: list[Evaluation]
) -> None:
    values: dict[Cell, float | None] = {}
    """Result of each trial; None if it failed."""
    evaluated: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        run = reported_run(Path(folder) / "run", [])
        (run / PLAN).unlink()
        for number, evaluation in enumerate(history):
            config, trials = planned(evaluation, Path(folder), bert_data)
            recipe = {**RECIPE, "eval": config.model_dump(mode="json")}
            (run / "recipe.json").write_text(json.dumps(recipe))
            rows = read_rows(run / RESULTS)
            write_plan(run, make_plan(trials, rows, config, None))
            left = next_wave(trials, rows).trials
            assert {cell(trial, evaluation.files) for trial in left} == {
                each for each in cells(evaluation, [evaluation.weights[0], None]) if values.get(each) is None
            }
            for index, trial in enumerate(left[: evaluation.until]):
                row, key = failed_row(trial, "it broke", 1.0, retry=True), cell(trial, evaluation.files)
                if index == evaluation.fails:
                    values[key] = None
                else:
                    values[key] = (len(values) + number / 10 + index) / 1000
                    row |= {"status": "ok", "value": values[key], "dev_value": values[key], "retry": False}
                    del row["error"]
                append_row(run / RESULTS, row)
                if trial.checkpoint_step is not None and trial.init == "pretrained":
                    evaluated[trial.checkpoint_step] = str(trial.checkpoint_sha256)
            write_plan(run, make_plan(trials, read_rows(run / RESULTS), config, None))

            result = read_results(run)
            wanted = [each for each in cells(evaluation, [evaluation.weights[0], None]) if each in values]
            assert [row["value"] for row in result.rows] == [values[each] for each in wanted]
            assert result.plan is not None
            keys = {row["key"] for row in read_rows(run / RESULTS)}
            assert keys >= {*result.plan.earlier}, "many steps of a large grid would make a file that nobody reads"
            step = evaluation.weights[1]
            before = [content for at, content in sorted(evaluated.items()) if step is not None and at < step]
            assert [row["value"] for row in result.earlier] == [
                values[each] for content in before for each in cells(evaluation, [content]) if each in values
            ]

        write_report(run)
        parsed, html, _ = read_report(run)
        shown = {line[0]: line[3:5] for line in parsed.tables.get("results", [])[1:]}
        compared = read_run(run)
        assert set(shown) == {each[0] for each in wanted}
        left = len(cells(evaluation, [evaluation.weights[0], None])) - len(wanted)
        notes = [note for note in compared.notes if "no result yet" in note]
        assert len(notes) == (left > 0) == ("no result yet" in html)
        for task in shown:
            for init, content, text in zip(
                ("pretrained", "random"), (evaluation.weights[0], None), shown[task], strict=True
            ):
                by_rate = {
                    rate: [value for each in wanted if (value := values[each]) is not None
                           and each[0] == task and each[1] == content and each[4] == rate]
                    for rate in evaluation.rates
                }  # fmt: skip
                assert text in {spread(scores) for scores in by_rate.values()}
                chosen = [row["value"] for _, row in compared.trials(task, init)]
                assert text == spread(chosen) and chosen in by_rate.values()


def test_a_rate_that_is_listed_twice_makes_no_second_seed(tmp_path: Path, bert_data: Path) -> None:
    evaluation = Evaluation(("a", 10), 0, ("one",), (0, 1), (1e-3, 1e-3), 0, 0)
    config, trials = planned(evaluation, tmp_path, bert_data)
    run = reported_run(tmp_path / "run", [])
    rows = [failed_row(trial, "", 1.0) | {"status": "ok", "value": 0.5, "dev_value": 0.5} for trial in trials]
    write_plan(run, make_plan(trials, rows, config, None))
    (run / RESULTS).unlink(missing_ok=True)
    for row in rows:
        append_row(run / RESULTS, row)
    assert [(row["init"], row["seed"]) for row in read_results(run).rows] == [
        ("pretrained", 0), ("random", 0), ("pretrained", 1), ("random", 1)
    ]  # fmt: skip


def test_a_plan_of_many_trials_is_read_again(tmp_path: Path) -> None:
    keys = [f"{number:064x}" for number in range(150_000)]
    plan = EvaluationPlan(trials=keys[::2], earlier=keys[1::2], examples=None, section={})
    write_plan(tmp_path, plan)
    assert read_plan(tmp_path) == plan
