"""`multihop ui`: MLflow's UI for the local store."""

import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from multihop.cluster.tracking.connection import store_uri
from multihop.common.errors import UserError
from multihop.common.redaction import redacted

HOST = "127.0.0.1"


def serve(runs: Path, port: int) -> NoReturn:
    """Serve MLflow's UI on 127.0.0.1 until interrupted.

    Raises:
        UserError: there is no store yet, the runs are tracked on a server, or the port is in use.
    """
    uri = store_uri(runs)
    if uri.startswith("http"):
        raise UserError(f"MLFLOW_TRACKING_URI={redacted(uri)} is a server with its own UI; open it in a browser")
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        raise UserError(f"no MLflow store in {runs} yet; run a recipe first, or set --runs")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UserError(f"port {port} is not available ({error.strerror}); choose another with --port") from None
    command = [sys.executable, "-m", "mlflow", "server"]
    command += ["--artifacts-destination", str(runs.resolve() / "mlartifacts")]
    command += ["--host", HOST, "--port", str(port), "--workers", "1"]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"}
    # Eight processes for evaluations by language models, which runs here do not have.
    environment.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
    environment["MLFLOW_BACKEND_STORE_URI"] = uri  # not on the command line, which every user can read
    page = f"http://{HOST}:{port}/#/experiments?workflowType=machine_learning"
    print(
        f"MLflow UI for {redacted(uri)}\n\n    {page}\n\n"
        "No password: every user of this machine can open it, and change or delete runs.\nPress Ctrl-C to stop.",
        flush=True,
    )
    os.execve(command[0], command, environment)  # replaces this process, so that signals reach it
