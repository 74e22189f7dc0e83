"""MLflow's own page over the store of the runs."""

import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from cluster.mlflow_store import store_uri
from data_prep.shown import redacted

HOST = "127.0.0.1"


def serve(runs: Path, port: int) -> NoReturn:
    """Serve MLflow's page to the users of this machine alone, until it is interrupted.

    Raises:
        ValueError: nothing was tracked there yet, the runs are tracked on a server of their own, or the port is taken.
    """
    uri = store_uri(runs)
    if uri.startswith("http"):
        raise ValueError(
            f"MLFLOW_TRACKING_URI={redacted(uri)} is a server with a page of its own; open it in a browser"
        )
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        raise ValueError(f"nothing was tracked in {runs} yet; run a recipe first, or name the folder: --runs")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ValueError(f"port {port} cannot be used ({error.strerror}); choose another one: --port") from None
    command = [sys.executable, "-m", "mlflow", "server"]
    command += ["--artifacts-destination", str(runs.resolve() / "mlartifacts")]
    command += ["--host", HOST, "--port", str(port), "--workers", "1"]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"}
    environment["MLFLOW_BACKEND_STORE_URI"] = uri  # every user of the machine can read a command line
    page = f"http://{HOST}:{port}/#/experiments?workflowType=machine_learning"
    print(
        f"MLflow over {redacted(uri)}\n\n    {page}\n\n"
        "It has no password: every user of this machine can open it, and change or delete runs.\nCtrl-C ends it.",
        flush=True,
    )
    os.execve(command[0], command, environment)  # in place of this process, so that signals reach it
