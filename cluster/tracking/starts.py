"""The starts of a run's ranks as one tag: when, from which step, how many ranks on how many nodes."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime

from multihop.cluster.tracking.store import is_number
from multihop.common.json_lines import Row

STARTS_TAG = "multihop.starts"
_KEYS = ("time", "step", "world_size")
_LONGEST = 5000
"""Characters; MLflow takes 8000, some of its stores 5000."""


def starts_tag(rows: Sequence[Row]) -> str:
    """Rows of launches.jsonl as a JSON list, oldest first.

    Each has a number (from 1 on), the UTC time, the step, the ranks, and the nodes if known. Only the newest that fit
    are listed; their numbers tell how many there were. Empty if there are none.
    """
    listed: list[str] = []
    complete = [row for row in rows if all(is_number(row.get(key)) for key in _KEYS)]
    for number, row in reversed(list(enumerate(complete, start=1))):
        time = datetime.fromtimestamp(row["time"], UTC).strftime("%Y-%m-%d %H:%M:%S")
        start = {"start": number, "time": time, "step": row["step"], "ranks": row["world_size"]}
        if "nodes" in row:  # rows of older versions have none
            start["nodes"] = row["nodes"]
        text = json.dumps(start)
        if sum(map(len, listed)) + 2 * len(listed) + len(text) > _LONGEST:
            break
        listed.insert(0, text)
    return f"[{', '.join(listed)}]" if listed else ""
