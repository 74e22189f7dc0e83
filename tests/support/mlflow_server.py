"""MLflow's own server for tests, with the database, the users and the artifact store that it is given."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class MlflowServer:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def pause(self) -> None:
        """Suspend the server: from now on it accepts connections, but answers none."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)


@contextmanager
def mlflow_server(folder: Path, store: str, *options: str, port: int = 0, **environment: str) -> Iterator[MlflowServer]:
    """Serve `store`; the server is killed at the end, as by a power cut.

    Args:
        folder: folder of the log; without `options`, artifacts go to `files` in it.
        options: options of `mlflow server`.
        environment: variables of the server in addition to those of this process; "" removes one.
    """
    port = port or free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += options or ["--artifacts-destination", str(folder / "files")]
    variables = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_BACKEND_STORE_URI": store, **environment}
    variables["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # eight processes that no test needs
    with open(folder / "server.log", "ab") as log:
        process = subprocess.Popen(
            command,
            env={name: value for name, value in variables.items() if value},
            stdout=log,
            stderr=log,
            cwd=folder,
            start_new_session=True,
        )
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, (folder / "server.log").read_text()
                time.sleep(0.2)
        yield MlflowServer(f"http://127.0.0.1:{port}", process, folder / "server.log")
    finally:
        with suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
