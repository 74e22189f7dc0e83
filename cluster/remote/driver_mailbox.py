"""Requests from the driver to the ranks, and rows from the ranks to the driver, through an object store."""

from pathlib import Path

from multihop.cluster.console import clock, console
from multihop.cluster.remote.node_cache import CONTROL, REQUESTS, RemoteRunSpec
from multihop.common.files import write_atomically
from multihop.common.journal import JournalReader
from multihop.common.storage import open_folder
from multihop.pretrain.run.files import GAVE_UP, JOURNAL, ROWS


class DriverMailbox:
    """The driver's side. Its local run folder gets the files that a shared run folder would have."""

    def __init__(self, run_dir: Path, spec: RemoteRunSpec) -> None:
        """Read the rows of earlier launches.

        Raises:
            OSError: the store cannot be read.
        """
        self._spec = spec
        self._run_dir, self._store = run_dir, open_folder(spec.location)
        self._polled = open_folder(spec.location, polled=True)
        self._journal = JournalReader(self._store.child(JOURNAL), run_dir, ROWS)
        self._journal.read()
        self._launch = self._journal.newest_launch()
        self._uploaded: set[str] = set()
        self._is_unreachable = False

    def next_launch(self) -> int:
        """Remove requests to earlier ranks; returns the number of the next launch.

        Raises:
            OSError: the store cannot be written to.
        """
        for name in REQUESTS:
            self._store.child(CONTROL).remove(name)
        self._store.remove(GAVE_UP)
        self._uploaded.clear()
        self._launch += 1
        return self._launch

    def poll(self) -> None:
        """Upload requests and download new rows. Warn once if the store is unreachable; retry on the next call."""
        try:
            for name in REQUESTS:
                if name not in self._uploaded and (self._run_dir / name).exists():
                    self._polled.child(CONTROL).write_atomically(name, (self._run_dir / name).read_bytes())
                    self._uploaded.add(name)
            self._journal.read(self._polled.child(JOURNAL))
        except OSError as error:
            if not self._is_unreachable:
                console.print(f"{clock()} {self._spec.location} does not answer ({error}); trying again", markup=False)
            self._is_unreachable = True
            return
        if self._is_unreachable:
            console.print(f"{clock()} {self._spec.location} answers again", markup=False)
        self._is_unreachable = False

    def end(self) -> None:
        """Download what the ranks left when they ended: their last rows, and gave-up.json if they wrote it.

        Raises:
            OSError: the store cannot be read.
        """
        self._journal.read()
        if self._store.size(GAVE_UP) is not None:
            write_atomically(self._run_dir / GAVE_UP, self._store.read_bytes(GAVE_UP))
