"""`multihop run` as a user types it: from text to a table of results, without and with all kinds of faults."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from worker_runs import assert_same_state
from workplace import losses, ranks_of

from multihop.cluster.locks import HOLDER
from multihop.cluster.tracking.connection import connect, store_uri
from multihop.common.json_lines import read_rows
from multihop.eval.statistics.formatting import show
from multihop.pretrain.checkpoint.manifest import folder_of_step
from multihop.pretrain.checkpoint.verify import newest_step, verify

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
STEPS = 80
CHECKPOINTS_EVERY = 10


@pytest.fixture(scope="module")
def workplace(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, as a user has it."""
    folder = tmp_path_factory.mktemp("workplace")
    recipe = {
        "name": "whole",
        "data": {"sources": [{"path": str(texts)}], "heldout_fraction": 0.1},
        "tokenizer": {"vocab_size": 100, "special_tokens": "gpt2"},
        "model": {"family": "gpt2", "layers": 2, "hidden": 64, "heads": 2, "max_positions": 64},
        "objective": {"name": "clm"},
        "phases": [{"seq_len": 64, "global_batch_size": 32, "steps": STEPS, "lr": 2e-3}],
        "engine": {"deepspeed": {}, "micro_batch_size": 8, "log_interval": 5, "eval_interval": 40},
        "checkpoint": {"save_interval": CHECKPOINTS_EVERY, "keep": 2},
        "eval": {"tasks": ["heldout-perplexity"], "seeds": [0], "seq_len": 64, "examples": ["The river"]},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def start(workplace: Path, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
    """Start `multihop ARGUMENTS` from an environment whose path has characters that a shell interprets."""
    environment = workplace / 'Jo\'s $HOME, "Önyx" (\\)'
    if not environment.exists():
        environment.symlink_to(sys.prefix)
    return subprocess.Popen(
        [environment / "bin" / Path(sys.executable).name, "-m", "multihop.cluster.cli.main", *arguments],
        cwd=workplace,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src"), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def multihop(workplace: Path, *arguments: str, code: int = 0, **variables: str) -> str:
    process = start(workplace, *arguments, **variables)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == code, output
    return output


@pytest.fixture(scope="module")
def whole(workplace: Path) -> Path:
    """An uninterrupted run of a user whose home directory is not writable."""
    multihop(workplace, "run", "recipe.yaml", HOME="/dev/null", LC_ALL="C")
    return workplace / "runs" / "whole"


def results(run: Path) -> list[tuple[str, str, float, str]]:
    rows = [json.loads(line) for line in (run / "eval" / "results.jsonl").read_text().splitlines()]
    return sorted((row["task"], row["init"], row["value"], row["key"]) for row in rows)


def test_a_run_leaves_its_files_and_a_truthful_summary(whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["status"] == "done" and summary["steps"] == STEPS
    assert summary["heldout_loss"] == summary["heldout_clm_loss"] < summary["unigram_loss"] < summary["uniform_loss"]
    assert set(summary["stages"]) == {"prep", "train", "eval"}
    assert verify(folder_of_step(str(whole / "checkpoints"), STEPS)).world_size == 2
    assert "whole" in (whole / "report.md").read_text()
    assert 'aria-label="clm_loss by step on training and held-out text' in (whole / "report.html").read_text()
    assert {init for _, init, _, _ in results(whole)} == {"pretrained", "random"}
    assert not (whole / "stop").exists() and not (whole / ".ray-train").exists()


def test_mlflow_has_one_run_with_nested_trials(whole: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{whole.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("multihop")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    parent = runs["whole"]
    assert parent.info.status == "FINISHED" and parent.data.params["model.layers"] == "2"
    nested = [run for run in runs.values() if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(nested) == 2
    history = client.get_metric_history(parent.info.run_id, "loss")
    assert {point.step: point.value for point in history} == losses(whole)
    assert verify(folder_of_step(str(whole / "checkpoints"), STEPS)).mlflow_run_id == parent.info.run_id
    artifacts = {"report.html", "report.md", "recipe.json", "summary.json", "results.jsonl"}
    assert artifacts <= {file.path for file in client.list_artifacts(parent.info.run_id)}
    [first] = json.loads(parent.data.tags["multihop.launches"])
    assert {key: first[key] for key in ("launch", "step", "ranks", "nodes")} == {
        "launch": 1, "step": 0, "ranks": 2, "nodes": 1,
    }  # fmt: skip
    assert 0 < parent.data.metrics["system/peak_memory_gb"] < 100 and parent.data.metrics["system/cpu_cores"] > 0


def test_it_compares_alike_with_its_directory_elsewhere(workplace: Path, whole: Path) -> None:
    tables = [
        multihop(workplace, "compare", "whole", "whole", *options)
        for options in ((), ("--runs", "elsewhere", "--tracking", f"sqlite:///{whole.parent / 'mlflow.db'}"))
    ]
    assert tables[0] == tables[1] and f"{STEPS}" in tables[0]


def test_run_again_it_does_nothing(workplace: Path, whole: Path) -> None:
    def state() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file() and path.name != ".lock"}

    before = state()
    assert "nothing left to do" in multihop(workplace, "run", "recipe.yaml")
    assert state() == before


def test_a_lost_report_is_written_again_and_nothing_else(workplace: Path, whole: Path) -> None:
    (whole / "report.html").unlink()
    rows = (whole / "metrics.jsonl").read_text(), (whole / "eval" / "results.jsonl").read_text()
    multihop(workplace, "run", "recipe.yaml")
    assert (whole / "report.html").exists()
    assert rows == ((whole / "metrics.jsonl").read_text(), (whole / "eval" / "results.jsonl").read_text())


@pytest.mark.long
def test_an_audit_of_its_last_checkpoint_is_recorded(workplace: Path, whole: Path) -> None:
    printed = multihop(workplace, "checkpoints", "audit", "whole")
    assert "replayed  steps 71 to 80 in " in printed and "equal     all weights, moments and counters" in printed
    assert "committed, audited" in multihop(workplace, "checkpoints", "list", "whole")
    (row,) = read_rows(whole / "audits.jsonl")
    assert (row["first"], row["last"], row["is_equal"]) == (70, 80, True)
    assert "steps 71 to 80 equal" in (whole / "report.md").read_text()
    state = json.loads((whole / "tracking.json").read_text())
    tags = connect(store_uri(whole.parent)).get_run(state["run_id"]).data.tags
    (tagged,) = json.loads(tags["multihop.audits"])
    assert tagged == {"first": 70, "last": 80, "is_equal": True, "conditions": [], "first_different_step": None}
    refused = multihop(workplace, "checkpoints", "audit", "whole", "--to", "15", code=2)
    assert "has no good checkpoint of step 15; it has: 70, 80" in refused


@pytest.mark.long
def test_examples_are_regenerated_only_if_the_texts_change(workplace: Path, whole: Path) -> None:
    made = whole / "eval" / "examples.json"
    first, rows = json.loads(made.read_text()), (whole / "eval" / "results.jsonl").read_text()
    (river,) = first["examples"]
    assert river["text"] == "The river" and river["before"] != river["after"] and first["checkpoint_step"] == STEPS
    assert "The river" in (whole / "report.md").read_text() and "The river" in (whole / "report.html").read_text()
    output = multihop(workplace, "run", "recipe.yaml", "eval.examples=[The river, A stone]")
    again = json.loads(made.read_text())
    assert again["examples"][0] == river and again["examples"][1]["text"] == "A stone"
    assert f"after   … {again['examples'][1]['after'].strip()}" in output
    assert rows == (whole / "eval" / "results.jsonl").read_text()
    refused = multihop(workplace, "run", "recipe.yaml", "eval.examples=['The [MASK]']", code=2)
    assert "eval.examples[0]='The [MASK]' has the mask token [MASK]" in refused
    assert again == json.loads(made.read_text())
    multihop(workplace, "run", "recipe.yaml")
    assert first == json.loads(made.read_text())


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def reached(run: Path, step: int) -> Callable[[], bool]:
    return lambda: (newest_step(str(run / "checkpoints")) or 0) >= step


def assert_same_result(run: Path, whole: Path) -> None:
    assert losses(run) == losses(whole) and results(run) == results(whole)
    assert_same_state(*(folder_of_step(str(path / "checkpoints"), STEPS) for path in (run, whole)))


@pytest.mark.long
def test_after_a_rank_died_and_an_interruption_it_ends_with_the_same_result(workplace: Path, whole: Path) -> None:
    """A rank dies: Ray Train starts all of them again. Then Ctrl-C: saved, and left with 75."""
    run = workplace / "runs" / "harmed"
    arguments = ("run", "recipe.yaml", "name=harmed")
    process = start(workplace, *arguments)
    wait_for((run / HOLDER).exists, process)
    assert f"in use by process {process.pid}" in multihop(workplace, *arguments, code=2)
    wait_for(lambda: bool(ranks_of(run)), process)
    victim = ranks_of(run)[-1]  # whichever is there; to look for it later takes longer than the steps that are left
    rank = victim.environ()["RANK"]
    wait_for(reached(run, CHECKPOINTS_EVERY), process)
    victim.kill()
    wait_for(lambda: len(read_rows(run / "launches.jsonl")) == 2, process)
    wait_for(reached(run, 2 * CHECKPOINTS_EVERY), process)
    (run / "stop").touch()  # asked for in both ways at once: the signal is the first one all the same
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    killed = rf"\d+:\d\d:\d\d the ranks failed \(.*rank {rank} on \S+ was killed by signal 9\b.*\); restarting from"
    assert re.search(killed, output), output
    *_, again = read_rows(run / "launches.jsonl")
    parts = ["detect_s", "queue_s", "schedule_s", "import_s", "rendezvous_s", "check_s", "restore_s"]
    assert list(again["seconds"]) == parts and all(seconds >= 0 for seconds in again["seconds"].values())
    stopped_at = newest_step(str(run / "checkpoints"))
    assert stopped_at is not None and 2 * CHECKPOINTS_EVERY <= stopped_at < STEPS
    assert json.loads((run / "summary.json").read_text())["status"] == "stopped"
    multihop(workplace, *arguments)
    assert_same_result(run, whole)


@pytest.mark.long
def test_after_its_driver_died_and_a_byte_flipped_it_ends_with_the_same_result(workplace: Path, whole: Path) -> None:
    run = workplace / "runs" / "harmed-again"
    arguments = ("run", "recipe.yaml", "name=harmed-again")
    # The driver dies: its ranks die with it, and the next start goes on, also behind half a row that was left.
    process = start(workplace, *arguments)
    wait_for(reached(run, CHECKPOINTS_EVERY), process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 60
    while ranks_of(run):
        assert time.monotonic() < deadline, "ranks outlived their driver"
        time.sleep(0.1)
    with open(run / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 9')

    # Asked to stop when the last step is done: nothing is begun any more.
    process = start(workplace, *arguments)
    wait_for(lambda: max(losses(run)) == STEPS, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75 and not (run / "eval" / "results.jsonl").exists(), output
    assert json.loads((run / "summary.json").read_text())["status"] in {"trained", "stopped"}

    multihop(workplace, *arguments)
    assert_same_result(run, whole)

    # A byte of the last checkpoint flips: its steps are taken again before anything is made of it.
    damaged = sorted(Path(folder_of_step(str(run / "checkpoints"), STEPS)).glob("*.safetensors"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x55")
    (run / "eval" / "results.jsonl").unlink()
    printed = multihop(workplace, *arguments)
    assert (
        f"{damaged.name} is damaged" in printed
        and "the steps since the last good checkpoint are trained again" in printed
    )
    assert_same_result(run, whole)
    assert json.loads((run / "summary.json").read_text())["launches"] >= 3


def test_evaluating_what_is_not_trained_is_refused_before_anything_is_prepared(workplace: Path, whole: Path) -> None:
    refused = multihop(workplace, "eval", "recipe.yaml", "name=unseen", code=2)
    assert f"runs/unseen is trained to step 0 of {STEPS}; finish it with `multihop train`" in refused
    assert not (workplace / "runs" / "unseen").exists()
    assert "nothing left to do" in multihop(workplace, "eval", "recipe.yaml")


def test_what_starts_a_rank_imports_no_torch() -> None:
    code = "import sys, multihop.cluster.ray.rank; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_another_recipe_is_refused(workplace: Path, whole: Path) -> None:
    refused = multihop(workplace, "run", "recipe.yaml", "model.layers=1", code=2)
    assert "was started with another recipe (model.layers was 2, is 1)" in refused


@pytest.mark.long
def test_a_run_with_another_recipe_shares_the_data_and_compare_shows_the_difference(
    workplace: Path, whole: Path
) -> None:
    changes = ("name=other", "model.layers=1", "phases[0].steps=20")
    multihop(workplace, "run", "recipe.yaml", *changes)
    decay = ("optimizer.weight_decay=0.05", "--allow-change", "optimizer.weight_decay")
    multihop(workplace, "run", "recipe.yaml", *changes, *decay)
    (row,) = read_rows(workplace / "runs" / "other" / "changes.jsonl")
    assert row["changed"] == [["optimizer.weight_decay", 0.01, 0.05]]
    shown = multihop(workplace, "compare", "whole", "other")
    assert "model.layers" in shown and "phases[0].steps" in shown and "perplexity" in shown
    assert "model.hidden" not in shown
    assert len(list((workplace / "runs" / ".prepared").glob("*/*/manifest.json"))) == 1, "the prepared data is shared"


@pytest.mark.long
def test_a_run_that_is_evaluated_as_another_model_and_back_reports_the_last_evaluation(
    workplace: Path, whole: Path
) -> None:
    (workplace / "novel.txt").write_text("The river was a stone. The letter was a garden.\n" * 20)
    (workplace / "novel.yaml").write_text("kind: perplexity\ntest: novel.txt\n")
    child = ("name=child", f"model.init_from={whole}", "phases[0].steps=10", "cluster.workers=1", "eval.examples=[]")
    own = (*child, "eval.tasks=[novel.yaml]", "eval.inits=[pretrained, parent, random]")
    run = workplace / "runs" / "child"

    def shown() -> tuple[str, str]:
        """Return the report's first sentences, and its row of the task."""
        lines = (run / "report.md").read_text().splitlines()
        return lines[2], next(line for line in lines if line.startswith("| novel |"))

    multihop(workplace, "run", "recipe.yaml", *own)
    headline, first = shown()
    assert re.search(rf"pretrained for 10 steps on [\d,]+ tokens, initialized from {whole} ", headline), headline
    rows = read_rows(run / "eval" / "results.jsonl")
    assert {row["init"]: row["checkpoint_step"] for row in rows} == {"pretrained": 10, "parent": STEPS, "random": None}
    cells = first.strip("| ").split(" | ")
    value = {row["init"]: row["value"] for row in rows}
    assert cells[3:5] == [show(value["pretrained"]), show(value["parent"])] and cells[6] == show(value["random"])

    multihop(workplace, "checkpoints", "export", "runs/whole", "--to", "hf", "--out", "model")
    theirs = (*child, "eval.tasks=[novel.yaml]", "eval.checkpoint=model", "eval.inits=[pretrained]")
    multihop(workplace, "eval", "recipe.yaml", *theirs)
    headline, other = shown()
    assert "Evaluation of the Hugging Face model in" in headline and other != first
    assert len(read_rows(run / "eval" / "results.jsonl")) == len(rows) + 1
    printed = multihop(workplace, "eval", "recipe.yaml", *own)
    assert "nothing left to do" not in printed and shown()[1] == first
    assert len(read_rows(run / "eval" / "results.jsonl")) == len(rows) + 1, "no trial is run again"


def test_changed_texts_are_refused(workplace: Path, whole: Path, texts: Path) -> None:
    original = (texts / "0000.txt").read_text()
    (texts / "0000.txt").write_text(original + " Another river.")
    try:
        assert "the texts of runs/whole changed" in multihop(workplace, "run", "recipe.yaml", code=2)
    finally:
        (texts / "0000.txt").write_text(original)
        os.utime(texts / "0000.txt")


@pytest.mark.long
def test_restored_texts_are_accepted(workplace: Path, whole: Path, texts: Path) -> None:
    rows = (whole / "metrics.jsonl").read_text(), (whole / "eval" / "results.jsonl").read_text()
    os.utime(texts / "0000.txt")
    multihop(workplace, "run", "recipe.yaml")
    assert rows == ((whole / "metrics.jsonl").read_text(), (whole / "eval" / "results.jsonl").read_text())


MISTAKES: list[tuple[list[str], str]] = [
    (["phases[0].steps=many"], 'phases[0].steps="many"'),
    (["data.sources=[{path: /no/such/folder}]"], "/no/such/folder"),
    (["data.sources=[{path: 'package:no_such_package/x.txt'}]"], "no_such_package"),
    (["data.sources=[{path: EMPTY}]"], "EMPTY"),
    (["data.sources=[{path: BLANK}]"], "1 of 1 documents cannot be used"),
    (["tokenizer.vocab_size=50000"], "more than the text can support"),
    (["cluster.address=127.0.0.1:1"], "is unreachable"),
    (["cluster.address=nonsense"], "is not HOST:PORT"),
    (["eval.tasks=[no-such-task]"], "no-such-task"),
    (["tracking.uri=nonsense"], "tracking.uri"),
]


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [pytest.param(*each, marks=[pytest.mark.long] if "50000" in each[0][0] else []) for each in MISTAKES],
    ids=[" ".join(given) for given, _ in MISTAKES],
)
def test_mistakes_get_a_sentence_and_leave_nothing(
    workplace: Path, tmp_path: Path, overrides: list[str], complaint: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "a.txt").write_text(" \n")
    given = [o.replace("EMPTY", str(tmp_path / "empty")).replace("BLANK", str(tmp_path / "blank")) for o in overrides]
    complaint = complaint.replace("EMPTY", str(tmp_path / "empty"))
    runs = tmp_path / "runs"
    output = multihop(workplace, "run", "recipe.yaml", "--runs", str(runs), *given, code=2)
    sentences: list[Any] = [line for line in output.splitlines() if line.startswith("multihop: ")]
    assert len(sentences) == 1 and complaint in sentences[0], output
    assert "Traceback" not in output
    left = [path for path in runs.rglob("*") if path.is_file()] if runs.exists() else []
    # What was read until then need not be read again.
    assert all("work" in path.parts or path.name == ".lock" for path in left), left
