"""A rank that stops responding: the others write their stacks and end, and Ray Train restarts all of them."""

import signal
from pathlib import Path

import pytest
from worker_runs import finish
from workplace import begin, ended, json_lines, losses, make_workplace, ranks_of, wait_for

from multihop.pretrain.checkpoint.manifest import folder_of_step
from multihop.pretrain.checkpoint.verify import newest_step, verify

# The short one, without Ray, is in tests/pretrain/run/test_training.py.
pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(600)]
STEPS = 160
TIMEOUT_S = 12


def test_a_silent_rank_is_ended_and_the_run_goes_on(texts: Path, tmp_path: Path) -> None:
    make_workplace(tmp_path, texts, "run", STEPS, hang_timeout_s=TIMEOUT_S)
    run = tmp_path / "runs" / "run"
    command = begin(tmp_path, "train", "recipe.yaml")
    wait_for(lambda: newest_step(str(run / "checkpoints")), tmp_path, command)
    silent = next(rank for rank in ranks_of(run) if rank.environ()["RANK"] == "0")  # it has the locks of a writer
    silent.send_signal(signal.SIGSTOP)
    stopped_at = max(losses(run))
    assert stopped_at < STEPS
    ended(tmp_path, command)

    assert not silent.is_running() and not ranks_of(run)
    stacks = (run / "logs" / "rank-1.log").read_text()
    assert f"Timeout (0:00:{TIMEOUT_S})!" in stacks and "in train_run" in stacks.split("Timeout (")[1]
    starts = [row["step"] for row in json_lines(run / "launches.jsonl")]
    assert starts[0] == 0 and len(starts) > 1 and 0 < starts[1] <= stopped_at

    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    (undisturbed / "recipe.json").write_bytes((run / "recipe.json").read_bytes())
    (undisturbed / "data").symlink_to((run / "data").resolve())
    finish(undisturbed, run / "data", 2)
    assert losses(run) == losses(undisturbed) and sorted(losses(run)) == list(range(1, STEPS + 1))
    ours, theirs = (verify(folder_of_step(str(each / "checkpoints"), STEPS)) for each in (run, undisturbed))
    assert ours.content_hash() == theirs.content_hash()
