"""MLflow's server as a team runs it, for tests: with users, over PostgreSQL, with artifacts on S3."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow_server import MlflowServer, free_port, mlflow_server
from postgres import PASSWORD, Postgres, postgres
from s3_endpoint import S3

USER, USER_PASSWORD = "admin", "hunter2-is-long-enough"
DATABASE = "small"
S3_SECRET = "a-secret-of-the-server"


@dataclass
class Tracking:
    """A running server and what is behind it."""

    server: MlflowServer
    database: Postgres
    disk: Path
    """Mount point of the small file system of the database."""
    bucket: str

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Suspend the server until the block ends."""
        self.server.pause()
        yield
        self.server.resume()

    @contextmanager
    def full(self) -> Iterator[None]:
        """Fill the database's disk until the block ends."""
        filler = self.disk / "filler"
        with open(filler, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
        yield
        filler.unlink()

    @contextmanager
    def without_database(self) -> Iterator[None]:
        """Stop PostgreSQL, which ends all connections first, until the block ends."""
        self.database.stop()
        yield
        self.database.start()

    def steps_of(self, run_id: str, key: str) -> list[int]:
        """Return the steps of a metric's rows in the database, in ascending order."""
        query = f"SELECT step FROM metrics WHERE run_uuid = '{run_id}' AND key = '{key}' ORDER BY step"
        return [int(str(step)) for (step,) in self.database.sql(query, DATABASE)]


@pytest.fixture(scope="session")
def tracking_server(s3_server: S3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracking]:
    """The server and what is behind it, started once for all tests."""
    pytest.importorskip("flask_wtf", reason="MLflow's authentication needs Flask-WTF: pip install '.[dev]'")
    folder = tmp_path_factory.mktemp("tracking")
    bucket = s3_server.make_bucket()
    users = folder / "users.ini"
    users.write_text(f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{folder}/users.db\n")
    options = ("--app-name", "basic-auth", "--artifacts-destination", f"s3://{bucket}/mlflow")
    with (
        postgres(free_port()) as database,
        database.small_database(DATABASE) as disk,
        mlflow_server(
            folder,
            database.uri_of(DATABASE),
            *options,
            PGPASSWORD=PASSWORD,
            MLFLOW_AUTH_CONFIG_PATH=str(users),
            MLFLOW_AUTH_ADMIN_USERNAME=USER,
            MLFLOW_AUTH_ADMIN_PASSWORD=USER_PASSWORD,
            MLFLOW_FLASK_SERVER_SECRET_KEY="drawn by lot",
            AWS_ENDPOINT_URL=s3_server.url,
            AWS_ACCESS_KEY_ID="the-server",
            AWS_SECRET_ACCESS_KEY=S3_SECRET,
            AWS_REGION="us-east-1",
        ) as server,
    ):
        yield Tracking(server, database, disk, bucket)


@pytest.fixture
def tracking(tracking_server: Tracking, monkeypatch: pytest.MonkeyPatch) -> Tracking:
    """The server, with a user's credentials in the environment and none for S3 or the database."""
    for name in ("MLFLOW_TRACKING_URI", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "50")  # a busy machine makes the server slow, which is no failure
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", USER)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", USER_PASSWORD)
    return tracking_server


def wait_for(what: str, is_true: Callable[[], bool], seconds: float = 240) -> None:
    """Wait until `is_true()`; fails with `what` after `seconds`."""
    until = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < until, f"waited in vain until {what}"
        time.sleep(0.1)
