"""The simulation of failures agrees with closed formulas where they hold."""

import math
from dataclasses import replace

import numpy as np
import pytest

from multihop.pretrain.plan.goodput import Nodes, Recovery, best_interval, daly_interval, simulate, young_interval

DAY = 86_400.0
ALIKE = Nodes(count=100, failures_per_day=0.05, spread=0.0, repair_s=0.0)
"""Five failures a day, and no waiting for nodes: what the formulas assume."""
SIMPLE = Recovery(save_interval_s=3600.0, save_pause_s=60.0, save_write_s=0.0, detect_s=10.0, restart_s=110.0)


def seconds(nodes: Nodes, recovery: Recovery, work_s: float, runs: int = 40) -> float:
    return float(np.mean([simulate(nodes, recovery, work_s, seed).seconds for seed in range(runs)]))


@pytest.mark.parametrize("interval", [600.0, 3600.0, 14_400.0])
def test_the_time_is_that_of_dalys_formula(interval: float) -> None:
    recovery, work = replace(SIMPLE, save_interval_s=interval), 20 * DAY
    mean, down = DAY / 5, recovery.detect_s + recovery.restart_s
    # Daly 2006, equation 20: the expected time of a segment with its save, under exponential failures.
    expected = mean * math.exp(down / mean) * math.expm1((interval + recovery.save_pause_s) / mean) * work / interval
    assert seconds(ALIKE, recovery, work) == pytest.approx(expected, rel=0.03)


def test_youngs_and_dalys_intervals_are_near_the_best() -> None:
    mean = DAY / 5
    intervals = np.geomspace(200, 20_000, 25)
    times = [seconds(ALIKE, replace(SIMPLE, save_interval_s=float(each)), 10 * DAY) for each in intervals]
    for chosen in (young_interval(60.0, mean), daly_interval(60.0, mean)):
        assert seconds(ALIKE, replace(SIMPLE, save_interval_s=chosen), 10 * DAY) < 1.01 * min(times)
    assert daly_interval(60.0, mean) == pytest.approx(young_interval(60.0, mean), rel=0.1)


def test_without_failures_only_the_saves_cost_time() -> None:
    outcome = simulate(replace(ALIKE, failures_per_day=1e-12), SIMPLE, 10 * 3600.0, seed=1)
    assert outcome.failures == 0 and outcome.lost_s == 0 and outcome.down_s == 0
    assert outcome.seconds == pytest.approx(10 * 3600 + outcome.paused_s) and outcome.paused_s == 9 * 60
    assert outcome.goodput(10 * 3600.0) == pytest.approx(600 / 609)


def test_every_second_is_accounted_for() -> None:
    outcome = simulate(ALIKE, SIMPLE, 30 * DAY, seed=2)
    assert outcome.failures > 50
    assert outcome.seconds == pytest.approx(30 * DAY + outcome.lost_s + outcome.down_s + outcome.paused_s)


def test_spare_nodes_and_shrinking_save_the_wait_for_repairs() -> None:
    slow = replace(ALIKE, repair_s=8 * 3600.0)
    work = 10 * DAY
    waiting = seconds(slow, SIMPLE, work)
    assert seconds(replace(slow, spares=10), SIMPLE, work) < 0.8 * waiting
    assert seconds(slow, replace(SIMPLE, fewest_nodes=1), work) < 0.8 * waiting


def test_a_lost_rack_takes_all_of_its_nodes() -> None:
    racks = replace(ALIKE, rack=10, rack_share=1.0, repair_s=8 * 3600.0, spares=5)
    assert seconds(racks, SIMPLE, 5 * DAY, 10) > seconds(replace(racks, rack_share=0.0), SIMPLE, 5 * DAY, 10)


def test_unlike_nodes_fail_as_often_on_average() -> None:
    unlike = replace(ALIKE, count=20_000, failures_per_day=0.0005, spread=1.5)
    outcomes = [simulate(unlike, SIMPLE, 5 * DAY, seed) for seed in range(20)]
    per_day = sum(outcome.failures for outcome in outcomes) / sum(outcome.seconds / DAY for outcome in outcomes)
    assert per_day == pytest.approx(20_000 * 0.0005, rel=0.15)


def test_failures_of_the_run_cost_no_node() -> None:
    only_software = replace(ALIKE, failures_per_day=1e-12, run_failures_per_day=5.0, repair_s=30 * DAY)
    outcome = simulate(only_software, SIMPLE, 30 * DAY, seed=1)
    assert 100 < outcome.failures < 200
    restarts = outcome.failures * (SIMPLE.detect_s + SIMPLE.restart_s)
    assert outcome.down_s == pytest.approx(restarts)


def test_replacing_nodes_that_fail_often_leaves_those_that_do_not() -> None:
    unlike = replace(ALIKE, spread=1.5)

    def failures(nodes: Nodes) -> float:
        return float(np.mean([simulate(nodes, SIMPLE, 60 * DAY, seed).failures for seed in range(10)]))

    assert failures(replace(unlike, replaced_after=2)) < 0.7 * failures(unlike)
    assert failures(replace(ALIKE, replaced_after=2)) == pytest.approx(failures(ALIKE), rel=0.1)


def test_a_run_that_shrank_grows_again_and_loses_nothing_by_it() -> None:
    slow = replace(ALIKE, count=4, failures_per_day=0.5, repair_s=2 * 3600.0)
    elastic = replace(SIMPLE, fewest_nodes=1)
    outcomes = [simulate(slow, elastic, 10 * DAY, seed) for seed in range(10)]
    for outcome in outcomes:
        # A failure restarts the run twice: without the node, and with it again.
        assert outcome.down_s <= 2 * outcome.failures * (SIMPLE.detect_s + SIMPLE.restart_s)
        assert outcome.lost_s <= 1.5 * 3600 * outcome.failures


def test_the_best_interval_is_near_dalys_where_that_holds() -> None:
    found = best_interval(ALIKE, SIMPLE, 10 * DAY, range(20))
    assert 0.5 < found / daly_interval(SIMPLE.save_pause_s, DAY / 5) < 2


def test_a_run_that_hardly_gets_on_is_given_up() -> None:
    hopeless = replace(SIMPLE, save_interval_s=10 * DAY)
    assert simulate(replace(ALIKE, failures_per_day=1.0), hopeless, 10 * DAY, 1, most_s=100 * DAY).seconds == math.inf


def test_a_seed_gives_the_same_run() -> None:
    assert simulate(ALIKE, SIMPLE, 10 * DAY, 3) == simulate(ALIKE, SIMPLE, 10 * DAY, 3)
    assert simulate(ALIKE, SIMPLE, 10 * DAY, 3) != simulate(ALIKE, SIMPLE, 10 * DAY, 4)
