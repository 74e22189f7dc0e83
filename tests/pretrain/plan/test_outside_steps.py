"""Saves, held-out evaluation, making batches and offloading, against cases that are computed by hand."""

from collections import Counter

import pytest

from multihop.common.gpus import GPUS
from multihop.pretrain.config import OptimizerConfig
from multihop.pretrain.objectives.config import OBJECTIVES, ObjectiveConfig
from multihop.pretrain.objectives.read_rates import read_tokens_per_s
from multihop.pretrain.plan.collectives import Links, links_of
from multihop.pretrain.plan.outside_steps import (
    Saves,
    checkpoint_bytes,
    count_due,
    count_evaluations,
    evaluated_samples,
    host_rate,
    offload_s,
    seconds_of_saves,
    whole_step,
)
from multihop.pretrain.plan.rank_trace import HostTraffic, RankTrace
from multihop.pretrain.plan.step_time import Efficiency, StepTime

SHAPES = {"token_embedding.weight": (10, 4), "layers.0.mlp.weight": (8, 4), "layers.0.mlp.bias": (8,)}
H100 = GPUS["H100"]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("adamw", 12 * (40 + 32 + 8)),
        ("lamb", 12 * (40 + 32 + 8)),
        ("muon", 12 * (40 + 8) + 8 * 32),  # a matrix of a layer has one moment
    ],
)
def test_a_checkpoint_has_weights_and_moments_in_fp32(name: str, size: int) -> None:
    assert checkpoint_bytes(OptimizerConfig.model_validate({"name": name}), SHAPES) == size


def test_copies_share_pcie_and_the_memory_of_the_host() -> None:
    alone, eight, two_nodes = links_of(H100, 1), links_of(H100, 8), links_of(H100, 8, 4, 100.0)
    assert host_rate(H100, alone, 0.8) == 0.8 * 64e9
    assert host_rate(H100, eight, 0.8) == 100e9 / 8 and host_rate(H100, two_nodes, 0.8) == 100e9 / 2
    assert host_rate(GPUS["A100 80GB"], alone, 1.0) == 32e9 and host_rate(GPUS["V100 16GB"], alone, 1.0) == 16e9
    assert host_rate(GPUS["L4"], alone, 1.0) == GPUS["L4"].link == 32e9


def test_due_are_the_multiples_of_the_interval_and_the_end() -> None:
    assert count_due(0, 1000, 200, 1000) == 5  # the last one is both
    assert count_due(0, 1001, 200, 1001) == 6
    assert count_due(0, 199, 200, 400) == 0 and count_due(199, 201, 200, 400) == 2
    assert count_due(0, 10, 200, 10) == 1  # the interval is longer than the run
    assert count_evaluations(0, 1000, 200, 1000) == 6 and count_evaluations(1000, 100, 200, 1100) == 1


def test_a_save_is_a_pause_and_the_last_one_is_waited_for() -> None:
    # 1 s a step, after 200, 400 and 500 steps: three pauses, and 30 s until the last one is committed.
    assert seconds_of_saves(Saves(200, 2.0, 30.0), [(500, 500.0)], 500) == [3 * 2.0 + 30.0]
    # The interval is longer than the run: one save at its end. One at step 500 is the last.
    assert seconds_of_saves(Saves(1000, 2.0, 30.0), [(500, 500.0)], 500) == [32.0]
    assert seconds_of_saves(Saves(500, 2.0, 30.0), [(500, 500.0)], 500) == [32.0]


def test_training_waits_if_a_save_takes_longer_than_the_interval() -> None:
    # Written in 30 s, begun every 10: each of the four that follow the first waits for 20, the last commit is waited
    # for 30.
    assert seconds_of_saves(Saves(10, 2.0, 30.0), [(50, 50.0)], 50) == [5 * 2.0 + 4 * 20.0 + 30.0]
    # The last save, 5 steps after the one before, waits for 25.
    assert seconds_of_saves(Saves(10, 2.0, 30.0), [(15, 15.0)], 15) == [2 * 2.0 + 25.0 + 30.0]


def test_a_save_of_a_phase_is_written_in_the_next_ones() -> None:
    saves = Saves(100, 1.0, 90.0)
    # In the first phase a save after 100 of 120 steps of 1 s; 20 s later 70 s of its writing are left. The next one
    # is due 80 steps of 0.5 s later and waits for 30 s; that at the end, 50 steps of 0.5 s later, for 65.
    assert seconds_of_saves(saves, [(120, 120.0), (130, 65.0)], 250) == pytest.approx(
        [1.0, (1.0 + 30.0) + (1.0 + 65.0) + 90.0]
    )
    # A phase without a save, of 10 s, in between; the last one begins 70 steps of 0.5 s later.
    assert seconds_of_saves(saves, [(120, 120.0), (10, 10.0), (70, 35.0)], 200) == pytest.approx(
        [1.0, 0.0, 25.0 + 1.0 + 90.0]
    )


def test_held_out_samples_are_evaluated_whole_by_source_and_in_part() -> None:
    assert evaluated_samples(512, 8, 1) == [64, 4]
    assert evaluated_samples(512, 8, 3) == [64, 4, 22, 22, 22]
    assert evaluated_samples(512, 8, 17) == [64, 4]  # too many sources
    assert evaluated_samples(1, 8, 1) == [1, 1]


def test_masking_by_units_is_slower_to_read_and_every_objective_has_a_rate() -> None:
    rates = {name: read_tokens_per_s(ObjectiveConfig.model_validate({"name": name})) for name in OBJECTIVES}
    assert all(1e6 < rate < 1e7 for rate in rates.values())
    words = {name: read_tokens_per_s(ObjectiveConfig(name=name, masking="words")) for name in ("mlm", "mlm+sop", "clm")}
    assert words["mlm"] == words["mlm+sop"] < rates["mlm+sop"] and words["clm"] == rates["clm"]


def trace(*traffic: HostTraffic) -> RankTrace:
    return RankTrace({}, {}, {}, [], Counter(), Counter(), list(traffic[:-1]), traffic[-1], HostTraffic())


def test_offloading_is_copies_and_the_update_on_the_host() -> None:
    first, last, update = HostTraffic(1000, 10), HostTraffic(3000, 50), HostTraffic(6000, 4000)
    alone = Links(1, 1, H100.link, True, 0.0)
    copied, accessed = 1000 + 4 * 3000 + 6000, 10 + 4 * 50 + 4000
    assert offload_s(trace(first, last, update), 5, H100, alone, Efficiency()) == pytest.approx(
        copied / (0.8 * 64e9) + accessed / 100e9
    )
    # Of two ranks of a node each has half of the memory's bandwidth, which is less than PCIe's.
    assert offload_s(trace(last, update), 1, H100, links_of(H100, 2), Efficiency()) == pytest.approx(
        9000 / 50e9 + 4050 / 50e9
    )
    assert offload_s(trace(HostTraffic(), HostTraffic()), 3, H100, alone, Efficiency()) == 0.0


COMPUTED = StepTime(0.6, 0.1, 0.2, 0.0, 0.3, 0.9)
UPDATE = StepTime(0.0, 0.0, 0.1, 0.0, 0.01, 0.9)


def test_a_step_takes_no_less_than_its_batch() -> None:
    assert whole_step(COMPUTED, UPDATE, 0.0, 0.5, 1) == (pytest.approx(1.0), "matrix products")
    assert whole_step(COMPUTED, UPDATE, 0.0, 3.0, 1) == (pytest.approx(3.0), "reading")
    assert whole_step(COMPUTED, UPDATE, 0.0, 3.0, 4) == (pytest.approx(1.0), "matrix products")
    assert whole_step(COMPUTED, UPDATE, 0.0, 6.0, 4) == (pytest.approx(1.5), "reading")


def test_without_data_workers_the_rank_reads_between_its_launches_and_the_update() -> None:
    # The GPU computes for 0.9 s; meanwhile the rank launches for 0.3 s and has 0.6 s for the batch.
    assert whole_step(COMPUTED, UPDATE, 0.0, 0.6, 0) == (pytest.approx(1.0), "matrix products")
    assert whole_step(COMPUTED, UPDATE, 0.0, 0.65, 0) == (pytest.approx(1.05), "reading")
    assert whole_step(COMPUTED, UPDATE, 0.0, 3.0, 0) == (pytest.approx(0.3 + 3.0 + 0.1), "reading")


def test_offloading_adds_to_the_step_and_may_be_its_largest_part() -> None:
    assert whole_step(COMPUTED, UPDATE, 0.5, 0.0, 1) == (pytest.approx(1.5), "matrix products")
    assert whole_step(COMPUTED, UPDATE, 0.7, 0.0, 1) == (pytest.approx(1.7), "offload")
    assert whole_step(COMPUTED, UPDATE, 0.7, 3.0, 2) == (pytest.approx(1.7), "offload")
