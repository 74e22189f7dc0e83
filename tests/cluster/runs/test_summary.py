"""The summary names losses as metrics.jsonl does."""

import json
from pathlib import Path

from multihop.cluster.runs.summary import read_summary, write_summary
from multihop.eval.report.run_metrics import HEALTH


def test_the_summary_has_the_sum_and_its_parts_of_the_last_logged_and_the_last_evaluated_step(tmp_path: Path) -> None:
    rows = [
        {"step": 10, "tokens": 5, "loss": 9.0, "mlm_loss": 8.3, "nsp_loss": 0.7, "nsp_accuracy": 0.5},
        {"step": 20, "tokens": 9, "loss": 7.0, "mlm_loss": 6.4, "nsp_loss": 0.6, "nsp_accuracy": 0.6},
        {"step": 20, "heldout_loss": 7.5, "heldout_mlm_loss": 6.85, "heldout_nsp_loss": 0.65, "unigram_loss": 6.9},
        {"step": 20, "tokens": 9, "loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_summary(tmp_path, "done", {"train": 1.23})
    summary = read_summary(tmp_path)
    losses = {name: value for name, value in summary.items() if name.endswith(("_loss", "_accuracy"))}
    assert losses == {
        "train_loss": 7.0, "mlm_loss": 6.4, "nsp_loss": 0.6, "nsp_accuracy": 0.6, "heldout_loss": 7.5,
        "heldout_mlm_loss": 6.85, "heldout_nsp_loss": 0.65, "unigram_loss": 6.9, "uniform_loss": None,
    }  # fmt: skip
    assert summary["diagnosis"] is None and "hidden_rank" not in summary  # rows of an older version
    assert (summary["steps"], summary["tokens"], summary["stages"]) == (20, 9, {"train": 1.2})


def test_the_summary_has_the_newest_health_and_the_diagnosis(tmp_path: Path) -> None:
    health = {"unigram_gain": 0.1, "attention_entropy": 0.7}
    rows = [
        {"step": step, "heldout_loss": 6.0, "hidden_cosine": 0.9, "hidden_rank": 0.05 + step / 10_000, **health}
        for step in (200, 400, 600)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_summary(tmp_path, "done", {})
    summary = read_summary(tmp_path)
    assert {name: summary[name] for name in HEALTH} == {**health, "hidden_cosine": 0.9, "hidden_rank": 0.11}
    assert "collapsed" in summary["diagnosis"] and "11%" in summary["diagnosis"]
