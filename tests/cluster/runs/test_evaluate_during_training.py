"""`multihop eval --follow` next to `multihop train`, as users start them in two terminals."""

import json
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
import yaml
from workplace import Command, begin, ended, json_lines, make_workplace, multihop, wait_for

from multihop.pretrain.checkpoint.manifest import folder_of_step
from multihop.pretrain.checkpoint.verify import newest_step

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
STEPS = 80
FOLLOW = ("eval", "../recipe.yaml", "--runs", "../runs", "--follow")


@pytest.fixture
def workplace(texts: Path, tmp_path: Path) -> Path:
    """A folder with a recipe whose checkpoints are kept; the follower runs in its subfolder `beside`."""
    make_workplace(tmp_path, texts, "run", STEPS)
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    recipe |= {"eval": {"tasks": ["heldout-perplexity"], "seq_len": 64}, "cluster": {"workers": 1}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "beside").mkdir()
    return tmp_path


def train_a_part(workplace: Path) -> int:
    """Train until there is another checkpoint, and stop; returns the newest one's step."""
    checkpoints = str(workplace / "runs" / "run" / "checkpoints")
    before = newest_step(checkpoints) or 0
    command = begin(workplace, "train", "recipe.yaml")
    wait_for(lambda: (newest_step(checkpoints) or 0) > before, workplace, command)
    command.send_signal(signal.SIGINT)
    ended(workplace, command, 75)
    step = newest_step(checkpoints)
    assert step is not None and step < STEPS
    return step


def rows(workplace: Path) -> Counter[int | None]:
    """Return the number of rows by the checkpoint's step; None stands for random weights."""
    result = json_lines(workplace / "runs" / "run" / "eval" / "results.jsonl")
    assert all(row["status"] == "ok" for row in result)
    return Counter(row["checkpoint_step"] for row in result)


def wait_for_text(text: str, beside: Path, follower: Command) -> None:
    wait_for(lambda: text in (beside / "output.txt").read_text(), beside, follower)


def check_finished(workplace: Path, steps: set[int]) -> None:
    """Assert the state after `multihop run`, with the scores of earlier checkpoints in addition."""
    run = workplace / "runs" / "run"
    assert rows(workplace) == {None: 1, **dict.fromkeys(steps, 1)}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "done" and summary["steps"] == STEPS and {"prep", "train"} <= set(summary["stages"])
    assert "by the pretraining step of the checkpoint" in (run / "report.html").read_text()

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("multihop")
    assert experiment is not None
    nested = [result for result in client.search_runs([experiment.experiment_id]) if result.info.run_name != "run"]
    assert Counter(result.data.params["checkpoint_step"] for result in nested) == {
        "null": 1, **{str(step): 1 for step in steps}
    }  # fmt: skip
    [parent] = client.search_runs([experiment.experiment_id], "attributes.run_name = 'run'")
    assert parent.info.status == "FINISHED"
    assert {point.step for point in client.get_metric_history(parent.info.run_id, "loss")} == set(range(1, STEPS + 1))


@pytest.mark.long
def test_it_waits_for_checkpoints_and_ends_with_the_training(workplace: Path) -> None:
    beside, recipe = workplace / "beside", workplace / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("save_interval: 10", "save_interval: 40"))
    follower = begin(beside, *FOLLOW)
    wait_for_text("runs/run does not exist yet", beside, follower)
    multihop(workplace, "train", "recipe.yaml")
    output, steps = ended(beside, follower), {step for step in rows(workplace) if step is not None}
    assert all(f"step {step}: heldout-perplexity perplexity" in output for step in steps - {STEPS})
    check_finished(workplace, steps)


@pytest.mark.long
def test_it_continues_after_the_training_is_interrupted(workplace: Path) -> None:
    beside = workplace / "beside"
    follower = begin(beside, *FOLLOW)
    wait_for_text("runs/run does not exist yet", beside, follower)
    first = train_a_part(workplace)
    # The training ended in a signal: what is there is evaluated, and the rest is waited for.
    wait_for_text("no process trains", beside, follower)
    # It may have evaluated a checkpoint before that as well, if it was fast.
    wait_for(lambda: {None: 1, first: 1}.items() <= rows(workplace).items(), beside, follower)
    assert json.loads((workplace / "runs" / "run" / "summary.json").read_text())["status"] == "stopped"
    assert "pretrained for" in (workplace / "runs" / "run" / "report.md").read_text()
    multihop(workplace, "train", "recipe.yaml")
    output = ended(beside, follower)
    assert f"step {first}: heldout-perplexity perplexity" in output and "report    " in output
    assert {None, first, STEPS} <= set(rows(workplace))
    check_finished(workplace, {step for step in rows(workplace) if step is not None})


@pytest.mark.long
def test_killed_refused_and_beside_a_run_that_evaluates_itself(workplace: Path) -> None:
    beside, other = workplace / "beside", workplace / "other"
    other.mkdir()
    first = train_a_part(workplace)
    follower = begin(beside, *FOLLOW)
    wait_for_text(f"step {first}:", beside, follower)
    # Its checkpoint is removed before a trial has read it.
    shutil.rmtree(folder_of_step(str(workplace / "runs" / "run" / "checkpoints"), first))
    wait_for_text("was removed while it was evaluated", beside, follower)
    assert first not in rows(workplace)
    second = train_a_part(workplace)
    if second > first:
        wait_for(lambda: second in rows(workplace), beside, follower)
    assert "is in use by process" in multihop(other, *FOLLOW, code=2)
    follower.kill()
    follower.wait()
    before = rows(workplace)

    follower = begin(beside, *FOLLOW)
    wait_for_text("no process trains", beside, follower)
    if second in before:
        assert rows(workplace) == before
    multihop(workplace, "run", "recipe.yaml")
    ended(beside, follower)
    steps = {step for step in rows(workplace) if step is not None}
    assert {second, STEPS} <= steps
    check_finished(workplace, steps)
    assert "nothing left to do" in multihop(beside, *FOLLOW)


def test_a_model_from_elsewhere_and_another_recipe_are_refused(workplace: Path) -> None:
    output = multihop(workplace, "eval", "recipe.yaml", "--follow", "eval.checkpoint=/models/minilm", code=2)
    assert "--follow evaluates the checkpoints of the run" in output
    assert not (workplace / "runs").exists()
