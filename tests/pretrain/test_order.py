"""The law of order: batch(step) = f(seed, data fingerprint, phases, step)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.config import PhaseConfig
from pretrain.keyed import key_of, permute, random_bits, uniform
from pretrain.order import locate, micro_steps, samples_of_step, share_of_rank, total_steps
from pretrain.schedule import learning_rate

KEYS = st.integers(0, 2**64 - 1)


@given(size=st.integers(1, 5000), key=KEYS)
def test_permutation_is_a_bijection(size: int, key: int) -> None:
    out = permute(np.arange(size, dtype=np.uint64), size, key)
    assert sorted(out.tolist()) == list(range(size))


@given(size=st.integers(2, 10**12), key=KEYS, data=st.data())
def test_permutation_of_any_size_keeps_apart_what_was_apart(size: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=50, unique=True))
    out = permute(np.array(positions, np.uint64), size, key)
    assert out.max() < size
    assert len(set(out.tolist())) == len(positions)


def test_permutations_of_different_keys_are_unrelated_and_uniform() -> None:
    size, keys = 100, 4000
    hits = np.zeros((size, size))
    for key in range(keys):
        hits[np.arange(size), permute(np.arange(size, dtype=np.uint64), size, key_of("test", key)).astype(int)] += 1
    expected = keys / size
    chi_square = ((hits - expected) ** 2 / expected).sum() / (size - 1) ** 2
    assert 0.95 < chi_square < 1.05  # one in expectation; its deviation here is sqrt(2) / 99


def test_random_bits_do_not_depend_on_their_neighbours() -> None:
    counters = np.arange(1000, dtype=np.uint64)
    together = random_bits(7, counters)
    assert random_bits(7, counters[500:501])[0] == together[500]
    assert abs(uniform(together).mean() - 0.5) < 0.05
    assert len(np.unique(together)) == 1000


def phases_of(batch_sizes: list[int], steps: list[int]) -> list[PhaseConfig]:
    return [PhaseConfig(batch_size=b, steps=s) for b, s in zip(batch_sizes, steps, strict=True)]


@given(size=st.integers(1, 60), batch_size=st.integers(1, 40), seed=st.integers(0, 5))
def test_each_epoch_uses_each_sample_once(size: int, batch_size: int, seed: int) -> None:
    epochs = 3
    phases = phases_of([batch_size], [-(-size * epochs // batch_size)])
    seen: dict[int, list[int]] = {}
    for step in range(total_steps(phases)):
        chosen = samples_of_step(seed, "data", phases, [size], step)
        assert len(chosen.samples) == batch_size
        for sample, epoch in zip(chosen.samples.tolist(), chosen.epochs.tolist(), strict=True):
            seen.setdefault(epoch, []).append(sample)
    for epoch in range(epochs):
        assert sorted(seen[epoch]) == list(range(size))
    if size > 10:
        assert seen[0] != seen[1]


@given(batch_size=st.integers(1, 300), world_size=st.integers(1, 7), micro_batch=st.integers(1, 64))
def test_ranks_share_a_step_out_without_gap_or_overlap(batch_size: int, world_size: int, micro_batch: int) -> None:
    shares = [share_of_rank(batch_size, rank, world_size) for rank in range(world_size)]
    assert [i for share in shares for i in range(share.start, share.stop)] == list(range(batch_size))
    largest = max(share.stop - share.start for share in shares)
    assert micro_steps(batch_size, world_size, micro_batch) == -(-largest // micro_batch)


def test_a_step_depends_on_what_the_law_names_and_on_nothing_else() -> None:
    phases = phases_of([8, 4], [10, 10])

    def batch(seed: int = 1, fingerprint: str = "data", step: int = 3) -> list[int]:
        return samples_of_step(seed, fingerprint, phases, [1000, 1000], step).samples.tolist()

    assert batch() == batch()
    assert batch() != batch(seed=2)
    assert batch() != batch(fingerprint="other")
    assert batch() != batch(step=4)
    assert batch(step=0)[:4] != batch(step=10)


def test_a_far_step_is_had_without_the_steps_before_it() -> None:
    far = samples_of_step(1, "data", phases_of([256], [2 * 10**9]), [10**12], 10**9)
    assert len(set(far.samples.tolist())) == 256


def test_phases_follow_one_another_and_warm_up_anew() -> None:
    phases = [PhaseConfig(steps=10, lr=1.0, warmup=0.2), PhaseConfig(steps=20, lr=0.5, warmup=0.1, schedule="cosine")]
    assert locate(phases, 9) == (0, 9)
    assert locate(phases, 10) == (1, 0)
    with pytest.raises(ValueError, match="step 30 lies behind"):
        locate(phases, 30)
    rates = [learning_rate(phases, step) for step in range(30)]
    assert rates[0] == 0.5 and rates[1] == rates[2] == 1.0
    assert rates[10] == 0.25 and rates[11] == 0.5
    assert 0 < rates[9] < 0.2 and 0 < rates[29] < 0.01


@settings(max_examples=30)
@given(step=st.integers(0, 99), schedule=st.sampled_from(["linear", "cosine", "constant"]))
def test_rates_stay_within_zero_and_the_highest(step: int, schedule: str) -> None:
    phase = PhaseConfig.model_validate({"steps": 100, "lr": 2.0, "schedule": schedule})
    assert 0 < learning_rate([phase], step) <= 2.0
