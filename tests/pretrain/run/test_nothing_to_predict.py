"""Steps and held-out samples in which no token is predicted, for example because no whole word fits the masks."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import refusal_of_worker, run_worker
from rank_pool import RankPool
from worker_runs import checkpoint, losses, recipe, rows

from multihop.common.json_lines import read_rows
from multihop.data_prep.config import DataConfig, Source, TokenizerConfig

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]
Pool = Callable[[int], RankPool]
STEPS = 24


@pytest.fixture(scope="module")
def long_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of sentences without spaces, of 60 characters."""
    from multihop.data_prep.pipeline.prepare import prepare

    folder, rng = tmp_path_factory.mktemp("long-words"), random.Random(1)
    characters = [chr(0x4E00 + number) for number in range(60)]
    for number in range(60):
        sentences = ["".join(rng.choices(characters, k=rng.randint(12, 40))) + "。" for _ in range(rng.randint(2, 8))]
        (folder / f"{number:03d}.txt").write_text("".join(sentences))
    sources = [Source(path=str(folder), language="zh")]
    tokens = TokenizerConfig.model_validate({"vocab_size": 100, "special_tokens": "bert"})
    prepare(DataConfig(sources=sources, heldout_fraction=0.1), tokens, folder / "set")
    return folder / "set"


def begin(run_dir: Path, data: Path, **changes: Any) -> Path:
    quick = {"engine__data_workers": 0, "engine__heldout_samples": 64, "checkpoint__keep": 99, "model__dropout": 0.0}
    content = recipe(**{**quick, "objective__masking": "words", **changes})
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "data").symlink_to(data)
    (run_dir / "recipe.json").write_text(json.dumps(content))
    return run_dir


def short_samples(run_dir: Path, data: Path, batch_size: int, **changes: Any) -> Path:
    """Make a run with samples of eight tokens, of which each has one word of one token to predict, or none."""
    sizes = {"phases__0__seq_len": 8, "phases__0__global_batch_size": batch_size, "phases__0__steps": STEPS}
    return begin(run_dir, data, **sizes, checkpoint__save_interval=1, engine__micro_batch_size=1, **changes)


def test_held_out_samples_without_a_target_are_refused_at_the_start(
    pool: Pool, long_words: Path, tmp_path: Path
) -> None:
    run_dir = begin(tmp_path / "run", long_words, objective__name="mlm")
    said = pool(2).run(refusal_of_worker, run_dir)
    assert said[0] == said[1] and "has a token to predict: with objective.masking=words" in said[0]
    assert not rows(run_dir)


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.long), 3])
def test_a_step_without_a_target_changes_no_weights_and_counts_as_skipped(
    pool: Pool, bert_data: Path, tmp_path: Path, stage: int
) -> None:
    run_dir = short_samples(tmp_path / "run", bert_data, 1, objective__name="mlm", engine__zero_stage=stage)
    assert pool(2).run(run_worker, run_dir) == [0, 0]
    empty = [row["skipped_step"] for row in rows(run_dir) if "skipped_step" in row]
    assert 0 < len(empty) < STEPS / 2 and rows(run_dir)[-1]["skipped"] == len(empty)
    assert sorted(losses(run_dir)) == [step + 1 for step in range(STEPS) if step not in empty]
    noted = read_rows(run_dir / "skipped.jsonl")
    assert [(row["step"], row["loss"], len(row["samples"])) for row in noted] == [(each, "0.0", 1) for each in empty]
    for step in range(1, STEPS):
        before, after = (
            [file.read_bytes() for file in sorted(Path(checkpoint(run_dir, each)).glob("*.safetensors"))]
            for each in (step, step + 1)
        )
        assert (before == after) == (step in empty)


def test_ranks_without_a_target_train_with_ranks_that_have_some(pool: Pool, bert_data: Path, tmp_path: Path) -> None:
    both, alone = (short_samples(tmp_path / name, bert_data, 4, objective__name="mlm") for name in ("both", "alone"))
    assert pool(2).run(run_worker, both) == [0, 0] and pool(1).run(run_worker, alone) == [0]
    assert losses(alone) == pytest.approx(losses(both), rel=1e-5) and len(losses(alone)) == STEPS


def test_pairs_of_segments_are_trained_on_where_no_token_is_masked(pool: Pool, bert_data: Path, tmp_path: Path) -> None:
    run_dir = short_samples(tmp_path / "run", bert_data, 1, objective__name="mlm+nsp")
    assert pool(2).run(run_worker, run_dir) == [0, 0]
    without = [row for row in rows(run_dir) if row.get("mlm_loss") == 0.0]
    assert without and all(row["loss"] == row["nsp_loss"] > 0 and row["grad_norm"] > 0 for row in without)
    assert rows(run_dir)[-1]["skipped"] == 0 and len(losses(run_dir)) == STEPS
