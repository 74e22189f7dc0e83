"""Users, passwords and artifacts on the MLflow server."""

import logging
import os
from pathlib import Path

import boto3
import pytest
from mlflow_server import mlflow_server
from postgres import PASSWORD
from s3_endpoint import S3
from tracked_runs import append, client_of, follow_once, row, start, trial, trials_of
from tracking_server import DATABASE, S3_SECRET, USER_PASSWORD, Tracking

from multihop.cluster.tracking.connection import check_access, connect
from multihop.cluster.tracking.tracker import is_behind
from multihop.common.errors import UserError


def objects(s3: S3, bucket: str) -> list[str]:
    client = boto3.client(
        "s3", endpoint_url=s3.url, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )
    return [each["Key"] for each in client.list_objects_v2(Bucket=bucket).get("Contents", [])]


def cmdlines() -> bytes:
    result = b""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            result += entry.read_bytes()
        except OSError:  # it has ended
            continue
    return result


@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_run_with_users_postgresql_and_s3_and_no_password_anywhere(
    tracking: Tracking,
    s3_server: S3,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The driver has no credentials for S3 or the database; its password is in no file, log or process list."""
    caplog.set_level(logging.DEBUG)
    run_dir = tmp_path / "a"
    run_dir.mkdir()
    (run_dir / "recipe.json").write_text("{}")
    append(run_dir, row(1, 5.0), row(2, 4.0))
    tracker = start(run_dir, tracking.server.url, commit="c")
    follow_once(tracker)
    tracker.log_trials([trial("k1")])
    tracker.close("done")
    assert tracker.error is None and not is_behind(run_dir)

    client = connect(tracking.server.url)
    run = client.get_run(tracker.run_id)
    assert tracking.steps_of(tracker.run_id, "loss") == [1, 2]
    assert set(trials_of(client, tracker.run_id)) == {"k1"}
    assert run.info.artifact_uri.startswith("mlflow-artifacts:")
    assert f"mlflow/{run.info.experiment_id}/{tracker.run_id}/artifacts/recipe.json" in objects(
        s3_server, tracking.bucket
    )
    assert Path(client.download_artifacts(tracker.run_id, "recipe.json", str(tmp_path))).read_text() == "{}"

    written = [path.read_bytes() for path in run_dir.rglob("*") if path.is_file()]
    written += [tracking.server.log.read_bytes(), (tracking.database.folder / "log").read_bytes()]
    written += [tracking.database.dump(DATABASE).encode(), caplog.text.encode(), "".join(capfd.readouterr()).encode()]
    written.append(cmdlines())
    assert b"loss" in b"".join(written) and b"mlflow\0server" in written[-1], "what is searched is there"
    for secret in (USER_PASSWORD, PASSWORD, S3_SECRET):
        assert not [text[:80] for text in written if secret.encode() in text]


@pytest.mark.timeout(600)
def test_a_refused_user_is_reported_at_the_start_and_ends_no_training(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow.server import get_app_client

    check_access(tracking.server.url)
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    run_dir = tmp_path / "a"
    tracker = start(run_dir, tracking.server.url)
    assert tracker.run_id

    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong-and-secret")
    for refused in (check_access, lambda uri: start(tmp_path / "b", uri)):
        with pytest.raises(UserError, match="refuses the user name and password; set MLFLOW_TRACKING_USERNAME"):
            refused(tracking.server.url)
    assert not caplog.records
    append(run_dir, row(1, 5.0))
    follow_once(tracker)
    assert tracker.error is not None
    assert "401" in caplog.text and "wrong-and-secret" not in caplog.text
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", USER_PASSWORD)
    tracker.close("done")
    assert tracking.steps_of(tracker.run_id, "loss") == [1]

    get_app_client("basic-auth", tracking.server.url).create_user("reader", "may-read-not-write")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "reader")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "may-read-not-write")
    check_access(tracking.server.url)
    with pytest.raises(UserError, match="does not let this user write; ask its administrator"):
        start(tmp_path / "c", tracking.server.url)


@pytest.mark.parametrize("uri", ["http://127.0.0.1:1", "sqlite:///none.db", "postgresql://127.0.0.1:1/none"])
def test_what_is_unreachable_refuses_nobody(uri: str) -> None:
    check_access(uri)


def test_artifacts_that_the_driver_writes_to_s3_itself(
    s3: S3, run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server is not between driver and S3; what S3 refuses does not block anything else."""
    bucket, runs = s3.make_bucket(), run_dir.parent
    (run_dir / "report.md").write_text("a result")
    append(run_dir, row(1, 5.0))
    options = ("--default-artifact-root", f"s3://{bucket}/runs", "--no-serve-artifacts")
    with mlflow_server(runs, f"sqlite:///{runs}/mlflow.db", *options, AWS_SECRET_ACCESS_KEY="") as server:
        s3.failing_every, s3.failure = 1, "403 Forbidden"
        tracker = start(run_dir, server.url)
        tracker.log_artifacts([run_dir / "report.md"])
        follow_once(tracker)
        tracker.close("done")
        client = client_of(run_dir, server.url)
        assert tracker.error is not None and is_behind(run_dir)
        assert client.get_run(tracker.run_id).info.status == "FINISHED"
        assert [point.step for point in client.get_metric_history(tracker.run_id, "loss")] == [1]
        s3.failing_every = 0
        tracker.close("done")
        assert tracker.error is None and not is_behind(run_dir)
    assert [key.rpartition("/")[2] for key in objects(s3, bucket)] == ["report.md"]
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in caplog.text
