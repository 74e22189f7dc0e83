"""Runs whose ranks no longer agree: stopped before the next save, and resumed from the last one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rank_jobs import run_worker, run_worker_with_fault
from rank_pool import RankPool
from worker_runs import losses, newest, recipe

pytestmark = pytest.mark.ranks
Pool = Callable[[int], RankPool]


@pytest.fixture
def run_dir(bert_data: Path, tmp_path: Path) -> Path:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "data").symlink_to(bert_data)
    return run


def test_a_flipped_bit_is_found_before_a_save_and_a_rerun_loses_only_the_steps_since(
    pool: Pool, run_dir: Path, in_one_go: Path
) -> None:
    (run_dir / "recipe.json").write_text(json.dumps(recipe(engine__replica_check_interval=1)))
    messages = pool(2).run(run_worker_with_fault, run_dir, 5, "weight")
    assert len(set(messages)) == 1 and "after step 5: layers.1.feed_forward.down.weight of ranks 0 (" in messages[0]
    assert newest(run_dir) == 3
    assert pool(2).run(run_worker, run_dir) == [0, 0]
    assert losses(run_dir) == losses(in_one_go)


def test_hyperparameters_that_are_not_the_recipes_are_found_before_the_next_save(pool: Pool, run_dir: Path) -> None:
    (run_dir / "recipe.json").write_text(json.dumps(recipe()))
    for message in pool(2).run(run_worker_with_fault, run_dir, 4, "betas"):
        assert "does not have the recipe's hyperparameters after step 6: betas (0.9, 0.98) for (0.9, 0.999)" in message
    assert newest(run_dir) == 3
