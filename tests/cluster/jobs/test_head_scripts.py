"""Programs that run on a cluster's head, and the processing of their output, without a cluster between them."""

import base64
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from multihop.cluster.jobs import head_scripts
from multihop.cluster.jobs.head_scripts.processes import OFFSET_PREFIX
from multihop.cluster.jobs.head_scripts.run_files import RESULT_PREFIX
from multihop.cluster.jobs.results import unpack_results
from multihop.common.errors import UserError

FOLDER = Path(head_scripts.__file__).parent
VARIABLE = "SOME_JOB_OF_A_TEST"


def begin(program: str, *arguments: str, output: Path) -> "subprocess.Popen[bytes]":
    """Start a program as on a head, where the output is a file."""
    with open(output, "wb") as file:
        command = [sys.executable, "-m", FOLDER.name, program, *arguments]
        return subprocess.Popen(command, cwd=FOLDER.parent, stdin=subprocess.DEVNULL, stdout=file)


def run_of(folder: Path, **files: str) -> Path:
    for name, content in ({"recipe_json": "{}"} | files).items():
        *parents, stem, suffix = name.split("_")
        path = folder.joinpath(*parents, f"{stem}.{suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def fetch(run: Path, to: Path) -> dict[str, str]:
    """Fetch a run into `to`; returns the content of the files there."""
    output = run.with_suffix(".out")
    assert begin("pack-results", str(run), output=output).wait(60) == 0
    assert output.stat().st_mode & 0o777 == 0o600
    lines = [
        line.removeprefix(RESULT_PREFIX) for line in output.read_text().splitlines() if line.startswith(RESULT_PREFIX)
    ]
    unpack_results(b"".join(map(base64.b64decode, lines)), to)
    return {path.relative_to(to).as_posix(): path.read_text() for path in sorted(to.rglob("*")) if path.is_file()}


def test_a_fetch_replaces_an_earlier_one(tmp_path: Path) -> None:
    old = run_of(tmp_path / "old", report_html="OLD", eval_results_jsonl="old", loss_png="old", metrics_jsonl="1")
    new, to = run_of(tmp_path / "new", metrics_jsonl="2"), tmp_path / "fetched" / "x"
    assert fetch(old, to).keys() == {"recipe.json", "report.html", "eval/results.jsonl", "loss.png", "metrics.jsonl"}
    (to / "my notes.txt").write_text("mine")
    assert fetch(new, to) == {"recipe.json": "{}", "metrics.jsonl": "2", "my notes.txt": "mine"}
    modes = {path.name: path.stat().st_mode & 0o777 for path in to.iterdir() if path.is_file()}
    assert modes["recipe.json"] == 0o600 and modes["metrics.jsonl"] == modes["my notes.txt"]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    run, to = run_of(tmp_path / "run", metrics_jsonl="1", eval_results_jsonl="row"), tmp_path / "fetched" / "x"
    victim, elsewhere = tmp_path / "victim", tmp_path / "elsewhere"
    victim.write_text("precious")
    elsewhere.mkdir()
    (elsewhere / "results.jsonl").write_text("precious")
    to.mkdir(parents=True)
    (to / "metrics.jsonl").symlink_to(victim)
    assert fetch(run, to)["metrics.jsonl"] == "1" and victim.read_text() == "precious"
    assert not (to / "metrics.jsonl").is_symlink()
    (to / "eval" / "results.jsonl").unlink()
    (to / "eval").rmdir()
    (to / "eval").symlink_to(elsewhere)
    with pytest.raises(UserError, match="eval is not a directory; move it away"):
        fetch(run, to)
    assert (elsewhere / "results.jsonl").read_text() == "precious"


def test_blocked_paths_are_named(tmp_path: Path) -> None:
    run, to = run_of(tmp_path / "run", metrics_jsonl="1"), tmp_path / "x"
    to.write_text("a file")
    with pytest.raises(UserError, match="x is not a directory"):
        fetch(run, to)
    to.unlink()
    (to / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(UserError, match=r"metrics.jsonl is a directory"):
        fetch(run, to)


def printed(output: Path) -> tuple[str, int]:
    """Return the log's text, and the offset up to which it was read."""
    text, _, read_to = output.read_text().rpartition(OFFSET_PREFIX)
    return text, int(read_to)


def test_a_log_that_is_not_utf_8_is_printed(tmp_path: Path) -> None:
    log, output = tmp_path / "run" / "logs" / "rank-0.log", tmp_path / "output"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"one\ncaf\xe9\nthe end")
    assert begin("print-log", str(tmp_path / "run"), "0", "0", output=output).wait(60) == 0
    assert printed(output) == ("one\ncaf\ufffd\nthe end\n", log.stat().st_size)
    assert begin("print-log", str(tmp_path / "run"), "0", "4", output=output).wait(60) == 0
    assert printed(output)[0] == "caf\ufffd\nthe end\n"
    assert begin("print-log", str(tmp_path / "run"), "1", "0", output=output).wait(60) == 1


def test_a_log_is_followed_while_its_job_lives_and_for_a_limited_time(tmp_path: Path) -> None:
    log, output = tmp_path / "run" / "logs" / "rank-0.log", tmp_path / "output"
    log.parent.mkdir(parents=True)
    job: Any = subprocess.Popen(["sleep", "300"], env={**os.environ, VARIABLE: "the-id"})
    try:
        follow = (str(tmp_path / "run"), "0", "0", VARIABLE, "the-id")
        short = begin("print-log", *follow, "0.1", output=tmp_path / "short")
        following = begin("print-log", *follow, "300", output=output)
        assert short.wait(60) == 0 and printed(tmp_path / "short") == ("", 0)
        log.write_text("one\ntw")
        while "one\n" not in output.read_text():
            assert following.poll() is None
            time.sleep(0.05)
        log.write_text("one\ntwo\nthr")
    finally:
        job.kill()
        job.wait()
    assert following.wait(60) == 0
    assert printed(output) == ("one\ntwo\n", 8)  # the rest is read again, once the job is known to have ended
