"""engine.micro_batch_size=auto: how much memory a sample takes, from two micro-batches."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from rank_jobs import found_micro_batches
from rank_pool import RankPool
from worker_runs import recipe

from multihop.pretrain.engine.micro_batch import CACHE_FILE, fit_memory


def measured(a_sample: float, alone: float, limit: int) -> tuple[Callable[[int], float], list[int]]:
    """Return a device on which `limit` samples fit, and the list of sizes that were tried."""
    tried: list[int] = []

    def bytes_of(size: int) -> float:
        tried.append(size)
        if size > limit:
            raise torch.OutOfMemoryError(f"{size} samples")
        return alone + a_sample * size

    return bytes_of, tried


@given(
    a_sample=st.floats(1e3, 1e9),
    alone=st.floats(0, 1e9),
    seq_len=st.sampled_from([32, 128, 512, 2048, 65_536]),
    share=st.integers(2, 5_000),
    limit=st.integers(2, 5_000),
)
@example(a_sample=1000.0, alone=2.0, seq_len=32, share=3, limit=2)
def test_the_line_through_two_measurements(a_sample: float, alone: float, seq_len: int, share: int, limit: int) -> None:
    bytes_of, tried = measured(a_sample, alone, limit)
    found = fit_memory(bytes_of, seq_len, share, "cuda")
    assert found == pytest.approx((a_sample, alone), rel=1e-6, abs=1e-3 * a_sample)
    assert max(tried) <= share, "a micro-batch larger than a rank's share of a step never runs"
    most = max(size for size in tried if size <= limit)
    assert most * seq_len >= min(16_384, share * seq_len // 2, limit * seq_len // 4), "too few tokens tell nothing"


def test_one_sample_is_measured_alone_where_a_share_has_no_two() -> None:
    bytes_of, tried = measured(7e6, 2e6, 1)
    assert fit_memory(bytes_of, 128, 1, "cuda") == (9e6, 0.0) and tried == [1]


def test_a_sample_that_does_not_fit_takes_more_than_all_memory() -> None:
    bytes_of, tried = measured(1.0, 0.0, 0)
    assert fit_memory(bytes_of, 512, 100, "cuda") == (float("inf"), 0.0)
    assert tried == [64, 32, 16, 8, 4, 2, 1]


def test_two_micro_batches_of_equal_memory_are_no_measurement() -> None:
    bytes_of, _ = measured(0.0, 2e6, 1_000)
    assert fit_memory(bytes_of, 128, 100, "cuda")[0] == 0.0


@pytest.mark.ranks
def test_a_ramp_does_not_change_bytes_per_sample_and_the_key_covers_what_does(
    pool: Callable[[int], RankPool], bert_data: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "data").symlink_to(bert_data)
    phase = {"seq_len": 16, "global_batch_size": 64, "steps": 9}

    def found(**changes: Any) -> list[dict[str, Any]]:
        """Return what is stored after a start with this recipe; the newest measurement is the last."""
        content = recipe(engine__micro_batch_size="auto", objective__name="mlm", **changes)
        (run_dir / "recipe.json").write_text(json.dumps(content))
        (sizes,) = pool(1).run(found_micro_batches, run_dir)
        assert all(1 <= size <= 64 for size in sizes)
        return list(json.loads((run_dir / CACHE_FILE).read_text()).values())

    (ramped,) = found(phases=[{**phase, "batch_ramp": [{"steps": 2, "global_batch_size": 8}]}])
    (run_dir / CACHE_FILE).unlink()
    (plain,) = found(phases=[phase])
    assert plain["bytes_per_sample"] == ramped["bytes_per_sample"] > 16 * 100
    for number, changes in enumerate(
        (
            {"phases": [{**phase, "seq_len": 48}]},
            {"phases": [phase], "engine__precision": "bf16"},
            {"phases": [phase], "engine__zero_stage": 2},
            {"phases": [phase], "engine__activation_checkpointing": "full"},
            {"phases": [phase], "model__layers": 3},
            {"phases": [phase], "objective__mask_rate": 0.5},
        )
    ):
        assert len(found(**changes)) == 2 + number
        assert len(found(**changes)) == 2 + number
    assert {"memory", "torch", "vocabularies", "device", "world_size"} < set(plain)

    # What other processes leave may be less than at an earlier start: then it is measured again.
    entries = json.loads((run_dir / CACHE_FILE).read_text())
    too_large = {key: {**entry, "fitting": 10**12, "bytes_per_sample": 1e12} for key, entry in entries.items()}
    (run_dir / CACHE_FILE).write_text(json.dumps(too_large))
    assert found(phases=[phase])[0]["fitting"] < 10**12 or found(phases=[phase])[-1]["fitting"] < 10**12
