"""What may change in the recipe of a run that has begun, and what the user has to allow by name."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from workplace import Command, begin, ended, json_lines, losses, make_workplace, multihop, wait_for

from multihop.data_prep.dataset.manifest import read_data_manifest
from multihop.pretrain.checkpoint.verify import newest_step

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(600)]
STEPS = 240
TRAIN = ("train", "recipe.yaml")


@pytest.fixture(scope="module")
def stopped(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workplace with a run that was stopped after some steps."""
    folder = tmp_path_factory.mktemp("stopped")
    shutil.copytree(texts, folder / "texts")
    workplace = make_workplace(folder, Path("texts"), "run", STEPS)
    stop_after_a_row(workplace, begin(workplace, *TRAIN, "tokenizer.sample_mb=0.02"))
    return workplace


@pytest.fixture
def workplace(stopped: Path, tmp_path: Path) -> Path:
    """A copy of the stopped workplace for each test."""
    return shutil.copytree(stopped, tmp_path / "workplace", symlinks=True)


def stop_after_a_row(workplace: Path, command: Command) -> None:
    before = len(losses(run_in(workplace)))
    wait_for(lambda: len(losses(run_in(workplace))) > before, workplace, command)
    command.send_signal(signal.SIGINT)
    assert "stopped; rerun the same command to resume" in ended(workplace, command, 75)
    assert 0 < saved(workplace) < STEPS


def run_in(workplace: Path) -> Path:
    return workplace / "runs" / "run"


def saved(workplace: Path) -> int:
    return newest_step(str(run_in(workplace) / "checkpoints")) or 0


def state(workplace: Path) -> dict[str, bytes]:
    run = run_in(workplace)
    names = ("recipe.json", "changes.jsonl", "metrics.jsonl", "launches.jsonl")
    return {name: (run / name).read_bytes() for name in names if (run / name).exists()}


def strip(recipe: dict[str, Any]) -> dict[str, Any]:
    """Remove the keys that were added after the first version."""
    for section, key in [
        ("optimizer", "max_trust_ratio"),
        ("optimizer", "name"),
        ("engine", "offload"),
        ("engine", "hang_timeout_s"),
        ("engine", "max_consecutive_nonfinite_steps"),
        ("checkpoint", "keep_every"),
        ("checkpoint", "location"),
        ("model", "init_from"),
    ]:
        del recipe[section][key]
    for key in ("batch_ramp", "skip_steps", "lr_scaling", "warmup_steps", "power", "decay_ratio", "min_lr_ratio"):
        del recipe["phases"][0][key]
    return recipe


def test_changes_are_refused_or_allowed_by_name_or_free(workplace: Path) -> None:
    run, train = run_in(workplace), (*TRAIN, "tokenizer.sample_mb=0.02")
    before, decay = state(workplace), "optimizer.weight_decay=0.05"
    refused = multihop(workplace, *train, decay, code=2)
    assert "optimizer.weight_decay was 0.01, is 0.05" in refused
    assert "--allow-change 'optimizer.weight_decay'" in refused
    allowing_another = multihop(workplace, *train, decay, "--allow-change", "optimizer.betas", code=2)
    assert "optimizer.weight_decay was 0.01, is 0.05" in allowing_another
    fixed = multihop(workplace, *train, "model.hidden=64", "--allow-change", "model.hidden", code=2)
    assert "model.hidden was 32, is 64" in fixed and "--allow-change" not in fixed and "set name=" in fixed
    assert state(workplace) == before

    first = saved(workplace)
    stop_after_a_row(workplace, begin(workplace, *train, decay, "--allow-change", "optimizer.weight_decay"))
    (row,) = json_lines(run / "changes.jsonl")
    assert row["key"] == "optimizer.weight_decay" and row["changed"] == [["optimizer.weight_decay", 0.01, 0.05]]
    assert json.loads((run / "recipe.json").read_text())["optimizer"]["weight_decay"] == 0.05

    # Allowed once it is so for good; what an older version wrote has the new keys' defaults; the engine is free.
    second = saved(workplace)
    recipe = json.loads((run / "recipe.json").read_text())
    (run / "recipe.json").write_text(json.dumps(strip(recipe)))
    engine = ("engine.zero_stage=3", "engine.micro_batch_size=3", "engine.offload=optimizer", "cluster.workers=1")
    multihop(workplace, *train, decay, *engine)
    starts = [(row["step"], row["world_size"]) for row in json_lines(run / "launches.jsonl")]
    assert starts == [(0, 2), (first, 2), (second, 1)]
    assert sorted(losses(run)) == list(range(1, STEPS + 1)) and saved(workplace) == STEPS
    now = json.loads((run / "recipe.json").read_text())
    assert (now["engine"]["zero_stage"], now["engine"]["offload"], now["cluster"]["workers"]) == (3, "optimizer", [1])
    assert len(json_lines(run / "changes.jsonl")) == 1


def test_changed_texts_are_refused_or_allowed_and_another_tokenizer_is_not(workplace: Path) -> None:
    run, train, texts = run_in(workplace), (*TRAIN, "tokenizer.sample_mb=0.02"), workplace / "texts"
    tokenizer = read_data_manifest(run / "data").tokenizer.sha256
    originals = {path: path.read_text() for path in sorted(texts.iterdir())[:100]}
    for path in originals:
        path.write_text("Quick zebras vex jumpy wolves. " * 30 + path.name)
    before, refused = state(workplace), multihop(workplace, *train, code=2)
    assert "the texts of runs/run changed, and with them the tokenizer" in refused and "--allow" not in refused
    assert state(workplace) == before
    assert "with them the tokenizer" in multihop(workplace, *train, "--allow-change", "data", code=2)
    assert state(workplace)["metrics.jsonl"] == before["metrics.jsonl"]

    # Another document, too late in the order of hashes for the tokenizer to be trained on it.
    for path, text in originals.items():
        path.write_text(text)
    (texts / "another.txt").write_text("The river of the other valley. A stone in the garden. Winter and summer.")
    assert "add --allow-change data" in multihop(workplace, *train, "name=run", code=2)
    assert read_data_manifest(run / "data").tokenizer.sha256 == tokenizer
    first = saved(workplace)
    multihop(workplace, *train, "--allow-change", "data")
    assert [row["step"] for row in json_lines(run / "launches.jsonl")][-1] == first
    assert sorted(losses(run)) == list(range(1, STEPS + 1)) and saved(workplace) == STEPS
    assert {row["key"] for row in json_lines(run / "changes.jsonl")} == {"data"}
