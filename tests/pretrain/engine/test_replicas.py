"""The comparison of what is equal on all ranks."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from rank_jobs import checksums_of_initial_state, message_of_check, message_of_installed
from rank_pool import RankPool

from multihop.pretrain.engine.replicas import fletcher, words

Pool = Callable[[int], RankPool]
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
INTEGERS = st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64])


def settings(stage: int, precision: str = "fp32", persistent: bool = True) -> dict[str, Any]:
    zero = {} if persistent else {"stage3_param_persistence_threshold": 0}
    return {
        "seed": 5,
        "model": {
            "family": "bert", "layers": 2, "hidden": 16, "heads": 2, "intermediate": 32, "max_positions": 16,
            "dropout": 0.0,
        },
        "objective": {"name": "mlm+nsp"},
        "phases": [{"seq_len": 16, "global_batch_size": 4, "steps": 4, "lr": 1e-2}],
        "optimizer": {"name": "adamw", "betas": (0.9, 0.999)},
        "engine": {
            "zero_stage": stage, "precision": precision, "deepspeed": {"zero_optimization": zero} if zero else {},
        },
    }  # fmt: skip


@given(st.integers(0, 2**32 - 1), st.integers(0, 3000), INTEGERS)
def test_the_checksum_is_fletchers(seed: int, size: int, dtype: torch.dtype) -> None:
    integers = torch.from_numpy(np.random.default_rng(seed).integers(-(2**63), 2**63, size)).to(dtype)
    sums = [sum(integers.tolist()), sum(number * each for number, each in enumerate(integers.tolist(), start=1))]
    assert fletcher(integers).tolist() == [(each + 2**63) % 2**64 - 2**63 for each in sums]


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 5), max_size=3), DTYPES, st.integers(0, 9))
def test_the_words_of_a_tensor_are_its_bytes(seed: int, shape: list[int], dtype: torch.dtype, start: int) -> None:
    rng = np.random.default_rng(seed)
    storage = torch.from_numpy(rng.integers(-(2**62), 2**62, start + math.prod(shape))).to(dtype)
    tensor = storage[start:].view(shape)
    before = tensor.clone()
    for each in (tensor, tensor.mT) if tensor.dim() > 1 else (tensor, tensor.reshape(-1)[::2]):
        whole = each.clone(memory_format=torch.contiguous_format).view(-1)
        content = whole.view(torch.uint8).numpy().tobytes() if each.numel() else b""
        found = words(each).numpy().tobytes()
        assert found == content + bytes(-len(content) % 4)
    assert torch.equal(tensor, before)


@example(0, 1, 31, 5, 31)  # with words of 64 bits, these two would cancel in both sums
@given(st.integers(0, 2**32 - 1), st.integers(0, 99), st.integers(0, 31), st.integers(0, 99), st.integers(0, 31))
def test_one_or_two_flipped_bits_and_two_exchanged_elements_change_it(
    seed: int, at: int, bit: int, other: int, other_bit: int
) -> None:
    integers = torch.from_numpy(np.random.default_rng(seed).integers(-(2**31), 2**31, 100, np.int32))

    def flipped(*places: tuple[int, int]) -> torch.Tensor:
        changed = integers.numpy().copy()
        for place, which in places:
            changed[place] ^= np.array(1 << which, np.uint32).astype(np.int32)
        return torch.from_numpy(changed)

    exchanged = integers.clone()
    exchanged[[at, other]] = exchanged[[other, at]]
    checksums: list[Callable[[torch.Tensor], torch.Tensor]] = [fletcher, lambda tensor: fletcher(words(tensor))]
    for checksum in checksums:
        before = checksum(integers).tolist()
        assert checksum(flipped((at, bit))).tolist() != before
        if (at, bit) != (other, other_bit):
            assert checksum(flipped((at, bit), (other, other_bit))).tolist() != before
        assert (checksum(exchanged).tolist() == before) == torch.equal(exchanged, integers)


def test_long_tensors() -> None:
    long = torch.arange(2**22 + 3, dtype=torch.int32)
    size = len(long)
    # The sum of the numbers below size, and that of number * (number + 1), modulo 2^64.
    second = (size - 1) * size * (size + 1) // 3
    assert fletcher(long).tolist() == [size * (size - 1) // 2, (second + 2**63) % 2**64 - 2**63]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("stage", "precision", "fault"),
    [
        (0, "fp32", "layers.1.feed_forward.down.weight"),
        (0, "fp32", "exp_avg_sq of layers.0.attention.query.weight"),
        (1, "fp32", "layers.1.feed_forward.down.weight"),
        (1, "bf16", "word.weight"),
        (2, "bf16", "layers.0.attention.output.bias"),
        (3, "fp32", "layers.1.feed_forward.down.weight"),
    ],
)
def test_a_flipped_bit_of_one_rank_is_found_and_named(pool: Pool, stage: int, precision: str, fault: str) -> None:
    messages = pool(3).run(message_of_check, settings(stage, precision), fault)
    assert len(set(messages)) == 1 and f"after step 1: {fault} of rank 1 (" in messages[0]
    assert "more differences" not in messages[0]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("precision", "fault", "named"),
    [
        ("fp32", "betas", "(0.9, 0.98) for (0.9, 0.999)"),
        ("fp32", "step", "step 2, the others 1"),
        ("fp16", "loss_scale", "has loss_scale 2.0, the others 65536.0"),
    ],
)
def test_other_hyperparameters_or_counters_of_one_rank_are_found(
    pool: Pool, precision: str, fault: str, named: str
) -> None:
    messages = pool(3).run(message_of_check, settings(1, precision), fault)
    assert len(set(messages)) == 1 and "rank 1 (" in messages[0] and named in messages[0]


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_that_agree_raise_no_alarm(pool: Pool, stage: int) -> None:
    for each in (settings(stage), settings(stage, "bf16" if stage else "fp32", persistent=False)):
        assert pool(3).run(message_of_check, each, "none") == [None] * 3


@pytest.mark.ranks
def test_checksums_of_the_state_do_not_depend_on_how_ranks_divide_it(pool: Pool) -> None:
    found = {
        sums
        for ranks, stage in ((1, 1), (2, 0), (3, 1), (3, 2), (3, 3))
        for sums in pool(ranks).run(checksums_of_initial_state, settings(stage, persistent=False))
    }
    (sums,) = found
    assert pool(1).run(checksums_of_initial_state, {**settings(1), "seed": 6}) != [sums]


@pytest.mark.ranks
def test_of_two_ranks_neither_is_blamed(pool: Pool) -> None:
    messages = pool(2).run(message_of_check, settings(1), "layers.1.feed_forward.down.weight")
    assert "layers.1.feed_forward.down.weight of ranks 0 (" in messages[0] and ", 1 (" in messages[0]


@pytest.mark.ranks
def test_other_libraries_on_one_rank_are_the_users_mistake(pool: Pool) -> None:
    assert pool(3).run(message_of_installed, False) == [None] * 3
    for message in pool(3).run(message_of_installed, True):
        assert "rank 2 (" in message and 'has torch "1.0", the others "2.' in message
