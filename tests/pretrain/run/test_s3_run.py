"""Whole runs with checkpoints in a bucket."""

import json
from pathlib import Path
from typing import Any

import pytest
from worker_runs import STEPS, checkpoint, finish, log_of, losses, start

from multihop.pretrain.checkpoint.manifest import folder_of_step
from multihop.pretrain.checkpoint.verify import list_steps, newest_good, verify

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def assert_same_run(run: Path, checkpoints: str, in_one_go: Path) -> None:
    assert losses(run) == losses(in_one_go)
    assert not (run / "checkpoints").exists()
    ours, theirs = verify(folder_of_step(checkpoints, STEPS)), verify(checkpoint(in_one_go))
    assert ours.content_hash() == theirs.content_hash()


@pytest.mark.long
def test_stopped_and_cut_off_it_goes_on_bit_for_bit(
    in_one_go: Path, s3: Any, bucket: str, bert_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, checkpoints = tmp_path / "run", f"{bucket}/some/prefix/run"
    torchrun = start(run, bert_data, 2, checkpoint__location=f"{bucket}/some/prefix")
    (run / "stop").touch()
    torchrun.wait(timeout=300)
    (run / "stop").unlink()
    assert list_steps(checkpoints) == [1]

    rows, requests = (run / "metrics.jsonl").read_text(), len(s3.requests)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        assert start(run, bert_data, 2).wait(timeout=300) != 0
    complaint = f"bucket {bucket.removeprefix('s3://')} at http://127.0.0.1:1 cannot be used"
    said = [line for line in log_of(run).splitlines() if complaint in line]
    assert len(said) == 1 and "check checkpoint.location, AWS_ENDPOINT_URL" in said[0]
    assert (run / "metrics.jsonl").read_text() == rows and len(s3.requests) == requests
    found, passed_over = newest_good(checkpoints)
    assert found is not None and (found.step, passed_over) == (1, [])

    finish(run, bert_data, 2)
    starts = [json.loads(line) for line in (run / "launches.jsonl").read_text().splitlines()]
    assert [row["step"] for row in starts] == [0, 1]
    assert_same_run(run, checkpoints, in_one_go)


@pytest.mark.long
def test_an_endpoint_that_refuses_every_fifth_request_is_borne(
    in_one_go: Path, s3: Any, bucket: str, bert_data: Path, tmp_path: Path
) -> None:
    run, before = tmp_path / "run", len(s3.requests)
    s3.failing_every = 5
    finish(run, bert_data, 2, checkpoint__location=bucket, checkpoint__save_interval=2, checkpoint__keep=2)
    refused = (len(s3.requests) - before) // 5
    s3.failing_every = 0
    assert refused >= 5
    assert_same_run(run, f"{bucket}/run", in_one_go)
    assert list_steps(f"{bucket}/run") == [STEPS - 2, STEPS]
