"""Trials and their scores, read back with MLflow's client from a real store."""

from pathlib import Path

from tracked_runs import append, client_of, history, row, start, trial, trials_of

from multihop.cluster.tracking.tracker import log_concurrently


def test_trials_are_nested_runs_logged_once(run_dir: Path) -> None:
    tracker, client = start(run_dir), client_of(run_dir)
    tracker.log_trials([trial("k1"), trial("k2", seed=1, status="failed", value=None)])
    tracker.log_trials([trial("k1")])
    tracker.close("done")
    runs = trials_of(client, tracker.run_id)
    assert {key: run.info.status for key, run in runs.items()} == {"k1": "FINISHED", "k2": "FAILED"}
    assert runs["k1"].data.metrics == {
        "accuracy": 0.75,
        "value": 0.75,
        "dev_value": 0.75,
        "seconds": 12.5,
        "macro F1 ___": 70.5,
    }
    params = runs["k1"].data.params
    assert params["hyperparameters.lr"] == "5e-05"
    assert params["hyperparameters.features.layers"] == "[-2, -1]"
    assert params["hyperparameters.features.head"] == "linear"
    assert runs["k1"].info.run_name == "topics random seed 0 frozen lr 5e-05"
    assert not {"value", "accuracy"} & set(runs["k2"].data.metrics)


def test_a_half_logged_trial_is_completed(run_dir: Path) -> None:
    tracker, client = start(run_dir), client_of(run_dir)
    experiment = client.get_run(tracker.run_id).info.experiment_id
    tags = {"mlflow.parentRunId": tracker.run_id, "multihop.trial_key": "k1"}
    begun = client.create_run(experiment, tags=tags)
    again = start(run_dir)
    again.log_trials([trial("k1")])
    run = trials_of(client, tracker.run_id)["k1"]
    assert run.info.run_id == begun.info.run_id
    assert run.info.status == "FINISHED"
    assert run.data.metrics["accuracy"] == 0.75


def test_trials_logged_beside_the_driver_are_logged_once_and_leave_its_run_alone(run_dir: Path) -> None:
    assert not log_concurrently(run_dir, None, [trial("k1")]), "there is no run of the driver yet"
    tracker, client = start(run_dir), client_of(run_dir)
    append(run_dir, row(1, 5.0))
    before, note = client.get_run(tracker.run_id).to_dictionary(), (run_dir / "tracking.json").read_bytes()
    for rows in ([trial("k1")], [trial("k1"), trial("k2", seed=1)]):
        assert log_concurrently(run_dir, None, rows)
    assert not log_concurrently(run_dir, "http://127.0.0.1:1", [trial("k4")])
    assert client.get_run(tracker.run_id).to_dictionary() == before
    assert (run_dir / "tracking.json").read_bytes() == note
    tracker.forget_logged()
    tracker.log_trials([trial("k1"), trial("k2", seed=1), trial("k3", seed=2)])
    tracker.close("done")
    assert {run.info.status for run in trials_of(client, tracker.run_id).values()} == {"FINISHED"}
    assert set(trials_of(client, tracker.run_id)) == {"k1", "k2", "k3"}
    assert history(client, tracker.run_id, "loss") == [(1, 5.0)]


def test_trials_are_tagged_with_whether_the_last_evaluation_planned_them(run_dir: Path) -> None:
    tracker, client = start(run_dir), client_of(run_dir)
    tracker.log_trials([trial("k1"), trial("k2", checkpoint_sha256="c", test_fingerprint="t")])

    def asked() -> dict[str, str]:
        return {key: run.data.tags["multihop.planned"] for key, run in trials_of(client, tracker.run_id).items()}

    assert asked() == {"k1": "true", "k2": "true"}, "an evaluation logs trials of its plan, and need not tag them again"
    tracker.tag_planned_trials(["k1", "k2"])
    assert asked() == {"k1": "true", "k2": "true"}
    tracker.tag_planned_trials(["k2"])
    tracker.close("done")
    assert asked() == {"k1": "false", "k2": "true"}
    params = trials_of(client, tracker.run_id)["k2"].data.params
    assert (params["checkpoint_sha256"], params["test_fingerprint"]) == ("c", "t")


def test_scores_are_metrics_of_the_run_logged_when_they_change(run_dir: Path) -> None:
    tracker, client = start(run_dir), client_of(run_dir)
    tracker.log_scores([("topics accuracy", 10, 0.5), ("topics accuracy", 20, 0.75), ("topics macro F1 (%)", 0, 1.0)])
    tracker.close("done")
    again = start(run_dir)
    again.log_scores([("topics accuracy", 10, 0.5), ("topics accuracy", 20, 0.625)])
    again.close("done")
    history = client.get_metric_history(tracker.run_id, "topics accuracy")
    assert [(point.step, point.value) for point in history] == [(10, 0.5), (20, 0.75), (20, 0.625)]
    assert client.get_run(tracker.run_id).data.metrics == {"topics accuracy": 0.625, "topics macro F1 ___": 1.0}


def test_a_second_run_of_a_trial_or_of_the_run_itself_that_a_late_answer_left_is_deleted(run_dir: Path) -> None:
    tracker, client = start(run_dir), client_of(run_dir)
    tracker.log_trials([trial("k1")])
    run = client.get_run(tracker.run_id)
    experiment, of_trial = run.info.experiment_id, {"mlflow.parentRunId": tracker.run_id}
    client.create_run(experiment, tags={**of_trial, "multihop.trial_key": "k1"})
    for _ in range(2):
        client.create_run(experiment, tags={**of_trial, "multihop.trial_key": "k2"})
    client.create_run(experiment, tags={"multihop.token": run.data.tags["multihop.token"]})
    again = start(run_dir)
    again.log_trials([trial("k1"), trial("k2", seed=1)])
    again.close("done")
    assert again.run_id == tracker.run_id
    assert {key: run.info.status for key, run in trials_of(client, again.run_id).items()} == dict.fromkeys(
        ("k1", "k2"), "FINISHED"
    )
    assert len(client.search_runs([experiment])) == 3
