"""What ranks and whoever starts them agree on: variables of the environment, an exit code, and where the time went."""

import json
import os
import time

SECRET = "MULTIHOP_RENDEZVOUS_SECRET"
"""By which the ranks of a start know each other, in hex."""
SUPERVISED = "MULTIHOP_SUPERVISED"
"""Set where ranks that end are started again unless they say why that is of no use."""
MLFLOW_RUN_ID = "MULTIHOP_MLFLOW_RUN_ID"
"""MLflow's id of the run, which checkpoints remember."""
TIMES = "MULTIHOP_TIMES"
"""How this start came about, as JSON, in seconds since 1970: `silent`, the last row of metrics before it; `ended`, when
the end of the ranks before was noticed; `asked`, when these were asked for; `placed`, when all had a place."""

STOPPED = 75
"""Exit code of a rank that has saved and left because it was asked to."""

_PARTS = {"unnoticed": ("silent", "ended"), "waiting": ("ended", "asked"), "placing": ("asked", "placed")}


class StartTimes:
    """Where the time goes before the first step: seconds by part, in the order in which they pass.

    After ranks that ended: unnoticed (since their last row of metrics) and waiting (for nodes). Under a cluster:
    placing and importing. Then what `lap` is told.
    """

    def __init__(self) -> None:
        """To be made when this process has imported what it needs."""
        self._last = time.time()
        told: dict[str, float] = json.loads(os.environ.get(TIMES, "{}"))
        self.seconds: dict[str, float] = {
            part: round(told[stop] - told[start], 3)
            for part, (start, stop) in _PARTS.items()
            if start in told and stop in told
        }
        if "placed" in told:
            self.seconds["importing"] = round(self._last - told["placed"], 3)

    def lap(self, part: str) -> None:
        """A part ends here."""
        now = time.time()
        self.seconds[part] = round(now - self._last, 3)
        self._last = now
