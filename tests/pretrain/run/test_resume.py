"""Resuming: bitwise equal on the same ranks, equal up to rounding on others, with one command."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import short_and_long, three_way_combinations
from kinds_of_families import OBJECTIVES
from objective_recipes import STEPS, recipe
from rank_jobs import bytes_read_at_start, run_worker
from rank_pool import RankPool
from tables_of_tests import Table

from multihop.pretrain.checkpoint.manifest import folder_of_step, read_checkpoint_manifest
from multihop.pretrain.checkpoint.verify import load_weights
from multihop.pretrain.models.families import FAMILIES

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1800)]
Pool = Callable[[int], RankPool]
Prepared = Callable[[str], Path]

OPTIMIZERS = ("adamw", "lamb", "muon")
LAYER_LR_DECAY = {"lamb": 0.5}
"""By optimizer. With it each layer has parameter groups of its own."""
PLACES = [(0, "none"), (1, "none"), (1, "optimizer"), (2, "none"), (2, "optimizer")]
PLACES += [(3, "none"), (3, "optimizer"), (3, "optimizer+weights")]
CLOSE = 2e-5
"""Largest difference in fp32 without dropout: of losses relative, of weights absolute."""


def begin(run_dir: Path, data: Path, content: dict[str, Any], checkpoint: Path | None = None) -> Path:
    """Make a run's folder, with one checkpoint of another run in it if given."""
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "data").symlink_to(data)
    (run_dir / "recipe.json").write_text(json.dumps(content))
    if checkpoint is not None:
        shutil.copytree(checkpoint, run_dir / "checkpoints" / checkpoint.name)
    return run_dir


def losses(run_dir: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def step_of(run_dir: Path, step: int) -> Path:
    return Path(folder_of_step(str(run_dir / "checkpoints"), step))


def same_files(one: Path, other: Path) -> bool:
    ours, theirs = (sorted(each.glob("*.safetensors")) for each in (one, other))
    return len(ours) == len(theirs) and all(a.read_bytes() == b.read_bytes() for a, b in zip(ours, theirs, strict=True))


SAME_IN_STAGES = [
    (objective, 2, stage, OPTIMIZERS[(stage + number) % 3], "bf16" if (objective, stage) == ("clm", 2) else "fp32")
    for number, objective in enumerate(OBJECTIVES)
    for stage in (0, 1, 2, 3)
]
"""Each objective with each stage and one of the optimizers; one of them in bf16."""
SAME_SHORT = [each for each in SAME_IN_STAGES if each[0] == "mlm" or each[2] == (OBJECTIVES.index(each[0]) + 2) % 4]
"""One objective with each stage, the others with one."""
SAME = [
    (objective, ranks, stage, optimizer, precision)
    for objective in OBJECTIVES
    for ranks in (1, 2)
    for stage in (0, 1, 2, 3)
    for optimizer in OPTIMIZERS
    for precision in ("fp32", "bf16", "fp16")
    if precision == "fp32" or stage > 0
]


@pytest.mark.parametrize(
    ("objective", "ranks", "stage", "optimizer", "precision"),
    short_and_long(SAME_SHORT, [*SAME_IN_STAGES, *three_way_combinations(SAME)]),
)
def test_the_same_ranks_resume_bit_for_bit(
    pool: Pool,
    prepared: Prepared,
    tmp_path: Path,
    table: Table,
    objective: str,
    ranks: int,
    stage: int,
    optimizer: str,
    precision: str,
) -> None:
    content = recipe(
        objective,
        engine__zero_stage=stage,
        optimizer__name=optimizer,
        engine__precision=precision,
        engine__data_workers=0,
    )
    whole = begin(tmp_path / "whole", prepared(objective), content)
    assert pool(ranks).run(run_worker, whole) == [0] * ranks
    k = random.Random(str((objective, ranks, stage, optimizer, precision))).randrange(1, STEPS)
    resumed = begin(tmp_path / "resumed", prepared(objective), content, step_of(whole, k))
    assert pool(ranks).run(run_worker, resumed) == [0] * ranks
    ours, theirs = losses(resumed), losses(whole)
    equal = all(ours[step] == theirs[step] for step in range(k + 1, STEPS + 1))
    equal = equal and same_files(step_of(resumed, STEPS), step_of(whole, STEPS))
    here, there = (read_checkpoint_manifest(str(step_of(run, STEPS))) for run in (resumed, whole))
    equal = equal and (here.updates, here.counters) == (there.updates, there.counters)
    what = f"{objective:11} {ranks} ranks  stage {stage}  {optimizer:5}  {precision}"
    table(f"{what}  from step {k} of {STEPS}: {'bit-identical' if equal else 'DIFFERENT'}")
    assert min(ours) == k + 1 and equal


CROSS = [
    (optimizer, written, ranks, *place)
    for written in ((2, 1), (4, 3), (1, 0), (2, 2))
    for optimizer in OPTIMIZERS
    for ranks in (1, 2, 4)
    for place in PLACES
]
CROSS_SHORT = [
    *(("adamw", (2, 1), *place) for place in ((1, 3, "optimizer+weights"), (2, 2, "optimizer"), (4, 1, "none"))),
    *(("lamb", (2, 1), *place) for place in ((1, 0, "none"), (2, 3, "none"), (4, 3, "optimizer"))),
    *(("muon", (2, 1), *place) for place in ((1, 2, "none"), (2, 3, "optimizer"), (4, 1, "none"), (4, 3, "none"))),
]


@pytest.fixture(scope="module")
def wholes(pool: Pool, prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, int], Path]:
    """Return a function that gives uninterrupted runs without dropout, each made once."""
    made: dict[tuple[str, int, int], Path] = {}

    def whole(optimizer: str, ranks: int, stage: int) -> Path:
        if (optimizer, ranks, stage) not in made:
            content = recipe(
                "mlm+nsp",
                model__dropout=0.0,
                optimizer__name=optimizer,
                optimizer__layer_lr_decay=LAYER_LR_DECAY.get(optimizer, 1.0),
                engine__zero_stage=stage,
                engine__data_workers=0,
            )
            run_dir = begin(tmp_path_factory.mktemp("wholes") / "run", prepared("mlm+nsp"), content)
            assert pool(ranks).run(run_worker, run_dir) == [0] * ranks
            made[optimizer, ranks, stage] = run_dir
        return made[optimizer, ranks, stage]

    return whole


@pytest.mark.parametrize(
    ("optimizer", "written", "ranks", "stage", "offload"), short_and_long(CROSS_SHORT, three_way_combinations(CROSS))
)
def test_any_other_ranks_stage_and_offload_resume_within_rounding(
    pool: Pool,
    prepared: Prepared,
    wholes: Callable[[str, int, int], Path],
    tmp_path: Path,
    table: Table,
    optimizer: str,
    written: tuple[int, int],
    ranks: int,
    stage: int,
    offload: str,
) -> None:
    whole = wholes(optimizer, *written)
    k = 3
    content = recipe(
        "mlm+nsp",
        model__dropout=0.0,
        optimizer__name=optimizer,
        optimizer__layer_lr_decay=LAYER_LR_DECAY.get(optimizer, 1.0),
        engine__zero_stage=stage,
        engine__offload=offload,
        engine__micro_batch_size=3,
        engine__data_workers=0,
    )
    resumed = begin(tmp_path / "resumed", prepared("mlm+nsp"), content, step_of(whole, k))
    assert pool(ranks).run(run_worker, resumed) == [0] * ranks
    ours, theirs = losses(resumed), losses(whole)
    of_losses = max(abs(ours[step] - theirs[step]) / theirs[step] for step in range(k + 1, STEPS + 1))
    here, there = (load_weights(str(step_of(run, STEPS))) for run in (resumed, whole))
    compared = [name for name in there if not name.endswith("attention.key.bias")]
    of_weights = max(float((here[name] - there[name]).abs().max()) for name in compared)
    moved = load_weights(str(step_of(whole, k)))
    assert max(float((moved[name] - there[name]).abs().max()) for name in compared) > 1e-3
    where = f"{optimizer:5} written by {written[0]} ranks in stage {written[1]}, read by {ranks} in stage {stage}"
    table(f"{where}, offload {offload:17}: losses {of_losses:.1e} (relative), weights {of_weights:.1e}")
    assert min(ours) == k + 1 and of_losses < CLOSE and of_weights < CLOSE


@pytest.mark.parametrize(("ranks", "stage", "micro_batch"), [(1, 0, 7), (1, 1, 3), (2, 2, 1), (3, 1, 2), (4, 3, 2)])
def test_ranks_micro_batches_and_stages_do_not_change_the_losses(
    pool: Pool,
    prepared: Prepared,
    wholes: Callable[[str, int, int], Path],
    tmp_path: Path,
    table: Table,
    ranks: int,
    stage: int,
    micro_batch: int,
) -> None:
    content = recipe(
        "mlm+nsp",
        model__dropout=0.0,
        optimizer__layer_lr_decay=LAYER_LR_DECAY["lamb"],
        engine__zero_stage=stage,
        engine__micro_batch_size=micro_batch,
        engine__data_workers=0,
    )
    run_dir = begin(tmp_path / "run", prepared("mlm+nsp"), content)
    assert pool(ranks).run(run_worker, run_dir) == [0] * ranks
    ours, theirs = losses(run_dir), losses(wholes("lamb", 2, 1))
    furthest = max(abs(ours[step] - theirs[step]) / theirs[step] for step in range(1, STEPS + 1))
    table(f"{ranks} ranks, stage {stage}, micro-batch {micro_batch}: losses {furthest:.1e} (relative)")
    assert furthest < CLOSE


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_reads_its_own_slices_and_no_more(
    pool: Pool, prepared: Prepared, wholes: Callable[[str, int, int], Path], tmp_path: Path, stage: int
) -> None:
    whole = wholes("adamw", 2, 1)
    content = recipe("mlm+nsp", model__dropout=0.0, optimizer__name="adamw", engine__zero_stage=stage)
    content["engine"]["data_workers"] = 0
    resumed = begin(tmp_path / "resumed", prepared("mlm+nsp"), content, step_of(whole, STEPS - 1))
    read = pool(4).run(bytes_read_at_start, resumed, STEPS - 1)
    saved = read_checkpoint_manifest(str(step_of(whole, STEPS - 1)))
    parameters = sum(torch.Size(shape).numel() for shape in saved.parameters.values())
    assert sum(read) == 12 * parameters and max(read) < 12 * parameters / 3  # about a quarter each


def test_skipped_steps_use_up_their_samples_and_their_rate(pool: Pool, prepared: Prepared, tmp_path: Path) -> None:
    phases = [{"seq_len": 48, "global_batch_size": 7, "steps": STEPS, "lr": 1e-2}]
    every = begin(tmp_path / "every", prepared("mlm+nsp"), recipe("mlm+nsp", phases=phases))
    skipping = [{**phases[0], "skip_steps": [1, 4]}]
    some = begin(tmp_path / "some", prepared("mlm+nsp"), recipe("mlm+nsp", phases=skipping))
    for run_dir in (every, some):
        assert pool(2).run(run_worker, run_dir) == [0, 0]
    all_rows, rows = (
        {row["step"]: row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row}
        for run in (every, some)
    )
    assert sorted(rows) == [1, 3, 4, 6]
    assert all(rows[step]["lr"] == all_rows[step]["lr"] for step in rows)
    assert all(rows[step]["samples"] == all_rows[step]["samples"] for step in rows)
    assert read_checkpoint_manifest(str(step_of(some, STEPS))).updates == STEPS - 2
    assert rows[1]["loss"] == all_rows[1]["loss"] and rows[3]["loss"] != all_rows[3]["loss"]


TRANSLATING = {
    "transformer": {"family": "transformer", "heads": 2},
    "additive": {"family": "seq2seq", "attention": "additive"},
    "fed": {"family": "seq2seq", "cell": "gru", "attention": "general", "input_feeding": True},
    "none": {"family": "seq2seq", "attention": "none"},
    "ctc": {"family": "ctc-encoder"},
    "ctc-transformer": {"family": "ctc-encoder", "encoder": "transformer", "heads": 2},
}
TRANSLATING_SHORT = ("fed",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in TRANSLATING_SHORT else [pytest.mark.long]) for name in TRANSLATING],
)
def test_in_every_stage_a_model_that_translates_is_the_unsharded_one(
    pool: Pool, prepared: Prepared, tmp_path: Path, table: Table, name: str
) -> None:
    """Ranks have pairs of different lengths, so that recurrent models read their weights different numbers of times."""
    model: dict[str, Any] = {"layers": 2, "hidden": 32, "max_positions": 64, "dropout": 0.0, **TRANSLATING[name]}
    objective = FAMILIES[model["family"]].default_objective
    found: dict[int, dict[int, float]] = {}
    for stage, ranks in ((0, 1), (1, 2), (2, 2), (3, 2)):
        content = recipe(objective, model=model, engine__zero_stage=stage, engine__data_workers=0)
        run_dir = begin(tmp_path / str(stage), prepared(objective), content)
        assert pool(ranks).run(run_worker, run_dir) == [0] * ranks
        found[stage] = losses(run_dir)
        furthest = max(abs(found[stage][step] - found[0][step]) / found[0][step] for step in range(1, STEPS + 1))
        table(f"{name:11} stage {stage} on {ranks} ranks beside the unsharded model: {furthest:.1e} (relative)")
        assert furthest < CLOSE
    k = 2
    resumed = begin(tmp_path / "resumed", prepared(objective), content, step_of(run_dir, k))
    assert pool(2).run(run_worker, resumed) == [0] * 2
    assert losses(resumed) == {step: loss for step, loss in found[3].items() if step > k}
    assert same_files(step_of(resumed, STEPS), step_of(run_dir, STEPS))
