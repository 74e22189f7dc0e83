"""The decision to restart a run with more ranks."""

from typing import Any

import pytest

from multihop.cluster.ray.capacity import ScaleUpPolicy


def row(step: int, time: float) -> dict[str, Any]:
    return {"step": step, "time": time, "loss": 1.0}


@pytest.fixture
def scale_up() -> ScaleUpPolicy:
    """A policy after 30 s from the request for ranks to the first row, with 1 s per step and 1,000 steps in total."""
    result = ScaleUpPolicy(1000)
    result.on_request(100.0)
    for step in range(1, 41):
        result.observe(row(step, 129.0 + step), 129.0 + step)
    return result


def test_a_restart_that_is_repaid_is_made_once_the_room_has_settled(scale_up: ScaleUpPolicy) -> None:
    assert not scale_up.is_worth_restart(1, 1, 170.0)
    assert not scale_up.is_worth_restart(1, 2, 171.0)
    assert not scale_up.is_worth_restart(1, 3, 179.0)  # another node has joined
    assert not scale_up.is_worth_restart(1, 3, 188.0) and scale_up.is_worth_restart(1, 3, 189.5)
    assert not scale_up.is_worth_restart(1, 1, 190.0)
    assert not scale_up.is_worth_restart(1, 3, 191.0)  # and is gone and back


def test_the_end_of_a_run_is_not_disturbed(scale_up: ScaleUpPolicy) -> None:
    scale_up.observe(row(930, 1059.0), 1059.0)
    assert not scale_up.is_worth_restart(1, 2, 1060.0) and scale_up.is_worth_restart(1, 2, 1080.0)  # 35 s are saved
    scale_up.observe(row(950, 1079.0), 1079.0)
    assert not scale_up.is_worth_restart(1, 2, 1081.0)  # 25 s are not
    assert not scale_up.is_worth_restart(3, 4, 1060.0) and not scale_up.is_worth_restart(3, 4, 1080.0)


def test_without_a_known_rate_nothing_is_decided() -> None:
    result = ScaleUpPolicy(1000)
    result.on_request(100.0)
    assert not result.is_worth_restart(1, 2, 130.0) and not result.is_worth_restart(1, 2, 150.0)
    result.observe({"step": 0, "time": 140.0, "heldout_loss": 3.0}, 140.0)
    result.observe(row(1, 141.0), 141.0)
    assert not result.is_worth_restart(1, 2, 160.0)
    result.observe(row(2, 142.0), 142.0)
    assert result.is_worth_restart(1, 2, 161.0)
    result.on_request(170.0)
    assert not result.is_worth_restart(1, 2, 171.0) and not result.is_worth_restart(1, 2, 190.0)
