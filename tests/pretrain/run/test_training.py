"""Whole runs of the worker, as torchrun starts it: without Ray, without MLflow."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from without_extras import without_extras_and_compiler
from worker_runs import (
    STEPS,
    assert_same_state,
    checkpoint,
    finish,
    kill,
    log_of,
    losses,
    losses_of_step,
    newest,
    ranks_of,
    start,
    wait_until,
)

from multihop.pretrain.checkpoint.manifest import read_checkpoint_manifest
from multihop.pretrain.checkpoint.verify import newest_good, verify

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def test_a_run_leaves_what_the_design_names(in_one_go: Path) -> None:
    assert sorted(losses(in_one_go)) == list(range(1, STEPS + 1))
    rows = [json.loads(line) for line in (in_one_go / "metrics.jsonl").read_text().splitlines()]
    heldout = [row for row in rows if "heldout_loss" in row]
    assert [row["step"] for row in heldout] == [0, 4, 8]
    assert heldout[-1]["heldout_loss"] < heldout[0]["heldout_loss"]
    assert 0 < heldout[0]["unigram_loss"] < heldout[0]["uniform_loss"]
    assert all(0 < row[name] <= 1 for row in heldout for name in ("hidden_cosine", "hidden_rank", "attention_entropy"))
    assert (in_one_go / "logs" / "rank-1.log").exists()
    assert (in_one_go / "logs").stat().st_mode & 0o077 == 0
    manifest = verify(checkpoint(in_one_go))
    assert manifest.world_size == 2 and manifest.updates == STEPS and len(manifest.files) == 2
    parameters = sum(torch.Size(shape).numel() for shape in manifest.parameters.values())
    on_disk = sum(entry.bytes for entry in manifest.files)
    assert 12 * parameters <= on_disk < 12 * parameters + 32_768  # weight and two moments; the rest is names


def test_killed_without_warning_it_goes_on_bit_for_bit(in_one_go: Path, bert_data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    torchrun = start(run_dir, bert_data, 2)
    wait_until(lambda: newest(run_dir) > 0, torchrun)
    kill(torchrun)
    assert newest(run_dir) < STEPS
    finish(run_dir, bert_data, 2)
    assert losses(run_dir) == losses(in_one_go)
    for step in range(1, STEPS + 1):  # what was done twice was done alike
        assert len(losses_of_step(run_dir, step)) == 1
    assert_same_state(checkpoint(run_dir), checkpoint(in_one_go))


def test_a_changed_recipe_is_refused_by_the_worker_itself(in_one_go: Path, bert_data: Path, tmp_path: Path) -> None:
    recipe = json.loads((in_one_go / "recipe.json").read_text())
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "data").symlink_to(bert_data)
    for name in ("checkpoints", "identity"):
        (run_dir / name).symlink_to(in_one_go / name)
    recipe["optimizer"] = {"weight_decay": 0.5}
    (run_dir / "recipe.json").write_text(json.dumps(recipe))
    assert start(run_dir, bert_data, 1).wait(timeout=300) != 0
    assert "optimizer.weight_decay was 0.01, is 0.5" in log_of(run_dir)
    assert "--allow-change 'optimizer.weight_decay'" in log_of(run_dir)


def test_sigterm_to_one_rank_saves_and_ends_all_of_them_with_75(bert_data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    torchrun = start(run_dir, bert_data, 2, phases__0__steps=100_000, checkpoint__save_interval=100_000)
    wait_until(lambda: len(losses(run_dir)) > 0, torchrun)
    ranks = ranks_of(torchrun)
    assert len(ranks) == 2
    ranks[1].terminate()
    assert torchrun.wait(timeout=120) != 0 and not any(rank.is_running() for rank in ranks)
    assert (run_dir / "torchrun.log").read_text().count("exitcode  : 75 ") == 2
    assert newest(run_dir) == max(losses(run_dir)) > 0


def test_a_run_that_stays_not_finite_ends_with_the_steps_and_their_samples(bert_data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    changes = {
        "phases__0__lr": 1e30,
        "phases__0__warmup_ratio": 0.0,
        "engine__max_consecutive_nonfinite_steps": 3,
        "checkpoint__save_interval": 1,
    }
    assert start(run_dir, bert_data, 2, **changes).wait(timeout=300) != 0
    assert "3 consecutive steps, the last of them step 3, had a non-finite loss or gradient" in log_of(run_dir)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["skipped_step"] for row in rows if "skipped_step" in row] == [1, 2, 3]
    assert [(row["step"], row["skipped"], row["samples"]) for row in rows if "skipped_step" in row] == [
        (2, 1, 20),
        (3, 2, 30),
        (4, 3, 40),
    ]
    noted = [json.loads(line) for line in (run_dir / "skipped.jsonl").read_text().splitlines()]
    assert [row["step"] for row in noted] == [1, 2, 3] and all(len(row["samples"]) == 10 for row in noted)
    saved, _ = newest_good(str(run_dir / "checkpoints"))
    assert saved is not None and (saved.step, saved.updates, saved.skipped) == (3, 1, 2)


def test_a_silent_rank_is_dumped_and_ended(bert_data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    torchrun = start(run_dir, bert_data, 2, phases__0__steps=100_000, engine__hang_timeout_s=20.0)
    wait_until(lambda: len(losses(run_dir)) > 0, torchrun)
    ranks_of(torchrun)[1].suspend()
    try:
        wait_until(lambda: "Timeout (0:00:20)!" in log_of(run_dir, 0), None)
        assert "in train" in log_of(run_dir, 0)  # the stack of the rank that waited
    finally:
        kill(torchrun)


def test_steps_are_traced_when_somebody_asks(bert_data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, bert_data, 2)
    (run_dir / "trace").write_text("2\n")
    assert process.wait(timeout=300) == 0
    assert not (run_dir / "trace").exists()
    for rank in (0, 1):
        (trace,) = (run_dir / "logs").glob(f"trace-rank-{rank}-*.json")
        names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
        assert "aten::addmm" in names


def test_neither_ray_nor_mlflow_nor_a_tokenizer_is_loaded(bert_data: Path, tmp_path: Path) -> None:
    absent = ("ray", "mlflow", "sentencepiece", "tokenizers", "typer", "rich")
    look = f"import sys; print(sorted(m for m in {absent} if m in sys.modules))"
    command = [sys.executable, "-c", f"import multihop.pretrain.run.worker; {look}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1] == "[]"


def test_training_needs_no_extra_and_no_compiler(
    bert_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in without_extras_and_compiler(tmp_path).items():
        monkeypatch.setenv(name, value)
    refused = subprocess.run([sys.executable, "-c", "import mlflow"], capture_output=True, text=True)
    assert "import of mlflow halted" in refused.stderr
    for stage in (0, 2, 3):
        finish(tmp_path / str(stage), bert_data, 1, phases__0__steps=2, engine__zero_stage=stage)


def test_another_run_begins_with_the_weights_of_the_first(in_one_go: Path, bert_data: Path, tmp_path: Path) -> None:
    begun = finish(tmp_path / "child", bert_data, 2, model__init_from=str(in_one_go), phases__0__lr=1e-9)
    last = read_checkpoint_manifest(checkpoint(in_one_go))
    assert read_checkpoint_manifest(checkpoint(begun)).parent == last.content_hash()
    first_row = json.loads((begun / "metrics.jsonl").read_text().splitlines()[0])
    last_row = json.loads((in_one_go / "metrics.jsonl").read_text().splitlines()[-1])
    assert first_row["step"] == 0 and first_row["heldout_loss"] == pytest.approx(last_row["heldout_loss"], rel=1e-6)
    assert start(tmp_path / "wide", bert_data, 1, model__hidden=48, model__init_from=str(in_one_go)).wait() != 0
    assert "hidden=32, intermediate=128, and this run hidden=48, intermediate=192; set the same" in log_of(
        tmp_path / "wide"
    )


@pytest.mark.long
def test_the_micro_batch_that_fits_is_found(bert_data: Path, tmp_path: Path) -> None:
    changes = {"model__dropout": 0.0, "phases__0__global_batch_size": 12, "phases__0__steps": 2}
    given = finish(tmp_path / "given", bert_data, 2, engine__micro_batch_size=6, **changes)
    run_dir = finish(tmp_path / "auto", bert_data, 2, engine__micro_batch_size="auto", **changes)
    assert losses(run_dir) == losses(given)  # twelve small samples fit: a rank takes its six at once
    (found,) = json.loads((run_dir / "micro_batch.json").read_text()).values()
    assert found["samples"] == 6 and found["phases"]["seq_len"] == 48
