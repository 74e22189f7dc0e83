"""Whole runs of the worker, as torchrun starts it: without Ray, without MLflow."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoint import CheckpointReader, folder_of_step, load_weights, newest_step, verify

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]
STEPS = 8


def start(run_dir: Path, data: Path, ranks: int, **changes: Any) -> "subprocess.Popen[bytes]":
    recipe: dict[str, Any] = {
        "seed": 5,
        "model": {"family": "bert", "layers": 2, "hidden": 32, "heads": 2, "max_positions": 64, "dropout": 0.1},
        "objective": {"name": "mlm+nsp"},
        "phases": [{"seq_len": 48, "batch_size": 10, "steps": STEPS, "lr": 1e-3}],
        "engine": {"deepspeed": {}, "zero_stage": 1, "micro_batch": 2, "log_every": 1, "evaluate_every": 4},
        "checkpoint": {"every_steps": 3, "keep": 9},
    }
    for path, value in changes.items():
        part = recipe
        *parents, last = path.split("__")
        for parent in parents:
            part = part.setdefault(parent, {})
        part[last] = value
    if not (run_dir / "recipe.json").exists():
        run_dir.mkdir()
        (run_dir / "data").symlink_to(data)
        (run_dir / "recipe.json").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "-m", "pretrain.worker", str(run_dir)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def finish(run_dir: Path, data: Path, ranks: int, **changes: Any) -> Path:
    code = start(run_dir, data, ranks, **changes).wait(timeout=300)
    assert code == 0, (run_dir / "logs" / "rank-0.log").read_text()
    return run_dir


def losses(run_dir: Path) -> dict[int, float]:
    """The first row of each step wins."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in reversed(rows) if "loss" in row}


def rows_of_step(run_dir: Path, step: int) -> list[float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["step"] == step and "loss" in row]


def assert_same_state(one: Path, other: Path) -> None:
    for name in ("rank-0000.safetensors", "rank-0001.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.fixture(scope="module")
def in_one_go(bert_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finish(tmp_path_factory.mktemp("whole") / "run", bert_data, 2)


def test_a_run_leaves_what_the_design_names(in_one_go: Path) -> None:
    assert sorted(losses(in_one_go)) == list(range(1, STEPS + 1))
    rows = [json.loads(line) for line in (in_one_go / "metrics.jsonl").read_text().splitlines()]
    heldout = [row for row in rows if "heldout_loss" in row]
    assert [row["step"] for row in heldout] == [0, 4, 8]
    assert heldout[-1]["heldout_loss"] < heldout[0]["heldout_loss"]
    assert 0 < heldout[0]["unigram_loss"] < heldout[0]["uniform_loss"]
    assert (in_one_go / "logs" / "rank-1.log").exists()
    manifest = verify(folder_of_step(in_one_go / "checkpoints", STEPS))
    assert manifest.world_size == 2 and manifest.updates == STEPS and len(manifest.files) == 2
    parameters = sum(torch.Size(shape).numel() for shape in manifest.parameters.values())
    on_disk = sum(entry.bytes for entry in manifest.files)
    assert 12 * parameters <= on_disk < 12 * parameters + 32_768  # weight and two moments; the rest is names


def test_killed_without_warning_it_goes_on_bit_for_bit(in_one_go: Path, bert_data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ranks = start(run_dir, bert_data, 2)
    while newest_step(run_dir / "checkpoints") is None:
        assert ranks.poll() is None
        time.sleep(0.02)
    os.killpg(ranks.pid, signal.SIGKILL)
    ranks.wait()
    time.sleep(0.5)
    finish(run_dir, bert_data, 2)
    assert losses(run_dir) == losses(in_one_go)
    for step in range(1, STEPS + 1):  # what was done twice was done alike
        assert len(set(rows_of_step(run_dir, step))) == 1
    last = folder_of_step(Path("checkpoints"), STEPS)
    assert_same_state(run_dir / last, in_one_go / last)


def stopped_after_a_step(run_dir: Path, data: Path, **changes: Any) -> Path:
    """A run of two ranks that was asked to stop before its first step."""
    process = start(run_dir, data, 2, **changes)
    (run_dir / "stop").touch()
    process.wait(timeout=300)
    (run_dir / "stop").unlink()
    assert newest_step(run_dir / "checkpoints") == 1
    return run_dir


def test_asked_to_stop_it_saves_and_goes_on_bit_for_bit(in_one_go: Path, bert_data: Path, tmp_path: Path) -> None:
    run_dir = stopped_after_a_step(tmp_path / "run", bert_data)
    finish(run_dir, bert_data, 2)
    assert losses(run_dir) == losses(in_one_go)


def test_any_number_of_ranks_and_any_stage_give_the_same_losses(bert_data: Path, tmp_path: Path) -> None:
    runs = {
        (ranks, stage, micro_batch): finish(
            tmp_path / f"{ranks}-{stage}-{micro_batch}",
            bert_data,
            ranks,
            model__dropout=0.0,
            engine__zero_stage=stage,
            engine__micro_batch=micro_batch,
        )
        for ranks, stage, micro_batch in [(1, 0, 10), (1, 1, 3), (2, 0, 4), (2, 2, 2), (3, 1, 2)]
    }
    reference = losses(runs[1, 0, 10])
    for run_dir in runs.values():
        for step, loss in losses(run_dir).items():
            assert loss == pytest.approx(reference[step], rel=2e-5), run_dir.name


def test_a_run_goes_on_with_another_number_of_ranks(bert_data: Path, tmp_path: Path) -> None:
    whole = finish(tmp_path / "whole", bert_data, 1, model__dropout=0.0)
    run_dir = stopped_after_a_step(tmp_path / "resumed", bert_data, model__dropout=0.0)
    finish(run_dir, bert_data, 1)
    assert losses(run_dir) == pytest.approx(losses(whole), rel=2e-5)
    ours, theirs = (load_weights(folder_of_step(run / "checkpoints", STEPS)) for run in (run_dir, whole))
    for name, tensor in theirs.items():
        if not name.endswith("attention.key.bias"):  # its gradient is rounding noise, which Adam makes large
            torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=2e-5)


def test_causal_models_train_and_resume_in_bf16_too(gpt2_data: Path, tmp_path: Path) -> None:
    changes = {
        "model__family": "gpt2",
        "objective__name": "clm",
        "engine__precision": "bf16",
        "checkpoint__every_steps": 4,
    }
    whole = finish(tmp_path / "whole", gpt2_data, 2, **changes)
    run_dir = stopped_after_a_step(tmp_path / "resumed", gpt2_data, **changes)
    finish(run_dir, gpt2_data, 2)
    assert losses(run_dir) == losses(whole)
    with CheckpointReader(folder_of_step(run_dir / "checkpoints", STEPS)) as reader:
        weight = reader.read("weight", "word.weight", 0, 100)
        assert not torch.equal(weight, weight.bfloat16().float())  # the master weights, not their rounding


def test_a_changed_recipe_is_refused_by_the_worker_itself(in_one_go: Path, bert_data: Path, tmp_path: Path) -> None:
    recipe = json.loads((in_one_go / "recipe.json").read_text())
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "data").symlink_to(bert_data)
    (run_dir / "checkpoints").symlink_to(in_one_go / "checkpoints")
    recipe["optimizer"] = {"weight_decay": 0.5}
    (run_dir / "recipe.json").write_text(json.dumps(recipe))
    assert start(run_dir, bert_data, 1).wait(timeout=300) != 0
    assert "was trained with another recipe" in (run_dir / "logs" / "rank-0.log").read_text()
