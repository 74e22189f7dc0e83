"""What a run logs, read back with MLflow's client from a real store."""

import json
from pathlib import Path

import pytest
from tracked_runs import RECIPE, START, append, client_of, follow_once, history, row, start, trial, trials_of

from multihop.cluster.tracking.tracker import is_behind, open_run


def test_rows_become_points_in_order_with_the_first_of_a_step(run_dir: Path) -> None:
    append(run_dir, row(0, 9.0), row(10, 8.0), row(20, 7.0, heldout_loss=7.5))
    append(run_dir, row(10, 8.5, START + 99), row(20, 7.25, START + 99, lr=0.5), row(30, 6.0))
    tracker = start(run_dir)
    follow_once(tracker)
    client = client_of(run_dir)
    assert history(client, tracker.run_id, "loss") == [(0, 9.0), (10, 8.0), (20, 7.0), (30, 6.0)]
    assert history(client, tracker.run_id, "heldout_loss") == [(20, 7.5)]
    assert history(client, tracker.run_id, "lr") == [(20, 0.5)]
    assert client.get_metric_history(tracker.run_id, "loss")[1].timestamp == round((START + 10) * 1000)


def test_a_torn_line_waits_and_a_broken_one_is_skipped(run_dir: Path) -> None:
    append(run_dir, row(1, 5.0))
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(f'{{"time": {START + 2}, "step": 2, "lo')
    tracker, client = start(run_dir), client_of(run_dir)
    follow_once(tracker)
    assert history(client, tracker.run_id, "loss") == [(1, 5.0)]
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('ss": 4.5}\n{"step": 3, "lo{"step": 3, "loss": 4.0}\n')
    append(run_dir, row(4, 3.5))
    follow_once(tracker)
    assert history(client, tracker.run_id, "loss") == [(1, 5.0), (2, 4.5), (4, 3.5)]


def test_more_points_than_a_call_takes(run_dir: Path) -> None:
    append(run_dir, *(row(step, 1.0 + step) for step in range(2500)))
    tracker = start(run_dir)
    follow_once(tracker)
    assert history(client_of(run_dir), tracker.run_id, "loss") == [(step, 1.0 + step) for step in range(2500)]


def test_resuming_continues_the_same_run(run_dir: Path) -> None:
    append(run_dir, row(1, 5.0))
    first = start(run_dir, commit="one")
    follow_once(first)
    first.close("stopped")
    client = client_of(run_dir)
    assert client.get_run(first.run_id).info.status == "KILLED"

    append(run_dir, row(1, 5.5, START + 50), row(2, 4.0))
    second = open_run(run_dir, {**RECIPE, "new": {"key": 1}}, None, "multihop", {"commit": "two"})
    assert client.get_run(first.run_id).info.status == "RUNNING"
    follow_once(second)
    second.close("done")
    run = client.get_run(first.run_id)
    assert second.run_id == first.run_id
    assert run.info.status == "FINISHED"
    assert history(client, first.run_id, "loss") == [(1, 5.0), (2, 4.0)]
    assert run.data.tags["commit"] == "two"
    assert run.data.params["phases.0.seq_len"] == "64"
    assert run.data.params["new.key"] == "1"
    assert len(run.data.params["long"]) == 6000


def test_a_crash_after_logging_and_before_it_was_noted(run_dir: Path) -> None:
    """MLflow has points and trials that tracking.json does not know of."""
    first = start(run_dir)
    before = (run_dir / "tracking.json").read_bytes()
    append(run_dir, row(1, 5.0), {"step": 2, "loss": 4.0})  # a row without a time gets a new one each time
    follow_once(first)
    first.log_trials([trial("k1")])
    (run_dir / "tracking.json").write_bytes(before)
    assert is_behind(run_dir)

    second, client = start(run_dir), client_of(run_dir)
    follow_once(second)
    second.log_trials([trial("k1"), trial("k2")])
    assert second.run_id == first.run_id
    assert history(client, first.run_id, "loss") == [(1, 5.0), (2, 4.0)]
    assert sorted(trials_of(client, first.run_id)) == ["k1", "k2"]


@pytest.mark.parametrize("same_start", [False, True])
def test_rows_of_new_steps_are_logged_after_a_power_cut_shortened_the_file(run_dir: Path, same_start: bool) -> None:
    """MLflow has steps whose rows the disk lost; rows of later steps take their place in the file."""
    append(run_dir, *(row(step, 1.0) for step in range(1, 21)))
    metrics = run_dir / "metrics.jsonl"
    tracker, client = start(run_dir), client_of(run_dir)
    follow_once(tracker)
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:15]) + lines[15][:9])
    if same_start:
        follow_once(tracker)
    metrics.write_bytes(b"".join(lines[:15]))
    append(run_dir, *(row(step, 2.0, START + 99) for step in range(19, 41)))
    if not same_start:
        tracker = start(run_dir)
    follow_once(tracker)
    tracker.close("trained")
    assert history(client, tracker.run_id, "loss") == [(step, 1.0 if step < 21 else 2.0) for step in range(1, 41)]


def test_an_unnoticed_cut_is_repaired_at_the_end(run_dir: Path) -> None:
    append(run_dir, row(1, 5.0), row(2, 4.0))
    tracker = start(run_dir)
    follow_once(tracker)
    append(run_dir, row(4, 2.0))
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text(lines[0] + lines[2])
    append(run_dir, row(5, 1.0))
    follow_once(tracker)
    tracker.close("done")
    assert [step for step, _ in history(client_of(run_dir), tracker.run_id, "loss")] == [1, 2, 4, 5]


@pytest.mark.parametrize("content", [b"", b'{"uri": "sq', b"[]", b'{"token": 5}', b'{"uri": "u", "experiment": "e"}'])
def test_a_damaged_note_ends_nothing_and_is_named(
    run_dir: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    append(run_dir, row(1, 5.0))
    first = start(run_dir)
    (run_dir / "tracking.json").write_bytes(content)
    assert is_behind(run_dir)
    second = start(run_dir)
    second.close("done")
    assert not is_behind(run_dir)
    assert second.run_id not in ("", first.run_id)
    assert history(client_of(run_dir), second.run_id, "loss") == [(1, 5.0)]
    (warning,) = [record.message for record in caplog.records if record.name == "multihop.cluster.tracking.tracker"]
    assert "a/tracking.json" in warning and "a new MLflow run is created" in warning


def test_a_crash_before_the_runs_id_was_noted(run_dir: Path) -> None:
    first = start(run_dir)
    state = json.loads((run_dir / "tracking.json").read_text())
    (run_dir / "tracking.json").write_text(json.dumps({**state, "run_id": ""}))
    assert start(run_dir).run_id == first.run_id


def test_existing_artifacts_are_logged(run_dir: Path) -> None:
    (run_dir / "report.md").write_text("a result")
    tracker, client = start(run_dir), client_of(run_dir)
    tracker.log_artifacts([run_dir / "report.md", run_dir / "loss.png"])
    tracker.close("done")
    assert [file.path for file in client.list_artifacts(tracker.run_id)] == ["report.md"]
    assert not is_behind(run_dir)
    assert list((run_dir.parent / "mlartifacts").rglob("report.md"))


def test_a_run_deleted_in_mlflow_is_logged_again(run_dir: Path) -> None:
    append(run_dir, row(1, 5.0))
    first, client = start(run_dir), client_of(run_dir)
    follow_once(first)
    client.delete_run(first.run_id)
    second = start(run_dir)
    follow_once(second)
    assert second.run_id != first.run_id
    assert history(client, second.run_id, "loss") == [(1, 5.0)]
