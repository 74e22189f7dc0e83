"""What a driver and ranks that have no folder in common tell each other, through the run's home in an object store."""

from pathlib import Path

from multihop.cluster.console import clock, console
from multihop.cluster.ray.node_cache import CONTROL, REQUESTS, RunHome
from multihop.common.files import write_atomically
from multihop.common.journal import JournalReader
from multihop.common.storage import open_folder
from multihop.pretrain.run.files import GAVE_UP, JOURNAL, ROWS


class DriverMailbox:
    """The driver's side: its folder of the run has the files that a folder in common would have."""

    def __init__(self, run_dir: Path, home: RunHome) -> None:
        """The rows of earlier starts are read.

        Raises:
            OSError: the store cannot be read.
        """
        self.home = home
        self._run_dir, self._there = run_dir, open_folder(home.location)
        self._journal = JournalReader(self._there.child(JOURNAL), run_dir, ROWS)
        self._journal.read()
        self._start = self._journal.newest_start()
        self._asked: set[str] = set()
        self._is_away = False

    def next_start(self) -> int:
        """Forget the requests to earlier ranks; returns the number of the next start.

        Raises:
            OSError: the store cannot be written to.
        """
        for name in REQUESTS:
            self._there.child(CONTROL).remove(name)
        self._there.remove(GAVE_UP)
        self._asked.clear()
        self._start += 1
        return self._start

    def poll(self) -> None:
        """Pass requests on, and take new rows. A store that is away is told about, and tried again the next time."""
        try:
            for name in REQUESTS:
                if name not in self._asked and (self._run_dir / name).exists():
                    self._there.child(CONTROL).write_atomically(name, (self._run_dir / name).read_bytes())
                    self._asked.add(name)
            self._journal.read()
        except OSError as error:
            if not self._is_away:
                console.print(f"{clock()} {self.home.location} does not answer ({error}); trying again", markup=False)
            self._is_away = True
            return
        if self._is_away:
            console.print(f"{clock()} {self.home.location} answers again", markup=False)
        self._is_away = False

    def end(self) -> None:
        """Take what ranks that have ended left: their last rows, and the reason if they gave up.

        Raises:
            OSError: the store cannot be read.
        """
        self._journal.read()
        if self._there.size(GAVE_UP) is not None:
            write_atomically(self._run_dir / GAVE_UP, self._there.read_bytes(GAVE_UP))
