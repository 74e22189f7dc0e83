"""The parts of the MLflow UI that can be tested without a browser."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from mlflow_server import free_port

from multihop.cluster.tracking.connection import connect, store_uri
from multihop.cluster.tracking.ui import serve
from multihop.common.errors import UserError


def test_it_serves_the_ui_and_ends_with_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    connect(store_uri(tmp_path)).create_experiment("mine")
    port = free_port()
    code = "from pathlib import Path; from multihop.cluster.tracking.ui import serve; "
    code += f"serve(Path({str(tmp_path)!r}), {port})"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        printed = "".join(process.stdout.readline() for _ in range(5))
        assert f"http://127.0.0.1:{port}/" in printed
        assert "No password: every user of this machine can open it" in printed
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as answer:
                    assert b"MLflow" in answer.read()
                break
            except OSError:
                assert process.poll() is None
                time.sleep(0.2)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def test_a_taken_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "mlflow.db").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match=r"is not available .* --port"):
            serve(tmp_path, taken.getsockname()[1])


def test_nothing_tracked_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match="no MLflow store"):
        serve(tmp_path, 5000)


def test_a_server_has_its_own_ui(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    with pytest.raises(UserError, match="open it in a browser"):
        serve(tmp_path, 5000)


def test_the_stores_password_is_neither_printed_nor_on_the_command_line(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    environment["MLFLOW_TRACKING_URI"] = "postgresql://user:hunter2@127.0.0.1:9/db"
    code = (
        "from pathlib import Path; from multihop.cluster.tracking.ui import serve; "
        f"serve(Path({str(tmp_path)!r}), {free_port()})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        assert "MLflow UI for postgresql://***@127.0.0.1:9/db" in process.stdout.readline()
        command = Path(f"/proc/{process.pid}/cmdline")
        while b"mlflow\0server" not in command.read_bytes():
            assert process.poll() is None
            time.sleep(0.01)
        assert b"hunter2" not in command.read_bytes()
    finally:
        process.kill()
        process.wait()
