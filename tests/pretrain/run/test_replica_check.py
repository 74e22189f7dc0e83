"""Runs whose ranks no longer agree: stopped before the next save, and resumed from the last one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rank_jobs import message_of_own_folders, run_worker, run_worker_with_fault
from rank_pool import RankPool
from worker_runs import losses, newest, recipe

from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.pipeline.prepare import prepare
from multihop.pretrain.checkpoint.verify import newest_step

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


@pytest.mark.parametrize("fault", ["recipe", "data"])
def test_another_recipe_or_other_data_on_a_host_is_found_before_the_first_step(
    pool: Pool, run_dir: Path, texts: Path, tmp_path: Path, fault: str
) -> None:
    other = tmp_path / "other"
    (other / "logs").mkdir(parents=True)
    (run_dir / "recipe.json").write_text(json.dumps(recipe()))
    if fault == "recipe":
        (other / "recipe.json").write_text(json.dumps(recipe(optimizer__weight_decay=0.1)))
        (other / "data").symlink_to(run_dir / "data")
    else:
        (other / "recipe.json").write_text(json.dumps(recipe()))
        sources, tokenizer = [Source(path=str(texts))], TokenizerConfig(vocab_size=100)
        prepare(DataConfig(sources=sources, heldout_fraction=0.2), tokenizer, other / "data")
    for message in pool(2).run(message_of_own_folders, [run_dir, other]):
        assert "the ranks differ after step 0: rank 0 (" in message and f" has {fault} " in message
    assert newest_step(str(run_dir / "checkpoints")) is None


def test_hyperparameters_that_are_not_the_recipes_are_found_before_the_next_save(pool: Pool, run_dir: Path) -> None:
    (run_dir / "recipe.json").write_text(json.dumps(recipe()))
    for message in pool(2).run(run_worker_with_fault, run_dir, 4, "betas"):
        assert "does not have the recipe's hyperparameters after step 6: betas (0.9, 0.98) for (0.9, 0.999)" in message
    assert newest(run_dir) == 3
