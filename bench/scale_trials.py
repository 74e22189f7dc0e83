"""The trials part of `python bench/scale_cluster.py`: n rows of results.jsonl, from the plan to the report."""

import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multihop.common.json_lines import append_row, read_rows
from multihop.eval.config import EvalConfig
from multihop.eval.model.model_under_test import ModelUnderTest
from multihop.eval.report.compared_runs import read_run
from multihop.eval.report.run_report import write_report
from multihop.eval.statistics.choose import choose
from multihop.eval.statistics.verdict import task_results
from multihop.eval.tasks.known_tasks import open_tasks
from multihop.eval.trials.list_trials import plan_trials
from multihop.eval.trials.plan_file import RESULTS, make_plan, read_results, write_plan
from multihop.eval.trials.start_from import next_wave, remove_unneeded
from multihop.eval.trials.trial import Trial, describe_trial, trial_key
from multihop.eval.trials.write_predictions import write_predictions
from multihop.pretrain.models.families import parse_model_config

if TYPE_CHECKING:
    from scale_cluster import Parts

TASKS, SEEDS, INITS = 5, 5, 2
EXAMPLES = 5_000
"""Labeled examples of each task."""
SETTINGS_A_CHECKPOINT = 2
"""Settings in the grid where many checkpoints are evaluated."""
TESTED = 1_000
"""Examples in each file of predictions."""
APPENDED = 100


def measure_trials(size: int, parts: "Parts") -> None:
    """Measure a grid with `size` trials, and then as many trials of many checkpoints."""
    for name, steps, grid in (
        ("grid", 1, size // (TASKS * SEEDS * INITS)),
        ("checkpoints", size // (TASKS * SEEDS * SETTINGS_A_CHECKPOINT), SETTINGS_A_CHECKPOINT),
    ):
        with tempfile.TemporaryDirectory(prefix="scale-trials-") as folder:
            measure_evaluation(name, Path(folder), steps, grid, parts)


def measure_evaluation(name: str, folder: Path, steps: int, settings: int, parts: "Parts") -> None:
    """Measure what the driver does for the last of `steps` evaluations of a run, each with a grid of `settings`."""
    run = folder / "run"
    run.mkdir()
    config = EvalConfig.model_validate(
        {
            "tasks": write_tasks(folder),
            "seeds": list(range(SEEDS)),
            "lr": [round(1e-5 * (1 + number / settings), 9) for number in range(settings)],
        }
    )
    recipe = {"name": "run", "seed": 1, "model": {}, "phases": [], "eval": config.model_dump(mode="json")}
    (run / "recipe.json").write_text(json.dumps(recipe))
    (run / "summary.json").write_text(json.dumps({"status": "done", "steps": steps, "tokens": steps}))
    tasks = open_tasks(config)
    with parts.of(f"{name}: plan the trials"):
        trials = plan_trials(config, tasks, model_at(steps))
    with parts.of(f"{name}: key of each trial"):
        for trial in trials:
            trial_key(trial)
    write_rows(run, [replace(trial, **checkpoint(step)) for step in range(1, steps + 1) for trial in trials])
    results = run / RESULTS
    with parts.of(f"{name}: read the rows"):
        rows = read_rows(results)
    parts.number(f"{name}: rows", len(rows))
    parts.number(f"{name}: results.jsonl (MB)", results.stat().st_size / 1e6)
    trials = plan_trials(config, tasks, model_at(steps))
    with parts.of(f"{name}: write the plan"):
        write_plan(run, make_plan(trials, rows, config, None))
    with parts.of(f"{name}: find what is left"):
        remove_unneeded(run / "eval" / "weights", trials, rows, ())
        assert next_wave(trials, rows).trials == []
    with parts.of(f"{name}: append a row", APPENDED):
        for row in rows[-APPENDED:]:
            append_row(results, row)
    del rows
    with parts.of(f"{name}: read the plan and its rows"):
        reported = read_results(run)
    assert len(reported.rows) == len(trials) and not reported.unfinished
    with parts.of(f"{name}: choose settings"):
        choices = choose(reported.rows)
    for choice in choices.values():
        for row in choice.chosen.rows:
            write_predictions(run / "eval" / "predictions", row["key"], predictions(row["key"]))
    with parts.of(f"{name}: choose and compare: the bootstrap"):
        task_results(reported.rows, run, reported.earlier)
    del reported, choices
    with parts.of(f"{name}: report, the bootstrap included"):
        write_report(run)
    parts.number(f"{name}: report.html (MB)", (run / "report.html").stat().st_size / 1e6)
    with parts.of(f"{name}: read the run for a comparison"):
        read_run(run)


def write_tasks(folder: Path) -> list[str]:
    """Write labeled tasks; returns the paths of their YAML files."""
    for number in range(TASKS):
        lines = (
            f"the river number {i} of {EXAMPLES} runs to the sea {i * i},{(i + number) % 2}" for i in range(EXAMPLES)
        )
        (folder / f"task{number}.csv").write_text("\n".join(["what,how", *lines, ""]))
        (folder / f"task{number}.yaml").write_text(
            f"kind: classification\ntrain: task{number}.csv\nfields: {{text: what, label: how}}\n"
        )
    return [str(folder / f"task{number}.yaml") for number in range(TASKS)]


def checkpoint(step: int) -> dict[str, Any]:
    """Return the fields by which trials of a checkpoint differ from those of another."""
    return {"checkpoint_step": step, "checkpoint_sha256": f"{step:064x}"}


def model_at(step: int) -> ModelUnderTest:
    """Return a small model with the checkpoint of a step; nothing of it is read."""
    return ModelUnderTest(
        model=parse_model_config({"preset": "bert-mini"}),
        vocab_size=16_000,
        checkpoint_dir="checkpoints",
        tokenizer_path="tokenizer.model",
        tokenizer_sha256="a" * 64,
        data_path="data",
        data_fingerprint="b" * 64,
        **checkpoint(step),
    )


def write_rows(run: Path, trials: list[Trial]) -> None:
    """Write a row for each trial as `run_trial` makes them, at once. Trials from random weights have one row, whatever
    the checkpoint."""
    (run / "eval").mkdir()
    draws, written = random.Random(1), set[str]()
    with open(run / RESULTS, "w") as file:
        for trial in trials:
            if trial.init == "random":
                trial = replace(trial, checkpoint_step=None, checkpoint_sha256=None)
            row = describe_trial(trial)
            if row["key"] in written:
                continue
            written.add(row["key"])
            score = draws.gauss(0.8 if trial.init == "pretrained" else 0.7, 0.01)
            row |= {
                "value": score,
                "dev_value": score + draws.gauss(0, 0.01),
                "best_epoch": 2,
                "other_metrics": {"F1": score},
                "examples": {"train": 3500, "dev": 500, "test": TESTED},
                "reported_on": "test",
                "curve": {"loss": [[step, 0.5] for step in range(20)], "dev": [[step, score] for step in range(3)]},
                "status": "ok",
                "seconds": 60.0,
            }
            file.write(json.dumps(row) + "\n")


def predictions(key: str) -> dict[str, Any]:
    """Return made-up predictions of a trial: 0 or 1 for each example, and whether it is right."""
    draws = random.Random(key)
    targets = [[i % 2] for i in range(TESTED)]
    right = [draws.random() < 0.8 for _ in range(TESTED)]
    predicted = [[target[0] if is_right else 1 - target[0]] for target, is_right in zip(targets, right, strict=True)]
    statistics = [[float(is_right), 1.0] for is_right in right]
    return {"ids": [], "predicted": predicted, "targets": targets, "statistics": statistics, "errors": []}
