"""What the terminal shows while something long runs: a live line, or plain lines where there is no terminal."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from data_prep.shown import shown

console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
_PLAIN_EVERY_S = 10.0


def plain(text: str) -> Text:
    """`text` from elsewhere for Rich, which would take brackets in it for markup and hand on what steers a terminal."""
    return Text(shown(text))


class ProgressLine:
    """One piece of work with a known end."""

    def __init__(self, title: str, live: Progress | None) -> None:
        self._title, self._live = title, live
        self._task = live.add_task(title, total=None, detail="") if live else None
        self._printed, self._updates, self._since = 0.0, 0, (0.0, 0)

    def update(self, done: int, total: int, detail: str = "") -> None:
        """Tell how far it is; `detail` follows the count."""
        if total == 0:
            return
        detail = shown(detail)
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=done, total=total, detail=detail)
            return
        now, (since, first) = time.monotonic(), self._since
        left = (now - since) / (done - first) * (total - done) if first < done < total and self._updates > 1 else None
        self._updates += 1
        if self._updates <= 2:  # until the first piece is done there is start-up, which says nothing of the rest
            self._since = (now, done)
        if now - self._printed >= _PLAIN_EVERY_S or done == total:
            self._printed = now
            tail = f"  {detail}" if detail else ""
            console.print(f"{self._title}  {done}/{total}{tail}{'' if left is None else f', {_duration(left)} left'}")


@contextmanager
def progress_line(title: str) -> Iterator[ProgressLine]:
    """A progress line for the length of a block."""
    if not console.is_terminal:
        yield ProgressLine(title, None)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as live:
        yield ProgressLine(title, live)


def clock(at: float | None = None) -> str:
    """The time of day of `at`, in seconds since 1970; None: now."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
