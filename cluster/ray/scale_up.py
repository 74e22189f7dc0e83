"""How long the rest of a run takes, and whether more ranks are worth a restart."""

from collections import deque
from typing import Any

_SETTLED_S = 10.0
"""Nodes that join together do so within seconds; one restart is enough for them."""
_RECENT = 20
"""Rows of metrics.jsonl that tell how long a step takes."""


class ScaleUpPolicy:
    """Compares what a restart costs, as the last start did, with the time that more ranks would save.

    Steps are taken to be as many times faster as there are more ranks: the most that a restart can gain.
    """

    def __init__(self, last_step: int) -> None:
        self._last_step = last_step
        self._asked = self._cost = 0.0
        self._rows: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._room, self._since = 0, 0.0

    def on_request(self, now: float) -> None:
        """Ranks are requested."""
        self._asked, self._cost = now, 0.0
        self._rows.clear()
        self._room = 0

    def observe(self, row: dict[str, Any]) -> None:
        """A row of metrics.jsonl; those with a loss tell the time of a step."""
        if "loss" in row and "time" in row:
            self._cost = self._cost or row["time"] - self._asked
            self._rows.append((row["step"], row["time"]))

    def is_worth_restart(self, ranks: int, room: int, now: float) -> bool:
        """Whether to restart with `room` ranks instead of `ranks`, once that room has stood for a few seconds."""
        if room <= ranks:
            self._room = 0
            return False
        if room != self._room:
            self._room, self._since = room, now
        return now - self._since >= _SETTLED_S and self.left_s() * (1 - ranks / room) > self._cost

    def left_s(self) -> float:
        """Seconds that the steps which are left will take with these ranks; 0 while that is unknown."""
        if len(self._rows) < 2:
            return 0.0
        (first, began), (step, ended) = self._rows[0], self._rows[-1]
        return (self._last_step - step) * (ended - began) / (step - first) if step > first else 0.0
