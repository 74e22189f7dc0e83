"""What ranks of a `RankPool` do in tests. Each function runs on every rank at once."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data_prep.shards import open_dataset
from pretrain.config import TrainingConfig
from pretrain.engine import Engine
from pretrain.keyed import key_of
from pretrain.lamb import Lamb
from pretrain.models import build_model, initialise
from pretrain.objectives.batch import Batch
from pretrain.order import share_of_rank
from pretrain.ranks import Ranks
from pretrain.restore import start_engine
from pretrain.run_files import read_config
from pretrain.worker import train_run

VOCABULARY = 61


def some_batches(seed: int, step: int, sequences: int, length: int) -> list[dict[str, NDArray[np.int64]]]:
    """One masked sentence pair a sequence, with different numbers of masked pieces."""
    pairs = []
    for number in range(sequences):
        rng = np.random.default_rng(key_of("pair", seed, step, number))
        masked = np.sort(rng.choice(length, size=int(rng.integers(1, length // 2)), replace=False))
        pairs.append(
            {
                "input_ids": rng.integers(0, VOCABULARY, (1, length)),
                "segments": rng.integers(0, 2, (1, length)),
                "lengths": np.array([int(rng.integers(length // 2, length + 1))]),
                "masked_at": masked,
                "masked_ids": rng.integers(0, VOCABULARY, masked.size),
                "is_random_next": rng.integers(0, 2, 1),
            }
        )
    return pairs


def batch_of(pair: dict[str, NDArray[np.int64]]) -> Batch:
    """A micro-batch of one pair."""
    counts = {"token": len(pair["masked_ids"]), "nsp": 1}
    return Batch(pair, pair["masked_ids"], counts, int(pair["lengths"].sum()))


def train_on_pairs(
    ranks: Ranks,
    settings: dict[str, Any],
    steps: int,
    sequences: int,
    spoilt: tuple[int, ...] = (),
    local_norms: bool = False,
) -> dict[str, Any]:
    """Train a small BERT; its losses, norms and, gathered from all ranks, its fp32 weights and moments.

    Args:
        spoilt: steps whose loss is made infinite, on the last rank only.
        local_norms: take LAMB's norms over the local pieces, which is wrong.
    """
    config = TrainingConfig.model_validate(settings)
    model = build_model(config.model, VOCABULARY)
    initialise(model, config.seed)
    engine = Engine(config, model, ranks, 1)
    if local_norms:
        optimizer = engine._optimizer
        assert isinstance(optimizer, Lamb)
        optimizer.bind(engine.slices, lambda squares: None, list(engine.parameters))
    losses, norms, applied, states = [], [], [], []
    for step in range(steps):
        pairs = some_batches(config.seed, step, sequences, 16)
        total = {"token": float(sum(len(pair["masked_ids"]) for pair in pairs)), "nsp": float(sequences)}
        mine = pairs[share_of_rank(sequences, ranks.rank, ranks.world_size)]
        passes = -(-sequences // ranks.world_size)
        loss = torch.zeros((), dtype=torch.float64)
        for number in range(passes):
            batch = batch_of(mine[number] if number < len(mine) else pairs[0])
            if number >= len(mine):
                batch = Batch(batch.inputs, batch.targets[:0], dict.fromkeys(batch.counts, 0), 0)
            spoil = step in spoilt and ranks.rank == ranks.world_size - 1 and number == 0
            torch.manual_seed(key_of("dropout", step, number, ranks.rank) >> 1)
            sums = engine.forward_backward(batch, {**total, "token": 0.0} if spoil else total)
            loss += sum(sums[name] / total[name] for name in total)
        taken = engine.step(config.phases[0].lr)
        losses.append(ranks.sum({"loss": loss})["loss"])
        norms.append(taken.grad_norm)
        applied.append(taken.applied)
        if spoilt:
            states.append({name: tensor.clone() for name, tensor in engine.state()[0].items()})
    tensors, updates, _ = engine.state()
    state = {name: tensor.to(torch.float32).numpy().copy() for name, tensor in tensors.items()}
    module = {
        name: parameter.detach().float().numpy().copy()
        for name, parameter in model.named_parameters()
        if config.engine.zero_stage < 3
    }
    untouched = [
        all(torch.equal(states[step][name], states[step - 1][name]) for name in states[step])
        for step in spoilt
        if step > 0
    ]
    engine.destroy()
    return {
        "losses": losses,
        "norms": norms,
        "applied": applied,
        "updates": updates,
        "state": state,
        "module": module,
        "untouched": untouched,
        "shapes": {name: list(shape) for name, shape in engine.parameters.items()},
    }


def run_worker(ranks: Ranks, run_dir: Path) -> int:
    """A whole run as this rank, but for starting and ending the process."""
    with open(run_dir / "logs" / "console.txt", "a") as console:
        return train_run(run_dir, ranks, console)


def bytes_read_at_start(ranks: Ranks, run_dir: Path, step: int) -> int:
    """What this rank reads to go on from a checkpoint."""
    data = open_dataset(run_dir / "data").manifest
    started = start_engine(read_config(run_dir), run_dir, data, ranks, 1, step)
    started.engine.destroy()
    return started.bytes_read
