"""PostgreSQL on this machine for tests: a cluster in a temporary folder, which can be stopped, paused and filled."""

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from multihop.common.files import write_atomically

PASSWORD = "correct-horse-of-the-database"
SMALL_MB = 80
"""Size of the file system of the small database, in MB."""


def binaries() -> Path:
    """Return the folder of initdb and postgres; skips the test if it or PostgreSQL's client is missing."""
    pytest.importorskip("psycopg", reason="psycopg is missing: pip install '.[dev]'")
    found = shutil.which("initdb")
    places = (
        [Path(found).resolve().parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    )
    if not places or not (places[0] / "initdb").exists():
        pytest.skip("PostgreSQL's server is missing: apt-get install postgresql")
    return places[0]


def unprivileged() -> str | None:
    """Return the user that runs PostgreSQL, which refuses root; None: the current user."""
    if os.geteuid() != 0:
        return None
    users = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in users else "nobody"


class Postgres:
    """A running PostgreSQL at `host:port`, with the user multihop."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port, self._bin, self._user = folder, port, binaries(), unprivileged()
        self._process: subprocess.Popen[bytes] | None = None
        self._own(folder)
        secret = folder / "password"
        write_atomically(secret, PASSWORD.encode())
        options = ["-U", "multihop", "-A", "scram-sha-256", "--pwfile", str(secret), "-N", "--locale=C.UTF-8"]
        self._run(self._bin / "initdb", "-D", folder / "data", *options)
        secret.unlink()
        self.start()

    @property
    def uri(self) -> str:
        """The URI without the password, which clients take from PGPASSWORD."""
        return self.uri_of("postgres")

    def uri_of(self, database: str) -> str:
        return f"postgresql://multihop@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        options = ["-D", self.folder / "data", "-k", self.folder, "-h", "127.0.0.1", "-p", str(self.port), "-F"]
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", *options], user=self._user, stdout=log, stderr=log, start_new_session=True
            )
        while subprocess.run([self._bin / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]).returncode:
            assert self._process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.1)

    def stop(self, how: int = signal.SIGINT) -> None:
        """Stop: SIGINT ends all connections first; SIGQUIT stops as in a crash, with recovery at the next start."""
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait()

    def pause(self) -> None:
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_all(signal.SIGCONT)

    def sql(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run one statement; returns its rows."""
        import psycopg

        with psycopg.connect(
            host="127.0.0.1", port=self.port, user="multihop", password=PASSWORD, dbname=database, autocommit=True
        ) as connection:
            done = connection.execute(statement.encode())
            return list(done.fetchall()) if done.description else []

    def dump(self, database: str) -> str:
        """Return the content of a database as text."""
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "multihop", "--inserts", database]
        return self._run(self._bin / "pg_dump", *where)

    @contextmanager
    def small_database(self, name: str) -> Iterator[Path]:
        """Create a database on a file system of its own, of SMALL_MB; yields its mount point, to be filled."""
        place = self.folder / name
        place.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_MB}m", "tmpfs", str(place)]
        if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("a small file system needs Linux and the right to mount")
        try:
            (place / "space").mkdir()
            self._own(place / "space")
            self.sql(f"CREATE TABLESPACE {name} LOCATION '{place / 'space'}'")
            self.sql(f"CREATE DATABASE {name} TABLESPACE {name}")
            yield place
        finally:
            subprocess.run(["umount", "-l", str(place)], check=True)

    def _own(self, folder: Path) -> None:
        if self._user is not None:
            shutil.chown(folder, self._user)

    def _run(self, *command: str | Path) -> str:
        environment = {**os.environ, "PGPASSWORD": PASSWORD}
        done = subprocess.run(
            command, user=self._user, capture_output=True, text=True, cwd=self.folder, env=environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _signal_all(self, number: int) -> None:
        """Signal all processes of the server, because each has a session of its own."""
        assert self._process is not None
        first = psutil.Process(self._process.pid)
        for process in (first, *first.children()):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


@contextmanager
def postgres(port: int) -> Iterator[Postgres]:
    """Run PostgreSQL until the block ends."""
    binaries()
    with tempfile.TemporaryDirectory(prefix="mh-pg-", ignore_cleanup_errors=True) as folder:
        running = Postgres(Path(folder), port)
        try:
            yield running
        finally:
            running.stop(signal.SIGQUIT)
