"""Where the time goes before the first step of a start."""

import json
import os
import time

from multihop.pretrain.environment import TIMES

_PARTS = {
    "detect_s": ("last_row", "ended"),
    "queue_s": ("ended", "requested"),
    "schedule_s": ("requested", "placed"),
}


class StartTimes:
    """Where the time before the first step goes: seconds by part, in order.

    After a restart: detect_s (from the last row of metrics until the failure was noticed) and queue_s (until nodes were
    free). On a cluster: schedule_s (until Ray had placed the ranks) and import_s. Then the parts that `lap` ends.
    """

    def __init__(self) -> None:
        """Create it once this process has imported what it needs."""
        self._last = time.time()
        given: dict[str, float] = json.loads(os.environ.get(TIMES, "{}"))
        self.seconds: dict[str, float] = {
            part: round(given[stop] - given[start], 3)
            for part, (start, stop) in _PARTS.items()
            if start in given and stop in given
        }
        if "placed" in given:
            self.seconds["import_s"] = round(self._last - given["placed"], 3)

    def lap(self, part: str) -> None:
        """End a part, whose name is `part`."""
        now = time.time()
        self.seconds[part] = round(now - self._last, 3)
        self._last = now
