"""Progress of long work: a live line on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress
from rich.console import Console
from rich.text import Text

from common.redaction import shown

console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
_PLAIN_EVERY_S = 10.0


def plain(text: str) -> Text:
    """Untrusted `text` for Rich, without markup and without terminal control codes."""
    return Text(shown(text))


class ProgressLine:
    """Progress of work with a known number of steps."""

    def __init__(self, title: str, live: progress.Progress | None) -> None:
        self._title, self._live = title, live
        self._task = live.add_task(title, total=None, detail="") if live else None
        self._printed, self._updates, self._since = 0.0, 0, (0.0, 0)

    def update(self, done: int, total: int, detail: str = "") -> None:
        """Show that `done` of `total` is done; `detail` follows the count."""
        if total == 0:
            return
        detail = shown(detail)
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=done, total=total, detail=detail)
            return
        now, (since, first) = time.monotonic(), self._since
        left = (now - since) / (done - first) * (total - done) if first < done < total and self._updates > 1 else None
        self._updates += 1
        if self._updates <= 2:  # the first interval includes start-up, so it is no estimate of the rest
            self._since = (now, done)
        if now - self._printed >= _PLAIN_EVERY_S or done == total:
            self._printed = now
            tail = f"  {detail}" if detail else ""
            console.print(f"{self._title}  {done}/{total}{tail}{'' if left is None else f', {_duration(left)} left'}")


@contextmanager
def progress_line(title: str) -> Iterator[ProgressLine]:
    """Show a progress line while the block runs."""
    if not console.is_terminal:
        yield ProgressLine(title, None)
        return
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[detail]}", markup=False),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as live:
        yield ProgressLine(title, live)


def clock(at: float | None = None) -> str:
    """HH:MM:SS, local time.

    Args:
        at: seconds since the epoch; None: now.
    """
    return time.strftime("%H:%M:%S", time.localtime(at))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
