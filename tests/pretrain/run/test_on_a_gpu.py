"""Training on a GPU: the losses of a CPU, and resuming bit for bit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_runs import checkpoint, log_of, losses, recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
STEPS = 40
SIZES = {"layers": 2, "hidden": 64, "heads": 2, "max_positions": 64}
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}


def train(run_dir: Path, data: Path, environment: dict[str, str], **changes: Any) -> Path:
    """Run one rank as a worker in `run_dir`, which is made if there is none."""
    if not run_dir.exists():
        run_dir.mkdir()
        (run_dir / "data").symlink_to(data)
        (run_dir / "recipe.json").write_text(json.dumps(recipe(phases__0__steps=STEPS, **changes)))
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "multihop.pretrain.run.worker", str(run_dir)],
        env={**os.environ, **rank, "OMP_NUM_THREADS": "2", **environment},
        check=False,
    )
    assert done.returncode == 0, log_of(run_dir)
    return run_dir


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "muon"])
def test_the_losses_are_those_of_a_cpu(bert_data: Path, tmp_path: Path, optimizer: str) -> None:
    changes = {"model": {"family": "bert", **SIZES, "dropout": 0.0}, "optimizer__name": optimizer}
    here = losses(train(tmp_path / "cpu", bert_data, ON_CPU, **changes))
    there = losses(train(tmp_path / "gpu", bert_data, {}, **changes))
    narrow = losses(train(tmp_path / "bf16", bert_data, {}, engine__precision="bf16", **changes))
    # Muon iterates in bf16 on a GPU.
    assert there == pytest.approx(here, rel=1e-2 if optimizer == "muon" else 1e-4)
    assert narrow == pytest.approx(here, rel=2e-2)


RESUMED = [
    ("bert", "lamb", 1, "bf16", False),
    ("bert", "adamw", 0, "fp32", False),
    ("gpt2", "adamw", 2, "fp16", False),
    ("gpt2", "adamw", 1, "bf16", True),
    ("modernbert", "muon", 1, "bf16", True),
    ("modernbert-decoder", "muon", 3, "bf16", False),
]


@pytest.mark.parametrize(("family", "optimizer", "stage", "precision", "compiled"), RESUMED)
def test_a_deterministic_run_resumes_bit_for_bit(
    bert_data: Path,
    gpt2_data: Path,
    tmp_path: Path,
    family: str,
    optimizer: str,
    stage: int,
    precision: str,
    compiled: bool,
) -> None:
    causal = family in ("gpt2", "modernbert-decoder")
    data = gpt2_data if causal else bert_data
    changes: dict[str, Any] = {
        "model": {"family": family, **SIZES, "dropout": 0.1, **({"local_attention": 16} if "modern" in family else {})},
        "objective__name": "clm" if causal else ("mlm" if family == "modernbert" else "mlm+nsp"),
        "optimizer__name": optimizer,
        "engine__zero_stage": stage,
        "engine__precision": precision,
        "engine__compile": compiled,
        "engine__deterministic": True,
        "checkpoint": {"save_interval": STEPS // 2, "keep": 9},
    }
    through = train(tmp_path / "through", data, {}, **changes)
    resumed = tmp_path / "resumed"
    shutil.copytree(through, resumed, symlinks=True)
    (resumed / "metrics.jsonl").unlink()
    shutil.rmtree(checkpoint(resumed, STEPS))
    train(resumed, data, {})
    assert losses(resumed) == {step: loss for step, loss in losses(through).items() if step > STEPS // 2}
    ours, theirs = (sorted(Path(checkpoint(each, STEPS)).glob("*.safetensors")) for each in (through, resumed))
    assert len(ours) == len(theirs) == 1
    assert ours[0].read_bytes() == theirs[0].read_bytes()
