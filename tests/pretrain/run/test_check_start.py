"""A start does not begin again if its checkpoints are missing, and does not continue after the last step."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rank_jobs import refusal_at_start, refusal_of_worker, run_worker
from rank_pool import RankPool
from tiny_runs import SIZES, make_run
from worker_runs import newest, recipe, rows

from multihop.common.errors import UserError
from multihop.common.json_lines import append_row
from multihop.pretrain.checkpoint.owner import claim_checkpoints
from multihop.pretrain.run.check_start import check_checkpoints_exist

STEPS = 4


def begin(run_dir: Path, data: Path, location: Path | None) -> Path:
    quick = {"engine__data_workers": 0, "engine__heldout_samples": 4, "checkpoint__save_interval": 2}
    content = recipe(phases__0__steps=STEPS, checkpoint__location=location and str(location), **quick)
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "data").symlink_to(data)
    (run_dir / "recipe.json").write_text(json.dumps({"name": "run", **content}))
    return run_dir


@pytest.mark.ranks
def test_an_unmounted_volume_does_not_restart_the_run(
    pool: Callable[[int], RankPool], bert_data: Path, tmp_path: Path
) -> None:
    volume, away = tmp_path / "volume", tmp_path / "away"
    run_dir = begin(tmp_path / "run", bert_data, volume)
    assert pool(1).run(run_worker, run_dir) == [0]
    before = rows(run_dir)
    volume.rename(away)
    volume.mkdir()
    (said,) = pool(1).run(refusal_of_worker, run_dir)
    assert f"{volume}/run holds no checkpoints of {run_dir}" in said and f"rows up to step {STEPS}" in said
    assert "mount the volume or restore the checkpoints" in said
    assert rows(run_dir) == before and not list(volume.iterdir())  # the mount point is not claimed either
    volume.rmdir()
    away.rename(volume)
    assert pool(1).run(run_worker, run_dir) == [0] and rows(run_dir) == before


@pytest.mark.ranks
@pytest.mark.parametrize(("key", "value"), [("output_bias", "unigram"), ("word_init", "cooccurrences")])
def test_initial_values_of_weights_that_the_parent_provides_are_refused(
    pool: Callable[[int], RankPool], bert_data: Path, tmp_path: Path, key: str, value: str
) -> None:
    parent, child = make_run(tmp_path / "parent", bert_data, "bert"), begin(tmp_path / "child", bert_data, None)
    content = json.loads((child / "recipe.json").read_text())
    content["model"] |= {**SIZES, "init_from": str(parent), key: value}
    (child / "recipe.json").write_text(json.dumps(content))
    (said,) = pool(1).run(refusal_at_start, child)
    assert f"model.{key}={value} initializes new weights, but model.init_from={parent} provides them" in said


@pytest.mark.ranks
def test_phases_that_end_before_the_newest_checkpoint_are_refused(
    pool: Callable[[int], RankPool], bert_data: Path, tmp_path: Path
) -> None:
    run_dir = begin(tmp_path / "run", bert_data, None)
    assert pool(1).run(run_worker, run_dir) == [0]
    content = json.loads((run_dir / "recipe.json").read_text())
    content["phases"][0]["steps"] = 3
    (run_dir / "recipe.json").write_text(json.dumps(content))
    append_row(run_dir / "changes.jsonl", {"key": "phases[0].steps"})
    (said,) = pool(1).run(refusal_of_worker, run_dir)
    assert "is trained to step 4, and its phases now have 3 steps; raise phases[].steps to 4 or more" in said
    assert newest(run_dir) == STEPS


def test_a_run_without_a_committed_checkpoint_may_start_again(tmp_path: Path) -> None:
    run_dir, location = tmp_path, str(tmp_path / "volume" / "run")
    check_checkpoints_exist(run_dir, location)  # new
    claim_checkpoints(run_dir, location)
    append_row(run_dir / "launches.jsonl", {"step": 0})
    append_row(run_dir / "metrics.jsonl", {"step": 7, "loss": 1.0})
    check_checkpoints_exist(run_dir, location)  # killed before its first commit
    append_row(run_dir / "launches.jsonl", {"step": 5})
    with pytest.raises(
        UserError, match=r"launches\.jsonl has a launch from the checkpoint of step 5; mount the volume"
    ):
        check_checkpoints_exist(run_dir, location)
    (tmp_path / "volume" / "run" / "step-00000005.damaged-1a2b3c4d").mkdir()
    check_checkpoints_exist(run_dir, location)  # it is there, and set aside with a reason
