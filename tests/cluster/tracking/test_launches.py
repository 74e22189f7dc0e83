"""The tag that lists the launches of a run's ranks."""

import json
from typing import Any

from multihop.cluster.tracking.store import launches_tag


def launch(number: int, **more: Any) -> dict[str, Any]:
    return {"time": 1_700_000_000.0 + number, "step": 10 * number, "world_size": 4, **more}


def test_each_launch_with_when_from_which_step_and_on_how_many_ranks_and_nodes() -> None:
    tag = launches_tag([launch(0), launch(1, nodes=2, seconds={"checking": 1.0})])
    assert json.loads(tag) == [
        {"launch": 1, "time": "2023-11-14 22:13:20", "step": 0, "ranks": 4},
        {"launch": 2, "time": "2023-11-14 22:13:21", "step": 10, "ranks": 4, "nodes": 2},
    ]
    assert launches_tag([]) == ""


def test_the_newest_that_fit_are_listed_with_their_numbers() -> None:
    tag = launches_tag([launch(number) for number in range(500)])
    listed = json.loads(tag)
    assert len(tag) <= 5000
    assert listed[0]["launch"] > 1
    assert [each["launch"] for each in listed] == list(range(listed[0]["launch"], 501))


def test_a_row_that_lacks_a_key_is_left_out() -> None:
    assert launches_tag([{"time": 1.0}]) == ""
