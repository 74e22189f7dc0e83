"""Directories of runs that were never run, with made-up numbers."""

import json
from pathlib import Path
from typing import Any

from evaluation_plans import write_plan_for


def make_run(folder: Path, layers: int, heldout: list[tuple[int, float]], trials: list[tuple[int, str, float]]) -> Path:
    (folder / "eval").mkdir(parents=True)
    recipe: dict[str, Any] = {
        "name": folder.name,
        "seed": 1,
        "model": {"layers": layers},
        "phases": [{"lr": 1e-3}],
        "eval": {"tasks": ["topics"], "seeds": [0, 1, 2]},
    }
    if layers == 3:
        recipe["phases"].append({"lr": 2e-3})
    (folder / "recipe.json").write_text(json.dumps(recipe))
    rows = [{"step": step, "heldout_loss": loss + 0.5, "heldout_mlm_loss": loss} for step, loss in heldout]
    rows.append({"step": 5, "loss": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"status": "done", "heldout_loss": heldout[-1][1], "tokens": 1234567, "tokens_per_s": 10000.4}
    (folder / "summary.json").write_text(json.dumps(summary))
    results = [
        {
            "task": "topics", "kind": "classification", "metric": "accuracy", "higher_is_better": True, "init": init,
            "seed": seed, "value": value, "dev_value": value, "status": "ok", "other_metrics": {},
            "key": f"{init}{seed}", "test_fingerprint": "t", "checkpoint_step": None,
        }
        for seed, init, value in trials
    ]  # fmt: skip
    write_plan_for(folder, results)
    results.append({**results[0], "value": 0.1, "key": "notasked"})
    results.insert(0, {**results[0], "value": 0.0})  # the last row of a trial counts
    (folder / "eval" / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in results))
    return folder


def with_predictions(runs: Path, name: str, values: list[float], **other: Any) -> Path:
    """Make a run with a file of predictions of 100 examples for each seed."""
    run = make_run(runs / name, 2, [(0, 9.0)], [(seed, "pretrained", value) for seed, value in enumerate(values)])
    (run / "eval" / "predictions").mkdir()
    for seed, value in enumerate(values):
        table = [[float(i < round(100 * value)), 1.0] for i in range(100)]
        content = {"statistics": table, "targets": [0] * 100}
        (run / "eval" / "predictions" / f"pretrained{seed}.json").write_text(json.dumps(content))
    path = run / "eval" / "results.jsonl"
    path.write_text("".join(json.dumps({**json.loads(line), **other}) + "\n" for line in path.read_text().splitlines()))
    return run
