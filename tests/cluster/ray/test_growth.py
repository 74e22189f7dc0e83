"""When a run is restarted with more ranks."""

from typing import Any

import pytest

from multihop.cluster.ray.growth import Growth


def row(step: int, time: float) -> dict[str, Any]:
    return {"step": step, "time": time, "loss": 1.0}


@pytest.fixture
def growth() -> Growth:
    """The first row 30 s after the ranks were asked for, then a second per step; 1,000 steps in all."""
    found = Growth(1000)
    found.asked(100.0)
    for step in range(1, 41):
        found.saw(row(step, 129.0 + step))
    return found


def test_a_restart_that_is_repaid_is_made_once_the_room_has_settled(growth: Growth) -> None:
    assert not growth.pays(1, 1, 170.0)
    assert not growth.pays(1, 2, 171.0)
    assert not growth.pays(1, 3, 179.0)  # another node has joined
    assert not growth.pays(1, 3, 188.0) and growth.pays(1, 3, 189.5)
    assert not growth.pays(1, 1, 190.0)
    assert not growth.pays(1, 3, 191.0)  # and is gone and back


def test_the_end_of_a_run_is_not_disturbed(growth: Growth) -> None:
    growth.saw(row(930, 1059.0))
    assert not growth.pays(1, 2, 1060.0) and growth.pays(1, 2, 1080.0)  # 35 s are saved
    growth.saw(row(950, 1079.0))
    assert not growth.pays(1, 2, 1081.0)  # 25 s are not
    assert not growth.pays(3, 4, 1060.0) and not growth.pays(3, 4, 1080.0)


def test_without_a_known_rate_nothing_is_decided() -> None:
    found = Growth(1000)
    found.asked(100.0)
    assert not found.pays(1, 2, 130.0) and not found.pays(1, 2, 150.0)
    found.saw({"step": 0, "time": 140.0, "heldout_loss": 3.0})
    found.saw(row(1, 141.0))
    assert not found.pays(1, 2, 160.0)
    found.saw(row(2, 142.0))
    assert found.pays(1, 2, 161.0)
    found.asked(170.0)
    assert not found.pays(1, 2, 171.0) and not found.pays(1, 2, 190.0)
