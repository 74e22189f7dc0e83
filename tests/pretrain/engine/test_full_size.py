"""LAMB, clipping and resharding with tensors of BERT-base's sizes: what small tensors cannot show.

Every step begins from one checkpoint, which one rank wrote in stage 0.
"""

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from full_size_jobs import go_on
from rank_jobs import some_batches
from rank_pool import RankPool
from reference import lamb, norm
from tables_of_tests import Table
from torch import Tensor

from multihop.pretrain.checkpoint.manifest import folder_of_step
from multihop.pretrain.checkpoint.reader import CheckpointReader
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.models.build import build_model, uses_weight_decay

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(1800)]
Pool = Callable[[int], RankPool]
Tensors = dict[str, Tensor]

VOCABULARY = 30_522
BEFORE = 2
"""Step of the checkpoint from which all runs begin."""
BOUND = 1e-6
"""Largest relative deviation of losses, norms and trust ratios; for weights in units of the tensor's largest."""
OFFLOADED = [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "optimizer+weights")]
NARROW = [(stage, offload) for stage, offload in [(1, "none"), (2, "none"), (3, "none"), *OFFLOADED]]


def settings(stage: int, precision: str = "fp32", offload: str = "none") -> dict[str, Any]:
    return {
        "seed": 3,
        "model": {"family": "bert", "layers": 1, "hidden": 768, "heads": 12, "max_positions": 512, "dropout": 0.0},
        "phases": [
            {"seq_len": 32, "global_batch_size": 5, "steps": 9, "lr": 1e-2, "schedule": "constant", "warmup_ratio": 0.0}
        ],
        "optimizer": {"name": "lamb", "weight_decay": 0.01, "max_grad_norm": 0.5},
        "engine": {
            "deepspeed": {"fp16": {"initial_scale_power": 6}},
            "micro_batch_size": 1,
            "precision": precision,
            "zero_stage": stage,
            "offload": offload,
        },
    }


CONFIG = TrainingConfig.model_validate(settings(0))


@dataclass
class State:
    """Weights and moments after a step, flat, by parameter."""

    weight: Tensors
    exp_avg: Tensors
    exp_avg_sq: Tensors


@dataclass
class Step:
    """A step of the plain loop."""

    loss: float
    norm: float
    after: State


def read(checkpoints: Path, step: int) -> State:
    with CheckpointReader(folder_of_step(str(checkpoints), step)) as reader:
        shapes = reader.manifest.parameters
        kinds = [
            {name: reader.read(kind, name, 0, math.prod(shape)) for name, shape in shapes.items()}
            for kind in ("weight", "exp_avg", "exp_avg_sq")
        ]
    return State(*kinds)


@pytest.fixture(scope="module")
def start(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, State]]:
    """The folder of the checkpoint of step 2, and its state."""
    folder = tmp_path_factory.mktemp("start")
    pool(1).run(go_on, settings(0), VOCABULARY, None, 0, BEFORE, str(folder))
    yield folder, read(folder, BEFORE)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def plain(start: tuple[Path, State]) -> Iterator[Step]:
    """The next step, over whole tensors.

    It runs with one thread, as a rank does: with another number of threads, products are rounded differently, which
    moves gradients by 2e-6 of their largest element.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield _plain_step(start[1])
    torch.set_num_threads(threads)


def _plain_step(before: State) -> Step:
    model = build_model(CONFIG.model, VOCABULARY)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in named.items():
            weight.view(-1).copy_(before.weight[name])
    phase, optimizer = CONFIG.phases[0], CONFIG.optimizer
    batches = some_batches(CONFIG.seed, BEFORE, phase.global_batch_size, phase.seq_len, VOCABULARY)
    loss = 0.0
    for batch in batches:
        sums = model(**to_device(batch.inputs, torch.device("cpu")))
        mine = sum(sums[name] / sum(other.counts[name] for other in batches) for name in batch.counts)
        mine.backward()
        loss += float(mine)
    gradients = {name: weight.grad for name, weight in named.items() if weight.grad is not None}
    global_norm = math.hypot(*map(norm, gradients.values()))
    assert global_norm > optimizer.max_grad_norm, "nothing would be clipped"
    moments = {}
    with torch.no_grad():
        for name, weight in named.items():
            moments[name] = {
                "excluded": not uses_weight_decay(name),
                "t": BEFORE,
                "m": before.exp_avg[name].view(weight.shape),
                "v": before.exp_avg_sq[name].view(weight.shape),
            }
            decay = optimizer.weight_decay if uses_weight_decay(name) else 0.0
            gradient = gradients[name] * (optimizer.max_grad_norm / (global_norm + 1e-6))
            given = optimizer.model_copy(update={"weight_decay": decay})
            lamb(name, weight, gradient, given, phase.lr, moments[name])
    after = State(
        {name: weight.detach().view(-1) for name, weight in named.items()},
        {name: each["m"].view(-1) for name, each in moments.items()},
        {name: each["v"].view(-1) for name, each in moments.items()},
    )
    return Step(loss, global_norm, after)


def furthest(ours: Tensors, theirs: Tensors) -> float:
    """Return the largest deviation in units of its tensor's largest element, without attention's key bias.

    The true gradient of that bias is zero.
    """
    return max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-12))
        for name in theirs
        if not name.endswith("attention.key.bias")
    )


def ratios_and_updates(before: State, after: State) -> tuple[dict[str, float], Tensors]:
    """Return LAMB's trust ratios and new weights, in float64, from the moments after a step."""
    optimizer, t = CONFIG.optimizer, BEFORE + 1
    ratios, weights = {}, {}
    for name, weight in before.weight.items():
        m_hat = after.exp_avg[name].double() / (1 - optimizer.betas[0] ** t)
        v_hat = after.exp_avg_sq[name].double() / (1 - optimizer.betas[1] ** t)
        update = m_hat / (v_hat.sqrt() + optimizer.eps)
        ratio = 1.0
        if uses_weight_decay(name):
            update += optimizer.weight_decay * weight.double()
            ratio = ratios[name] = min(norm(weight) / norm(update), optimizer.max_trust_ratio)
        weights[name] = weight.double() - CONFIG.phases[0].lr * ratio * update
    return ratios, weights


@pytest.mark.parametrize(
    ("ranks", "stage", "precision", "offload"),
    [
        *((ranks, stage, "fp32", "none") for ranks in (1, 2, 4) for stage in (0, 1, 2, 3)),
        *((2, stage, "fp32", offload) for stage, offload in OFFLOADED),
        *((2, stage, precision, offload) for precision in ("bf16", "fp16") for stage, offload in NARROW),
    ],
)
def test_a_step_from_one_checkpoint_is_one_step_of_lamb(
    pool: Pool,
    start: tuple[Path, State],
    plain: Step,
    table: Table,
    tmp_path: Path,
    ranks: int,
    stage: int,
    precision: str,
    offload: str,
) -> None:
    folder, before = start
    given = settings(stage, precision, offload)
    results = pool(ranks).run(go_on, given, VOCABULARY, str(folder), BEFORE, 1, str(tmp_path))
    after = read(tmp_path, BEFORE + 1)
    shutil.rmtree(tmp_path)
    ratios, weights = ratios_and_updates(before, after)
    for result in results:
        assert result["ratios"].keys() == ratios.keys()
        of_ratios = max(abs(result["ratios"][name] / ratio - 1) for name, ratio in ratios.items())
        assert of_ratios < BOUND
    found = {"ratios": of_ratios, "update": furthest(after.weight, weights)}
    if precision == "fp32":
        found["loss"] = abs(results[0]["losses"][0] / plain.loss - 1)
        found["norm"] = abs(results[0]["norms"][0] / plain.norm - 1)
        found |= {kind: furthest(getattr(after, kind), getattr(plain.after, kind)) for kind in ("weight", "exp_avg")}
    table(f"{ranks} ranks, stage {stage}, {precision}, {offload}: { ({k: f'{v:.1e}' for k, v in found.items()}) }")
    assert all(value < BOUND for value in found.values())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_same_ranks_resume_bit_for_bit(pool: Pool, start: tuple[Path, State], tmp_path: Path, stage: int) -> None:
    def run(checkpoints: Path, first: int, steps: int, out: str) -> list[str]:
        arguments = settings(stage), VOCABULARY, str(checkpoints), first, steps, str(tmp_path / out)
        return [result["state"] for result in pool(2).run(go_on, *arguments)]

    through = run(start[0], BEFORE, 2, "through")
    run(start[0], BEFORE, 1, "half")
    assert run(tmp_path / "half", BEFORE + 1, 1, "resumed") == through
    shutil.rmtree(tmp_path)
