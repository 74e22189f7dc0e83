"""How often a step makes the host wait for the device."""

from collections.abc import Callable
from pathlib import Path

import pytest
from device_reads import reads_of_steps, write_recipe
from rank_pool import RankPool
from worker_runs import recipe

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]
STEPS = 8
WAITS = ("reads", "uploads", "synchronize")


@pytest.mark.parametrize(
    ("stage", "precision", "optimizer"),
    [
        (0, "fp32", "lamb"),
        (1, "fp32", "adamw"),
        (1, "bf16", "lamb"),
        (2, "fp32", "lamb"),
        (2, "bf16", "adamw"),
        (3, "fp32", "adamw"),
        (3, "bf16", "lamb"),
    ],
)
def test_a_step_waits_for_the_device_once_and_once_more_where_it_is_logged(
    pool: Callable[[int], RankPool], bert_data: Path, tmp_path: Path, stage: int, precision: str, optimizer: str
) -> None:
    content = recipe(
        phases__0__steps=STEPS,
        phases__0__global_batch_size=4,
        optimizer__name=optimizer,
        engine__zero_stage=stage,
        engine__precision=precision,
        engine__log_interval=3,
        engine__eval_interval=100,
        engine__heldout_samples=4,
        engine__data_workers=0,
        checkpoint__save_interval=100,
    )
    run_dir = write_recipe(tmp_path / "run", bert_data, content)
    for steps in pool(2).run(reads_of_steps, run_dir):
        print(f"stage {stage} {precision} {optimizer}: {steps}")
        waits = [sum(step.get(kind, 0) for kind in WAITS) for step in steps]
        # Steps 2 and 5 are logged after their update. In the first three steps stage 3 compares the order of its
        # modules over the ranks.
        assert waits[4:STEPS] == [1, 1, 2, 1] and (stage == 3 or waits[1:4] == [1, 1, 2])
