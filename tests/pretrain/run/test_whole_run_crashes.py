"""A run of two ranks that is killed repeatedly at random moments has the results of an uninterrupted run."""

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from worker_runs import (
    Torchrun,
    assert_same_state,
    checkpoint,
    finish,
    kill,
    losses,
    losses_of_step,
    ranks_of,
    rows,
    start,
)

from multihop.pretrain.checkpoint.manifest import read_checkpoint_manifest
from multihop.pretrain.checkpoint.verify import list_steps, newest_good, verify

pytestmark = pytest.mark.ranks
EVERY, KEEP = 2, 3
LONGEST_START_S, LONGEST_LIFE_S, MOST_STEPS = 16.0, 1.5, 20
"""Kills come within so many seconds of the start, or of the first step, and at the latest after so many steps, so that
the run does not end before its last kill on a fast machine."""


@pytest.mark.timeout(2400)
@pytest.mark.long  # short ones: a single kill in test_training.py, a stop in test_s3_run.py
@pytest.mark.parametrize(("kills", "steps"), [(3, 120), (20, 600)])
def test_kills_of_whole_runs(kills: int, steps: int, bert_data: Path, tmp_path: Path) -> None:
    rng, run, counts = random.Random(kills), tmp_path / "run", Counter[str]()
    changes = {
        "phases__0__steps": steps,
        "phases__0__global_batch_size": 4,
        "engine__eval_interval": 100_000,
        "engine__heldout_samples": 8,
        "checkpoint__save_interval": EVERY,
        "checkpoint__keep": KEEP,
    }
    undisturbed = finish(tmp_path / "undisturbed", bert_data, 2, **changes)
    resumed_from = 0
    for number in range(kills):
        starts, done = _starts(run), len(_loss_rows(run))
        torchrun = start(run, bert_data, 2, **changes)
        committed = _kill_at_a_random_moment(run, torchrun, rng, ("start-up", "step", "saving")[number % 3], counts)
        assert _starts(run) in (starts, [*starts, resumed_from])  # it may have died before it had looked
        counts["kills"] += 1
        counts[f"kills in {_phase(run, len(_loss_rows(run)) > done)}"] += 1
        resumed_from = _check(run, committed, counts)
    starts = _starts(run)
    finish(run, bert_data, 2)
    assert _starts(run) == [*starts, resumed_from]

    assert losses(run) == losses(undisturbed) and sorted(losses(run)) == list(range(1, steps + 1))
    assert all(len(losses_of_step(run, step)) == 1 for step in range(1, steps + 1))
    assert_same_state(checkpoint(run, steps), checkpoint(undisturbed, steps))
    whose = {"run": None, "files": [], "sha256": ""}
    ours, theirs = (read_checkpoint_manifest(checkpoint(each, steps)) for each in (run, undisturbed))
    assert ours.model_copy(update=whose) == theirs.model_copy(update=whose)
    counts["steps"], counts["steps done twice"] = steps, len(_loss_rows(run)) - steps
    print("; ".join(f"{what}: {count}" for what, count in sorted(counts.items())))
    print(f"starts resumed from {_starts(run)}; committed checkpoints lost: 0")


def _kill_at_a_random_moment(
    run: Path, torchrun: Torchrun, rng: random.Random, phase: str, counts: Counter[str]
) -> set[int]:
    """Kill the run and return the steps that were seen to be committed before."""
    committed: set[int] = set()

    def watch(until: Callable[[], object]) -> None:
        while True:
            committed.update(_committed(run))
            if until():
                return
            assert torchrun.poll() is None, "the run ended by itself"
            time.sleep(0.002)

    done = len(_loss_rows(run))

    def after(seconds: float) -> Callable[[], bool]:
        passed = _after(seconds)
        return lambda: passed() or len(_loss_rows(run)) >= done + MOST_STEPS

    if phase == "start-up":
        watch(after(rng.uniform(0.0, LONGEST_START_S)))
    else:
        watch(lambda: len(_loss_rows(run)) > done)
        watch(after(rng.uniform(0.0, LONGEST_LIFE_S)))
    if phase == "saving":
        watch(lambda: _under_way(run))
        watch(_after(rng.uniform(0.0, 0.03)))
    ranks = ranks_of(torchrun)
    if len(ranks) == 2 and rng.random() < 0.4:
        rng.choice(ranks).kill()
        assert torchrun.wait(timeout=120) != 0
        counts["one rank killed"] += 1
    else:
        kill(torchrun)
        counts["all killed"] += 1
    _, left = psutil.wait_procs(ranks, timeout=60)
    assert not left, "ranks outlived torchrun"
    return committed


def _check(run: Path, committed: set[int], counts: Counter[str]) -> int:
    """Assert that nothing committed is lost; returns the step that the next start resumes from."""
    found, rejected = newest_good(str(run / "checkpoints"))
    newest = found.step if found else 0
    assert newest >= max(committed, default=0)
    assert all("never committed" in sentence for sentence in rejected)
    kept = [step for step in range(newest, 0, -EVERY)][:KEEP]
    for step in kept:
        assert verify(checkpoint(run, step)).step == step
    counts["checkpoints verified"] += len(kept)
    counts["committed before their kill, as seen from outside"] += len(committed)
    assert set(_committed(run)) >= {step for step in committed if step > newest - KEEP * EVERY}
    return newest


def _phase(run: Path, took_a_step: bool) -> str:
    if not took_a_step:
        return "start-up"
    return "saving" if _under_way(run) else "a step"


def _after(seconds: float) -> Callable[[], bool]:
    moment = time.monotonic() + seconds
    return lambda: time.monotonic() >= moment


def _committed(run: Path) -> list[int]:
    return [
        step for step in list_steps(str(run / "checkpoints")) if Path(checkpoint(run, step), "manifest.json").exists()
    ]


def _under_way(run: Path) -> bool:
    newest = max(list_steps(str(run / "checkpoints")), default=None)
    return newest is not None and not Path(checkpoint(run, newest), "manifest.json").exists()


def _loss_rows(run: Path) -> list[float]:
    return [row["loss"] for row in rows(run) if "loss" in row]


def _starts(run: Path) -> list[int]:
    """Return the step that each start resumed from."""
    path = run / "launches.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line)["step"] for line in text[: text.rfind("\n") + 1].splitlines()]
