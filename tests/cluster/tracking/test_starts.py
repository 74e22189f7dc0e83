"""The tag that lists the starts of a run's ranks."""

import json
from typing import Any

from multihop.cluster.tracking.store import starts_tag


def start(number: int, **more: Any) -> dict[str, Any]:
    return {"time": 1_700_000_000.0 + number, "step": 10 * number, "world_size": 4, **more}


def test_each_start_with_when_from_which_step_and_on_how_many_ranks_and_nodes() -> None:
    tag = starts_tag([start(0), start(1, nodes=2, seconds={"checking": 1.0})])
    assert json.loads(tag) == [
        {"start": 1, "time": "2023-11-14 22:13:20", "step": 0, "ranks": 4},
        {"start": 2, "time": "2023-11-14 22:13:21", "step": 10, "ranks": 4, "nodes": 2},
    ]
    assert starts_tag([]) == ""


def test_the_newest_that_fit_are_listed_with_their_numbers() -> None:
    tag = starts_tag([start(number) for number in range(500)])
    listed = json.loads(tag)
    assert len(tag) <= 5000
    assert listed[0]["start"] > 1
    assert [each["start"] for each in listed] == list(range(listed[0]["start"], 501))


def test_a_row_that_lacks_a_key_is_left_out() -> None:
    assert starts_tag([{"time": 1.0}]) == ""
