"""The law of order: batch(step) = f(seed, data fingerprint, phases, step)."""

import tracemalloc
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_order import samples_of_step

from multihop.common.counter_rng import key_of, mix, permute, random_bits, uniform
from multihop.common.errors import UserError
from multihop.pretrain.config import PhaseConfig, RampSegment
from multihop.pretrain.data.order import MIXTURE_BLOCK, GlobalBatchIds, quotas
from multihop.pretrain.data.phases import (
    batch_size_of,
    is_skipped,
    locate,
    micro_steps,
    samples_before,
    share_of_rank,
    total_steps,
)

KEYS = st.integers(0, 2**64 - 1)


def uint64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def everywhere(size: int, key: int) -> np.ndarray:
    return permute(np.arange(size, dtype=np.uint64), size, key).astype(np.int64)


# Keyed randomness


def test_permutation_of_every_small_size_is_a_bijection() -> None:
    for size in range(1, 3001):
        assert (np.bincount(everywhere(size, key_of("test", size)), minlength=size) == 1).all(), size


@given(size=st.integers(1, 5000), key=KEYS)
def test_permutation_is_a_bijection_under_every_key(size: int, key: int) -> None:
    assert (np.bincount(everywhere(size, key), minlength=size) == 1).all()


@given(size=st.integers(2, 10**12) | st.sampled_from([4**19, 4**19 + 1, 4**19 - 1, 10**12]), key=KEYS, data=st.data())
def test_permutation_of_any_size_keeps_apart_what_was_apart(size: int, key: int, data: st.DataObject) -> None:
    around = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    positions = {0, 1, size // 2, size - 2, size - 1, *around, *(p + 1 for p in around), *(p - 1 for p in around)}
    within = sorted(p for p in positions if 0 <= p < size)
    out = permute(np.array(within, np.uint64), size, key)
    assert out.max() < size
    assert len(set(out.tolist())) == len(within)


@pytest.mark.parametrize("size", [100, 256, 300])
def test_each_position_goes_everywhere_alike_over_the_keys(size: int) -> None:
    keys = 40 * size
    tested = [0, 1, size // 2, size - 1]
    hits = np.zeros((len(tested), size))
    for number in range(keys):
        hits[np.arange(len(tested)), permute(uint64(*tested), size, key_of("uniform", number)).astype(int)] += 1
    chi_square = ((hits - 40) ** 2 / 40).sum(1)
    # The keys are fixed: this cannot flake. Six standard deviations of a chi-square of size - 1 degrees of freedom.
    assert (np.abs(chi_square - (size - 1)) < 6 * np.sqrt(2 * (size - 1))).all(), chi_square


def test_the_first_positions_of_a_huge_permutation_spread_evenly() -> None:
    size, buckets, drawn = 10**12, 256, 2**16
    for number in range(4):
        out = permute(np.arange(drawn, dtype=np.uint64), size, key_of("buckets", number))
        hits = np.bincount((out // np.uint64(-(-size // buckets))).astype(np.int64), minlength=buckets)
        chi_square = ((hits - drawn / buckets) ** 2 / (drawn / buckets)).sum()
        assert abs(chi_square - (buckets - 1)) < 6 * np.sqrt(2 * (buckets - 1)), chi_square
        steps = np.diff(out.astype(np.int64))
        assert abs((steps > 0).mean() - 0.5) < 0.02  # neighbors are unrelated


def test_permutations_of_different_keys_are_unrelated() -> None:
    one, other = everywhere(10_000, 1), everywhere(10_000, 2)
    assert (one == other).sum() < 10  # one in expectation
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.05


def test_random_bits_do_not_depend_on_their_neighbors() -> None:
    counters = np.arange(1000, dtype=np.uint64)
    together = random_bits(7, counters)
    assert random_bits(7, counters[500:501])[0] == together[500]
    assert abs(uniform(together).mean() - 0.5) < 0.05
    assert len(np.unique(together)) == 1000


def test_what_was_ever_drawn_is_drawn_again() -> None:
    """A run that is resumed with a newer version must get the samples of the version that began it."""
    assert key_of("order", 1, "data", 0, 0) == 14552676260579057088
    assert (key_of("1"), key_of(1), key_of()) == (17053916692260034925, 9950253934438416052, 1449310910991872227)
    assert mix(uint64(0, 1, 2**64 - 1)).tolist() == [0, 6238072747940578789, 13029008266876403067]
    drawn = [236966933211079599, 12966676493058619558, 12275787116616016603]
    assert random_bits(7, uint64(0, 1, 10**12)).tolist() == drawn
    assert uniform(uint64(*drawn[:2])).tolist() == [0.012846003189733946, 0.7029249411845438]
    assert everywhere(8, 1).tolist() == [2, 0, 7, 1, 6, 3, 4, 5]
    assert permute(uint64(0, 1, 999), 1000, 2**64 - 1).tolist() == [695, 335, 241]
    assert permute(uint64(0, 1, 10**12 - 1), 10**12, 3).tolist() == [193671453264, 632683085078, 483535915968]
    assert permute(uint64(0, 2**62 - 1), 2**62, 5).tolist() == [3179322976246588323, 2622128487127100280]
    phases = [PhaseConfig(steps=100, global_batch_size=6, batch_ramp=[RampSegment(steps=2, global_batch_size=3)])]
    alone = samples_of_step(1, "data", phases, [[10]], 5)
    assert (alone.samples.tolist(), alone.epochs.tolist()) == ([3, 2, 0, 8, 9, 1], [2] * 6)
    mixed = samples_of_step(1, "data", phases, [[10, 4, 7]], 5, [1.0, 0.5, 0.5])
    assert mixed.sources.tolist() == [1, 0, 2, 2, 1, 1]
    assert (mixed.samples.tolist(), mixed.epochs.tolist()) == ([11, 2, 14, 20, 10, 10], [1, 1, 0, 0, 1, 2])


# Phases and ramps


@st.composite
def phase_lists(draw: st.DrawFn, largest_batch: int = 12, longest: int = 8) -> list[PhaseConfig]:
    phases, first = [], 0
    for _ in range(draw(st.integers(1, 3))):
        ramp = draw(
            st.lists(
                st.builds(RampSegment, steps=st.integers(1, 3), global_batch_size=st.integers(1, largest_batch)),
                max_size=3,
            )
        )
        steps = sum(stage.steps for stage in ramp) + draw(st.integers(1, longest))
        skipped = draw(st.lists(st.integers(first, first + steps - 1), max_size=2))
        batch_size = draw(st.integers(1, largest_batch))
        phases.append(PhaseConfig(steps=steps, global_batch_size=batch_size, batch_ramp=ramp, skip_steps=skipped))
        first += steps
    return phases


@given(phases=phase_lists())
def test_closed_forms_agree_with_counting(phases: list[PhaseConfig]) -> None:
    expected = [
        (number, step, size)
        for number, phase in enumerate(phases)
        for step, size in enumerate(
            [stage.global_batch_size for stage in phase.batch_ramp for _ in range(stage.steps)]
            + [phase.global_batch_size] * (phase.steps - sum(stage.steps for stage in phase.batch_ramp))
        )
    ]
    assert total_steps(phases) == len(expected)
    used = 0
    for step, (number, within, size) in enumerate(expected):
        assert locate(phases, step) == (number, within)
        assert batch_size_of(phases[number], within) == size
        assert samples_before(phases, step) == used
        assert is_skipped(phases, step) == any(step in phase.skip_steps for phase in phases)
        used += size
    assert samples_before(phases, len(expected)) == used


def test_steps_that_are_not_there_are_refused() -> None:
    phases = [PhaseConfig(steps=10), PhaseConfig(steps=20)]
    assert locate(phases, 9) == (0, 9)
    assert locate(phases, 10) == (1, 0)
    for ask in (locate, is_skipped):
        with pytest.raises(UserError, match="step must be < 30"):
            ask(phases, 30)
        with pytest.raises(UserError, match="step must be >= 0, got -1"):
            ask(phases, -1)
    for step in (-1, 31):
        with pytest.raises(UserError, match=f"step must be between 0 and 30, got {step}"):
            samples_before(phases, step)


@given(batch_size=st.integers(1, 300), world_size=st.integers(1, 7), micro_batch=st.integers(1, 64))
def test_ranks_share_a_step_out_without_gap_or_overlap(batch_size: int, world_size: int, micro_batch: int) -> None:
    shares = [share_of_rank(batch_size, rank, world_size) for rank in range(world_size)]
    assert [i for share in shares for i in range(share.start, share.stop)] == list(range(batch_size))
    sizes = [share.stop - share.start for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert micro_steps(batch_size, world_size, micro_batch) == -(-max(sizes) // micro_batch)


# Which samples


def walked(phases: list[PhaseConfig], sizes: list[list[int]], **given: Any) -> list[GlobalBatchIds]:
    return [samples_of_step(1, "data", phases, sizes, step, **given) for step in range(total_steps(phases))]


@given(size=st.integers(1, 60), phases=phase_lists(largest_batch=40, longest=20))
def test_each_epoch_of_each_phase_uses_each_sample_once(size: int, phases: list[PhaseConfig]) -> None:
    seen: dict[tuple[int, int], list[int]] = {}
    for step, chosen in enumerate(walked(phases, [[size]] * len(phases))):
        number, within = locate(phases, step)
        assert (chosen.phase, len(chosen.samples)) == (number, batch_size_of(phases[number], within))
        assert not chosen.sources.any()
        for sample, epoch in zip(chosen.samples.tolist(), chosen.epochs.tolist(), strict=True):
            seen.setdefault((number, epoch), []).append(sample)
    for number, phase in enumerate(phases):
        used = samples_before([phase], phase.steps)
        for epoch in range(-(-used // size)):
            whole = epoch < used // size
            assert len(seen[number, epoch]) == (size if whole else used % size)
            assert len(set(seen[number, epoch])) == len(seen[number, epoch])
        if size > 10 and used >= 2 * size:
            assert seen[number, 0] != seen[number, 1]


@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12))
def test_quotas_follow_the_weights_and_fill_a_block(weights: list[float]) -> None:
    shares = quotas(tuple(weights))
    assert sum(shares) == MIXTURE_BLOCK and min(shares) >= 1
    total = sum(map(Fraction, weights))
    for weight, share in zip(weights, shares, strict=True):
        ideal = Fraction(weight) / total * MIXTURE_BLOCK
        assert abs(share - ideal) < 1 + len(weights)  # what sources too small for one position take from the others
        assert (
            min(ideal for ideal in [Fraction(w) / total * MIXTURE_BLOCK for w in weights]) < 1 or abs(share - ideal) < 1
        )


def test_quotas_of_plain_weights_are_exact() -> None:
    assert quotas((1.0, 3.0)) == (MIXTURE_BLOCK // 4, 3 * MIXTURE_BLOCK // 4)
    assert quotas((10.0, 30.0)) == quotas((1.0, 3.0))
    assert quotas((1.0,) * 3) == (21846, 21845, 21845)
    assert quotas((1e-12, 1.0)) == (1, MIXTURE_BLOCK - 1)


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(300, 40_000), min_size=1, max_size=4),
    parts=st.lists(st.floats(0.01, 10.0), min_size=4, max_size=4),
    batch_size=st.sampled_from([4096, 8192, 16384]),
)
def test_sources_keep_their_weights_and_count_their_own_epochs(
    sizes: list[int], parts: list[float], batch_size: int
) -> None:
    weights, blocks = parts[: len(sizes)], 2
    phases = [PhaseConfig(steps=blocks * MIXTURE_BLOCK // batch_size, global_batch_size=batch_size)]
    steps = walked(phases, [sizes], weights=weights)
    sources, samples, epochs = (
        np.concatenate([getattr(s, name) for s in steps]) for name in ("sources", "samples", "epochs")
    )
    for block in range(blocks):
        in_block = sources[block * MIXTURE_BLOCK : (block + 1) * MIXTURE_BLOCK]
        assert np.bincount(in_block, minlength=len(sizes)).tolist() == list(quotas(tuple(weights)))
    starts = np.cumsum([0, *sizes])
    for source, size in enumerate(sizes):
        own, of_epoch = samples[sources == source] - starts[source], epochs[sources == source]
        assert own.min() >= 0 and own.max() < size
        assert (of_epoch == np.arange(len(own)) // size).all()  # in the source's own order, one epoch after the other
        for epoch in (0, len(own) // size - 1):
            if len(own) >= (epoch + 1) * size > 0:
                assert (np.bincount(own[of_epoch == epoch], minlength=size) == 1).all()


def test_a_source_of_one_sample_gives_it_again_and_again() -> None:
    steps = walked([PhaseConfig(steps=20, global_batch_size=8)], [[1, 500]], weights=[1.0, 1.0])
    drawn = np.concatenate([s.epochs[s.sources == 0] for s in steps])
    assert drawn.tolist() == list(range(len(drawn))) and len(drawn) > 50
    assert all((s.samples[s.sources == 0] == 0).all() and (s.samples[s.sources == 1] >= 1).all() for s in steps)


def test_any_stretch_of_a_mixed_stream_is_mixed() -> None:
    phases = [PhaseConfig(steps=100, global_batch_size=256)]
    counts = [np.bincount(s.sources, minlength=2) for s in walked(phases, [[10**6, 10**6]], weights=[1.0, 3.0])]
    assert abs(np.mean(counts, axis=0)[0] - 64) < 3
    assert max(count[0] for count in counts) < 100


def test_a_step_depends_on_what_the_law_names_and_on_nothing_else() -> None:
    phases = [PhaseConfig(global_batch_size=8, steps=10), PhaseConfig(global_batch_size=4, steps=10)]

    def batch(
        seed: int = 1, fingerprint: str = "data", step: int = 3, sizes: list[int] | None = None, weights: Any = None
    ) -> list[int]:
        of_phases = [sizes or [1000]] * 2
        return samples_of_step(seed, fingerprint, phases, of_phases, step, weights).samples.tolist()

    assert batch() == batch()
    assert batch() != batch(seed=2)
    assert batch() != batch(fingerprint="other")
    assert batch() != batch(step=4)
    assert batch(step=0)[:4] != batch(step=10)
    mixed = {"sizes": [1000, 1000], "weights": [1.0, 1.0]}
    assert batch(**mixed) == batch(sizes=[1000, 1000], weights=[5.0, 5.0])
    assert batch(**mixed) != batch(sizes=[1000, 1000], weights=[1.0, 5.0])
    assert batch(**mixed) != batch(**mixed, seed=2) and batch(step=0, **mixed)[:4] != batch(step=10, **mixed)


def test_skipping_a_step_changes_no_other() -> None:
    plain = [PhaseConfig(steps=9, global_batch_size=5)]
    skipping = [PhaseConfig(steps=9, global_batch_size=5, skip_steps=[2, 3])]
    for one, other in zip(walked(plain, [[17]]), walked(skipping, [[17]]), strict=True):
        assert (one.samples == other.samples).all() and (one.epochs == other.epochs).all()
    assert samples_before(plain, 9) == samples_before(skipping, 9)


@pytest.mark.parametrize("weights", [None, [1.0, 2.0]])
def test_a_far_step_costs_what_the_first_costs(weights: list[float] | None) -> None:
    ramp = [RampSegment(steps=10**9, global_batch_size=64)]
    phases = [PhaseConfig(global_batch_size=256, steps=2 * 10**9, batch_ramp=ramp) for _ in range(3)]
    sizes = [[10**12] if weights is None else [10**12, 10**9]] * 3

    def peak(step: int) -> int:
        tracemalloc.start()
        try:
            chosen = samples_of_step(1, "data", phases, sizes, step, weights)
            is_skipped(phases, step), samples_before(phases, step)
            return tracemalloc.get_traced_memory()[1] // len(chosen.samples)
        finally:
            tracemalloc.stop()

    peak(5), peak(10**9 - 1)  # what is computed once, and blocks of a mixture
    first, far = peak(0), peak(10**9)
    assert far < first + 2**20
    last = samples_of_step(1, "data", phases, sizes, 6 * 10**9 - 1, weights)
    assert last.phase == 2 and Counter(last.epochs.tolist()).total() == 256
    assert samples_before(phases, 6 * 10**9) == 3 * (64 + 256) * 10**9
