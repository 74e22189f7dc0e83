"""Progress of long work: a live line on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import progress
from rich.console import Console
from rich.text import Text

from multihop.common.redaction import safe_text

console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
_PLAIN_EVERY_S = 10.0
_BAR = 24
"""Width of the progress bar in terminal columns."""
_GAP = "  "
"""Separates the parts of a line."""


def plain(text: str) -> Text:
    """Return untrusted `text` for Rich, without markup and without terminal control codes."""
    return Text(safe_text(text))


class ProgressLine:
    """Progress of work with a known number of steps."""

    def __init__(self, title: str, live: progress.Progress | None) -> None:
        self._title, self._live = title, live
        self._task = live.add_task(title, total=None, detail="") if live else None
        self._printed, self._updates, self._since = 0.0, 0, (0.0, 0)

    def update(self, done: int, total: int, detail: str = "") -> None:
        """Show that `done` of `total` is done.

        Args:
            detail: text after the count. Its parts are separated by two spaces, the most important first; a terminal
                shows as many as fit into its width.
        """
        if total == 0:
            return
        detail = safe_text(detail)
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
    with progress.Progress(_Line(), console=console, transient=True) as live:
        yield ProgressLine(title, live)


class _Line(progress.ProgressColumn):
    """The whole line as one column: Rich does not drop columns by priority when the terminal is too narrow."""

    def render(self, task: progress.Task) -> Text:
        """Render the parts that fit into the terminal."""
        if not task.total:
            return Text(task.description)
        main, *others = task.fields["detail"].split(_GAP)
        filled, dash = round(_BAR * task.percentage / 100), "━" if console.encoding.startswith("utf") else "-"
        bar = Text.assemble((dash * filled, "bar.complete"), (dash * (_BAR - filled), "bar.back"))
        left = "" if task.time_remaining is None else f"{_duration(task.time_remaining)} left"
        last = 4 + len(others)
        return _fit(
            [
                (3, Text(task.description.rstrip())),
                (last + 1, bar),
                (0, Text(f"{task.completed:.0f}/{task.total:.0f}", "progress.download")),
                (2, Text(main)),
                *((4 + number, Text(other)) for number, other in enumerate(others)),
                (last, Text(_duration(task.elapsed or 0), "progress.elapsed")),
                (1, Text(left, "progress.remaining")),
            ],
            console.width,
        )


def _fit(parts: Sequence[tuple[int, Text]], width: int) -> Text:
    """Join the parts in their order, dropping the last in priority until they fit into `width` columns.

    Args:
        parts: (priority, text); 0 is the highest priority and always kept.
    """
    used, fits = -len(_GAP), set[int]()
    for number, part in sorted((part for part in parts if part[1]), key=lambda part: part[0]):
        used += len(_GAP) + part.cell_len
        if used > width and fits:
            break
        fits.add(number)
    return Text(_GAP).join(part for number, part in parts if number in fits)


def clock(at: float | None = None) -> str:
    """Return HH:MM:SS, local time.

    Args:
        at: seconds since the epoch; None: now.
    """
    return time.strftime("%H:%M:%S", time.localtime(at))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
