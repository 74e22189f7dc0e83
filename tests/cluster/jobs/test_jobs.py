"""Jobs on a real Ray cluster with a token: submitted, followed, stopped, resumed, fetched."""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from s3_endpoint import S3
from workplace import ROOT, begin, ended, json_lines, make_workplace

from multihop.cluster.remote.node_cache import node_folder
from multihop.common.json_lines import append_row

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
BIN = Path(sys.executable).parent
PLANTED = secrets.token_hex(16)
"""Value of an environment variable of the node, which must not appear in any output."""
DESCRIBED = """
import json, sys
from multihop.cluster.ray.jobs import Jobs
print(json.dumps([job.__dict__ for job in Jobs(sys.argv[1]).all()]))
"""
FOLLOWED = """
import json, sys
from pathlib import Path
from multihop.cluster.jobs.follow import follow_job
from multihop.cluster.ray.jobs import Jobs
address, near, archive, script = sys.argv[1:]
Jobs(address).submit("breaks", f'python -c "{script}"', Path(archive), {})
parts = []
job = follow_job(Jobs(near), "breaks", parts.append)
print(json.dumps([job and job.status, "".join(parts), Jobs(address).output("breaks")]))
"""
SUBMITTED_TWICE = """
import json, sys
from pathlib import Path
from multihop.cluster.ray.jobs import Jobs
jobs, archive = Jobs(sys.argv[1]), Path(sys.argv[2])
print(json.dumps([jobs.submit("answered-late", "true", archive, {}) for _ in range(2)]))
"""
EMPTY_ARCHIVE = b"PK\x05\x06" + bytes(18)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def address(s3_server: S3) -> Iterator[str]:
    """Address of the dashboard of a cluster of one node with access to a store; the environment has its token."""
    token, port = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}, free_port()
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    before = dict(os.environ)
    store = {"AWS_ENDPOINT_URL": s3_server.url, "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    store |= {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": PLANTED}
    with tempfile.TemporaryDirectory(prefix="mh-", ignore_cleanup_errors=True) as folder:
        options = [f"--temp-dir={folder}", f"--dashboard-port={port}", "--dashboard-host=127.0.0.1", "--num-cpus=3"]
        # Another Ray of this machine may have the usual one.
        options += [f"--dashboard-agent-listen-port={free_port()}"]
        options += [f"--port={free_port()}", "--object-store-memory=100000000", "--disable-usage-stats", "--block"]
        head = subprocess.Popen(
            [BIN / "ray", "start", "--head", *options],
            env={
                **os.environ,
                **token,
                **store,
                "PATH": path,
                "PYTHONPATH": str(ROOT / "src"),
                "STORE_SECRET": PLANTED,
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.environ.update(token)
        try:
            os.environ["RAY_FOLDER_OF_TEST"] = folder
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: multihop(Path(folder), "jobs", "--address", url).returncode == 0)
            yield url
        finally:
            os.environ.clear()
            os.environ.update(before)
            processes = [head, *psutil.Process(head.pid).children(recursive=True)]
            for process in processes:
                with suppress(psutil.NoSuchProcess, ProcessLookupError):
                    process.kill()
            head.wait()


def wait_for(condition: Callable[[], object], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def multihop(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "multihop.cluster.cli.main", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )


def in_a_child(code: str, *arguments: str) -> Any:
    """Return the JSON value that `code` prints in a child process.

    Ray reads RAY_AUTH_MODE when it is imported, and another test may have imported it before.
    """
    child = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        timeout=300,
        check=True,
    )
    return json.loads(child.stdout)


def content(path: Path) -> bytes:
    """Return the bytes of a file, none if Ray has removed it since it was listed."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def files_with_the_secret(workplace: Path) -> list[Path]:
    """Return those of the run, MLflow's store and Ray's logs."""
    places = (workplace, Path(os.environ["RAY_FOLDER_OF_TEST"]))
    files = [path for place in places for path in place.rglob("*") if path.is_file() and not path.is_symlink()]
    assert files
    return [path for path in files if PLANTED.encode() in content(path)]


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in json_lines(run / "metrics.jsonl") if "loss" in row}


def test_a_run_is_submitted_stopped_resumed_and_fetched(address: str, texts: Path, tmp_path: Path) -> None:
    workplace = make_workplace(tmp_path, texts, "short", 300)
    runs, there = tmp_path / "runs", ("--address", address)
    submit = ["submit", "recipe.yaml", "--runs", str(runs), "--stage", "train", *there, "cluster.workers=1"]
    submit += ["cluster.env=[STORE_SECRET]", "checkpoint.save_interval=100"]
    command = begin(workplace, *submit)
    wait_for(lambda: (runs / "short" / "metrics.jsonl").exists() and len(losses(runs / "short")) > 15)
    assert "short was stopped; submit it again" in multihop(workplace, "stop", "short", *there).stdout
    printed = ended(workplace, command, 75)
    assert "a new run" in printed and max(losses(runs / "short")) < 300
    done = multihop(workplace, *submit)
    assert done.returncode == 0 and "short is done" in done.stderr, done.stdout + done.stderr
    assert sorted(losses(runs / "short")) == list(range(1, 301))
    fetched = multihop(workplace, "fetch", "short", *there)
    assert fetched.returncode == 0, fetched.stderr
    metrics = (workplace / "fetched" / "short" / "metrics.jsonl").read_bytes()
    assert metrics == (runs / "short" / "metrics.jsonl").read_bytes()
    assert PLANTED not in printed + done.stdout + done.stderr and not files_with_the_secret(tmp_path)


@pytest.mark.long
def test_a_run_is_submitted_followed_twice_stopped_resumed_and_fetched(
    address: str, texts: Path, tmp_path: Path
) -> None:
    one, two = make_workplace(tmp_path, texts, "small", 300), tmp_path / "two"
    two.mkdir()
    shutil.copy(one / "recipe.yaml", two)
    runs, there = str(tmp_path / "runs"), ("--address", address)
    submit = ["submit", "recipe.yaml", "--runs", runs, "--stage", "train", *there, "cluster.env=[STORE_SECRET]"]
    first, second = begin(one, *submit), begin(two, *submit)
    run = Path(runs) / "small"
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(losses(run)) > 15)

    shown = {str(process.pid): " ".join(command_of(process)) for process in psutil.process_iter()}
    assert not any(PLANTED in command for command in shown.values())
    other = multihop(one, *submit, "phases[0].lr=1e-3")
    assert other.returncode == 2 and "phases[0].lr was 0.002, is 0.001" in other.stderr
    table = multihop(one, "jobs", *there).stdout
    assert table.count("small") == 2 and "running" in table  # a run and its one job
    stopped = multihop(one, "stop", "small", *there)
    assert stopped.returncode == 0 and "small was stopped; submit it again" in stopped.stdout
    printed = [ended(one, first, 75), ended(two, second, 75)]
    assert sum("already runs this; following its output" in each for each in printed) == 1
    assert all("a new run" in each and "pretrain  " in each for each in printed)
    saved = max(losses(run))
    assert saved < 300

    done = multihop(one, *submit)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as in the existing run" in done.stdout and "small is done" in done.stderr
    assert json_lines(run / "launches.jsonl")[-1]["step"] >= 10 and sorted(losses(run)) == list(range(1, 301))
    assert set(re.findall(r"small-\d", done.stdout + printed[0])) == {"small-1", "small-2"}

    changed = multihop(one, *submit, "phases[0].lr=1e-3")
    assert changed.returncode == 2 and f"{run} was started with another recipe" in changed.stderr
    assert "300/300" in multihop(one, "logs", "small", *there).stdout
    log = multihop(one, "logs", "small", "--rank", "1", *there)
    assert log.stdout == (run / "logs" / "rank-1.log").read_text()
    assert multihop(one, "logs", "small", "--rank", "7", *there).returncode == 1
    attached = multihop(one, "attach", "small", *there)
    assert attached.returncode == 0 and "300/300" in attached.stdout
    fetched = multihop(one, "fetch", "small", *there)
    assert fetched.returncode == 0, fetched.stderr
    described = in_a_child(DESCRIBED, address)
    assert PLANTED not in str(described) + "".join(printed) + done.stdout + done.stderr
    assert not files_with_the_secret(tmp_path)
    assert (one / "fetched" / "small" / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()


@pytest.mark.long
def test_a_job_is_killed_at_once_and_one_that_fails_is_no_success(address: str, texts: Path, tmp_path: Path) -> None:
    runs, there = str(tmp_path / "runs"), ("--address", address)
    submit = ["submit", "recipe.yaml", "--runs", runs, "--stage", "train", *there]
    # Two orders for one run at the same time: the head takes one.
    locations = [make_workplace(made(tmp_path / name), texts, "long", 100_000) for name in ("a", "b")]
    both = [begin(place, *submit, f"phases[0].lr={number}e-3") for number, place in enumerate(locations, start=1)]
    run = tmp_path / "runs" / "long"
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(losses(run)) > 15)
    wait_for(lambda: any(command.poll() is not None for command in both))
    lost = next(number for number, command in enumerate(both) if command.poll() is not None)
    refused, following, place = ended(locations[lost], both[lost], 2), both[1 - lost], locations[1 - lost]
    assert "runs long with another recipe (phases[0].lr was" in refused
    assert multihop(place, "jobs", *there).stdout.count("long-") == 1
    follows = begin(made(tmp_path / "log"), "logs", "long", "--rank", "0", "-f", *there)
    wait_for(lambda: (tmp_path / "log" / "output.txt").read_text())
    workers = [process for process in psutil.process_iter() if str(run) in " ".join(command_of(process))]
    assert len(workers) >= 2  # and what they started
    killed = multihop(tmp_path, "stop", "long", "--now", *there)
    assert "killed 1 processes" in killed.stdout, killed.stdout + killed.stderr
    ended(place, following, 1)
    log = run / "logs" / "rank-0.log"
    assert ended(tmp_path / "log", follows) == log.read_text()  # it ends with the job
    with open(log, "ab") as file:
        file.write(b"caf\xe9\n")
    assert multihop(tmp_path, "logs", "long", "--rank", "0", *there).stdout.endswith("caf\ufffd\n")
    wait_for(lambda: not any(process.is_running() and command_of(process) for process in workers), 30)

    make_workplace(tmp_path, texts, "long", 10)
    lacking = multihop(
        tmp_path,
        "submit",
        "recipe.yaml",
        "name=c",
        "cluster.env=[NOT_THERE]",
        "--runs",
        runs,
        "--stage",
        "train",
        *there,
    )
    assert lacking.returncode == 2 and "has no NOT_THERE in its environment" in lacking.stdout
    given = multihop(tmp_path, "submit", "recipe.yaml", "cluster.env=[KEY=abcd]", "--runs", runs, *there)
    assert given.returncode == 2 and "cluster.env" in given.stderr and "abcd" not in given.stderr + given.stdout
    failed = multihop(
        tmp_path, "submit", "recipe.yaml", "name=b", "data.sources[0].path=/nothing", "--runs", runs, *there
    )
    assert failed.returncode == 2 and "/nothing" in failed.stdout and "b failed with exit code 2" in failed.stderr


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def command_of(process: psutil.Process) -> list[str]:
    try:
        result: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return result


@pytest.mark.long
def test_another_code_is_sent_along(address: str, texts: Path, tmp_path: Path) -> None:
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT / "src" / "multihop", copy / "multihop", ignore=shutil.ignore_patterns("__pycache__"))
    line = copy / "multihop" / "cluster" / "runs" / "stages.py"
    line.write_text(line.read_text() + '\nconsole.print("this is the code that was sent")\n')
    make_workplace(tmp_path, texts, "sent", 10)
    submit = ["submit", "recipe.yaml", "--runs", str(tmp_path / "runs"), "--stage", "prep", "--address", address]
    done = subprocess.run(
        [sys.executable, "-m", "multihop.cluster.cli.main", *submit],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no commit, sent: the cluster has another one" in done.stdout and "largest: " in done.stdout
    assert "this is the code that was sent" in done.stdout


@pytest.mark.long
def test_a_run_in_a_store(address: str, texts: Path, bucket: str, tmp_path: Path) -> None:
    make_workplace(tmp_path, texts, "stored", 12)
    there = ["--address", address]
    # What a node kept of a removed run of that name is no evidence that this run had checkpoints.
    append_row(node_folder(f"{bucket}/runs") / ".ranks" / "stored" / "metrics.jsonl", {"step": 9, "loss": 1.0})
    submitted = ["submit", "recipe.yaml", "--runs", f"{bucket}/runs/", "--stage", "train", *there]
    done = multihop(tmp_path, *submitted)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"stored, {bucket}/runs/stored on the cluster: train" in done.stdout and "12/12" in done.stdout
    refused = multihop(tmp_path, *submitted, "model.layers=1")
    assert refused.returncode == 2 and "model.layers was 2, is 1" in refused.stderr
    log = multihop(tmp_path, "logs", "stored", "--rank", "1", *there)
    assert log.returncode == 0 and log.stdout
    fetched = multihop(tmp_path, "fetch", "stored", *there)
    assert fetched.returncode == 0, fetched.stderr
    rows = json_lines(tmp_path / "fetched" / "stored" / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 13))
    assert json.loads((tmp_path / "fetched" / "stored" / "summary.json").read_text())["status"] == "trained"


def test_each_character_is_followed_once_over_a_connection_that_breaks(address: str, tmp_path: Path) -> None:
    all_cut = tmp_path / "all-cut"
    script = "; ".join(
        (
            "import itertools, pathlib, time",
            f"place = pathlib.Path({str(all_cut)!r})",
            "more = itertools.chain(iter(place.exists, True), range(500))",  # until then, and some more
            "[print('line', n, 'é' * (n % 50), flush=True) or time.sleep(0.004) for n, _ in enumerate(more)]",
        )
    )
    (tmp_path / "empty.zip").write_bytes(EMPTY_ARCHIVE)
    proxy = Cutting(int(address.rpartition(":")[2]), most=3, all_cut=all_cut)
    try:
        near = f"http://127.0.0.1:{proxy.port}"
        status, followed, whole = in_a_child(FOLLOWED, address, near, str(tmp_path / "empty.zip"), script)
    finally:
        proxy.close()
    assert status == "SUCCEEDED" and proxy.cuts == 3
    assert followed == whole and followed.count("line ") > 500
    assert [int(n) for n in re.findall(r"line (\d+)", followed)] == list(range(followed.count("line ")))


class Cutting:
    """A proxy that cuts the first `most` connections that are open for two seconds, and then creates the file
    `all_cut`."""

    def __init__(self, to: int, most: int, all_cut: Path) -> None:
        self._to, self._most, self._all_cut, self.cuts = to, most, all_cut, 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=(source, target), daemon=True).start()
                threading.Timer(2.0, self._cut, (near, far)).start()

    def _cut(self, *ends: socket.socket) -> None:
        with suppress(OSError):  # it has ended already
            if self.cuts < self._most:
                ends[0].getpeername()
                self.cuts += 1
                if self.cuts == self._most:
                    self._all_cut.touch()
                for end in ends:
                    end.shutdown(socket.SHUT_RDWR)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listening.close()


class Swallowing(Cutting):
    """A proxy that drops the answer to the first request for a job, and ends its connection."""

    def __init__(self, to: int) -> None:
        self._asked: set[socket.socket] = set()
        self.swallowed = 0
        super().__init__(to, most=0, all_cut=Path(os.devnull))

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                if b"POST /api/jobs/ " in data and not self.swallowed:
                    self._asked.add(target)
                if source in self._asked:
                    self._asked.clear()
                    self.swallowed += 1
                    for end in (source, target):
                        end.shutdown(socket.SHUT_RDWR)
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def test_a_submission_whose_response_is_lost_is_recognized(address: str, tmp_path: Path) -> None:
    (tmp_path / "empty.zip").write_bytes(EMPTY_ARCHIVE)
    proxy = Swallowing(int(address.rpartition(":")[2]))
    try:
        near = f"http://127.0.0.1:{proxy.port}"
        assert in_a_child(SUBMITTED_TWICE, near, str(tmp_path / "empty.zip")) == [True, False]
    finally:
        proxy.close()
    assert proxy.swallowed == 1


def test_mistakes_are_reported_in_a_sentence(
    address: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_workplace(tmp_path, texts, "small", 10)
    submit = ["submit", "recipe.yaml", "--runs", "/runs"]
    nobody = multihop(tmp_path, "jobs", "--address", f"http://127.0.0.1:{free_port()}")
    assert nobody.returncode == 2 and "no Ray dashboard answers at it" in nobody.stderr
    relative = multihop(tmp_path, *submit, "data.sources[0].path=texts/*.txt", "--address", address)
    assert relative.returncode == 2 and "data.sources[0].path=texts/*.txt is relative" in relative.stderr
    no_url = multihop(tmp_path, "jobs", "--address", address.removeprefix("http://"))
    assert no_url.returncode == 2 and "is not the URL of a Ray dashboard" in no_url.stderr
    assert no_url.stderr.count("\n") == 1
    unknown = multihop(tmp_path, "stop", "nothing", "--address", address)
    assert unknown.returncode == 2 and "the run nothing has no job" in unknown.stderr
    monkeypatch.setenv("RAY_AUTH_TOKEN", "00" * 32)
    for command in (["jobs"], ["logs", "small"], ["stop", "small"], submit):
        refused = multihop(tmp_path, *command, "--address", address)
        assert refused.returncode == 2 and "refuses the token" in refused.stderr, refused.stdout
