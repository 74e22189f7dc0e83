"""Jobs of the ranks of a `RankPool`. Each function runs on every rank at once."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multihop.common.counter_rng import key_of
from multihop.common.errors import UserError
from multihop.data_prep.dataset.shards import open_dataset
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder, RankBatch
from multihop.pretrain.data.index import build_indexes
from multihop.pretrain.data.phases import share_of_rank
from multihop.pretrain.engine.deepspeed_internals import replaced
from multihop.pretrain.engine.engine import Engine, StepResult
from multihop.pretrain.engine.micro_batch import micro_batch_sizes
from multihop.pretrain.engine.ranks import Ranks
from multihop.pretrain.engine.replicas import (
    InconsistentStateError,
    check_installed,
    check_replicas,
    installed_versions,
    state_checksums,
)
from multihop.pretrain.environment import LAST_STEP
from multihop.pretrain.models.build import build_model, build_model_on_meta, make_param_init
from multihop.pretrain.objectives.batch import Batch, ModelInput
from multihop.pretrain.optim.lamb import Lamb
from multihop.pretrain.optim.schedule import learning_rate
from multihop.pretrain.packed_tokens import cumulative_lengths, pack
from multihop.pretrain.run.files import read_config
from multihop.pretrain.run.heldout import evaluate
from multihop.pretrain.run.load_engine import load_engine
from multihop.pretrain.run.records import LaunchTimes
from multihop.pretrain.run.train_run import train_run

VOCABULARY = 61
A_WEIGHT = "layers.1.feed_forward.down.weight"


def some_batches(seed: int, step: int, sequences: int, max_seqlen: int, vocab_size: int = VOCABULARY) -> list[Batch]:
    """Return micro-batches of one masked sentence pair each, with different numbers of masked tokens."""
    pairs = []
    for number in range(sequences):
        rng = np.random.default_rng(key_of("pair", seed, step, number))
        length = int(rng.integers(max_seqlen // 2, max_seqlen + 1))
        masked = np.sort(rng.choice(length, size=int(rng.integers(1, length // 2)), replace=False))
        input_ids, token_type_ids = rng.integers(0, vocab_size, length), rng.integers(0, 2, length)
        labels = rng.integers(0, vocab_size, masked.size)
        inputs: dict[str, ModelInput] = {
            "packed": pack(input_ids, cumulative_lengths([length]), token_type_ids),
            "masked_positions": masked,
            "labels": labels,
            "is_random_next": rng.integers(0, 2, 1),
        }
        pairs.append(Batch(inputs, labels, {"mlm": len(labels), "nsp": 1}, length))
    return pairs


def train_on_pairs(
    ranks: Ranks,
    settings: dict[str, Any],
    steps: int,
    sequences: int,
    spoiled: tuple[int, ...] = (),
    local_norms: bool = False,
) -> dict[str, Any]:
    """Train a small BERT; returns losses, gradient norms and this rank's slices of weights and moments in fp32.

    Args:
        spoiled: steps whose loss is made infinite, on the last rank only.
        local_norms: take LAMB's norms over the local pieces, which is wrong.
    """
    config = TrainingConfig.model_validate(settings)
    model = build_model_on_meta(config.model, VOCABULARY)
    engine = Engine(config, model, ranks, 1, make_param_init(model, config.seed))
    if local_norms:
        optimizer = engine._optimizer
        assert isinstance(optimizer, Lamb)
        optimizer.bind(engine.slices, lambda squares: None, list(engine.parameters))
    losses, norms, applied, states, graphs = [], [], [], [], []
    for step in range(steps):
        pairs = some_batches(config.seed, step, sequences, 16)
        total = {"mlm": float(sum(len(batch.targets) for batch in pairs)), "nsp": float(sequences)}
        mine = pairs[share_of_rank(sequences, ranks.rank, ranks.world_size)]
        passes = -(-sequences // ranks.world_size)
        loss = torch.zeros((), dtype=torch.float64)
        for number in range(passes):
            batch = mine[number] if number < len(mine) else pairs[0]
            if number >= len(mine):
                batch = Batch(batch.inputs, batch.targets[:0], dict.fromkeys(batch.counts, 0), 0)
            spoil = step in spoiled and ranks.rank == ranks.world_size - 1 and number == 0
            torch.manual_seed(key_of("dropout", step, number, ranks.rank) >> 1)
            sums = engine.forward_backward(batch, {**total, "mlm": 0.0} if spoil else total)
            loss += sum(sums[name] / total[name] for name in total)
        taken = engine.step(config.phases[0].lr)
        losses.append(ranks.all_reduce_sum({"loss": loss})["loss"])
        norms.append(taken.grad_norm)
        applied.append(taken.applied)
        if config.engine.compile:
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        if spoiled:
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
        for step in spoiled
        if step > 0
    ]
    engine.destroy()
    return {
        "losses": losses,
        "norms": norms,
        "applied": applied,
        "graphs": graphs,
        "updates": updates,
        "state": state,
        "module": module,
        "untouched": untouched,
        "shapes": {name: list(shape) for name, shape in engine.parameters.items()},
    }


def train_on_batches(
    ranks: Ranks, settings: dict[str, Any], vocab_size: int, weights: dict[str, np.ndarray], batches: list[Batch]
) -> list[float]:
    """Return the loss of each step from given initial weights, with one batch per step, on one rank."""
    config = TrainingConfig.model_validate(settings)
    model = build_model(config.model, vocab_size)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    engine = Engine(config, model, ranks, config.phases[0].global_batch_size)
    losses = []
    for step, batch in enumerate(batches):
        counts = {name: float(count) for name, count in batch.counts.items()}
        sums = engine.forward_backward(batch, counts)
        losses.append(sum(float(sums[name]) / count for name, count in counts.items()))
        engine.step(learning_rate(config.phases, step))
    engine.destroy()
    return losses


def norm_of_equal_passes(
    ranks: Ranks, settings: dict[str, Any], passes: int, vocab_size: int = VOCABULARY
) -> dict[str, Any]:
    """Return the gradient norm of one batch that is passed `passes` times with a weight of 1 / `passes`, and how far
    each weight's address is from a multiple of 16 bytes."""
    config = TrainingConfig.model_validate(settings)
    model = build_model_on_meta(config.model, vocab_size)
    engine = Engine(config, model, ranks, 1, make_param_init(model, config.seed))
    (batch,) = some_batches(config.seed, 0, 1, 16, vocab_size)
    totals = {name: float(count * passes * ranks.world_size) for name, count in batch.counts.items()}
    for _ in range(passes):
        engine.forward_backward(batch, totals)
    weights = engine.module.named_parameters()
    offsets = {name: parameter.data_ptr() % 16 for name, parameter in weights}
    norm = engine.step(1e-3).grad_norm
    engine.destroy()
    return {"norm": norm, "offsets": offsets}


def loss_scales(ranks: Ranks, first: dict[str, Any], second: dict[str, Any]) -> tuple[float, float]:
    """Return the loss scale after five steps, and after resuming from that state with other settings, on one rank."""
    engines = []
    for settings in (first, second):
        config = TrainingConfig.model_validate(settings)
        model = build_model_on_meta(config.model, VOCABULARY)
        engines.append(Engine(config, model, ranks, 1, make_param_init(model, config.seed)))
    before, after = engines
    for step in range(5):
        (batch,) = some_batches(config.seed, step, 1, 16)
        before.forward_backward(batch, {name: float(count) for name, count in batch.counts.items()})
        before.step(1e-3)
    state, updates, counters = before.state()
    values = (state[f"{kind}/{name}@{start}"] for kind, name, start, _ in after.slices_to_restore(with_state=True))
    after.restore(values, updates, counters)
    scales = before.metrics()["loss_scale"], after.metrics()["loss_scale"]
    for engine in engines:
        engine.destroy()
    return scales


def run_worker(ranks: Ranks, run_dir: Path) -> int:
    """Run training as this rank, without starting or ending the process; returns the exit status."""
    with open(run_dir / "logs" / "console.txt", "a") as console:
        return train_run(run_dir, ranks, LaunchTimes(), console)


def refusal_of_worker(ranks: Ranks, run_dir: Path) -> str:
    """Run as a worker; returns the message of this rank's refusal, empty if it ran."""
    try:
        run_worker(ranks, run_dir)
    except ValueError as error:
        return str(error)
    return ""


def found_micro_batches(ranks: Ranks, run_dir: Path) -> list[int] | str:
    """Return the sizes that `engine.micro_batch_size: auto` finds, or why it finds none."""
    config = read_config(run_dir)
    build_indexes(run_dir / "index", open_dataset(run_dir / "data"), config)
    try:
        return micro_batch_sizes(config, run_dir, ranks)
    except ValueError as error:
        return str(error)


def bytes_read_at_start(ranks: Ranks, run_dir: Path, step: int) -> int:
    """Return the bytes that this rank reads to resume from a checkpoint."""
    data = open_dataset(run_dir / "data").manifest
    started = load_engine(read_config(run_dir), run_dir, data, ranks, 1, step)
    started.engine.destroy()
    return started.bytes_read


def evaluate_rough_model(ranks: Ranks, run_dir: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Evaluate a model whose tokens depend on one another; also returns whether later evaluations are unchanged."""
    config = TrainingConfig.model_validate(settings)
    vocab_size = open_dataset(run_dir / "data").manifest.tokenizer.vocab_size
    model = build_model_on_meta(config.model, vocab_size)
    draw = make_param_init(model, config.seed)

    def fill(name: str, parameter: torch.Tensor) -> None:
        draw(name, parameter)
        with torch.no_grad():
            parameter.mul_(20.0 if parameter.ndim > 1 else 1.0)

    engine = Engine(config, model, ranks, 2, fill)
    batches = BatchBuilder.open(config, run_dir / "data", run_dir / "index", ranks.rank, ranks.world_size, [2])
    before = engine.evaluate(batches.heldout().micro_batches)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    row = evaluate(engine, batches, lambda: None)
    after = engine.evaluate(batches.heldout().micro_batches)
    more_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
    engine.destroy()
    return {"row": row, "unchanged": before == after, "graphs": graphs, "more_graphs": more_graphs}


def begin_training(ranks: Ranks, settings: dict[str, Any]) -> dict[str, Any]:
    """Return an engine's initial weights, and the most elements of the model that this rank held while setting them."""
    config = TrainingConfig.model_validate(settings)
    model = build_model_on_meta(config.model, VOCABULARY)
    draw, most = make_param_init(model, config.seed), 0

    def fill(name: str, parameter: torch.Tensor) -> None:
        nonlocal most
        draw(name, parameter)
        most = max(most, sum(each.numel() for each in model.parameters() if not each.is_meta))

    engine = Engine(config, model, ranks, 1, fill)
    state = {name: tensor.numpy().copy() for name, tensor in engine.state()[0].items()}
    engine.destroy()
    return {"most": most, "shapes": engine.parameters, "state": state}


def refusal_at_start(ranks: Ranks, run_dir: Path) -> str:
    """Start a new run; returns the message of this rank's refusal."""
    try:
        weights_at_start(ranks, run_dir)
    except ValueError as error:
        return str(error)
    return ""


def weights_at_start(ranks: Ranks, run_dir: Path) -> tuple[dict[str, np.ndarray], str | None]:
    """Return a new run's weights, flat, by name, on the only rank; and the hash of their origin."""
    data = open_dataset(run_dir / "data").manifest
    started = load_engine(read_config(run_dir), run_dir, data, ranks, 1, -1)
    tensors, _, _ = started.engine.state()
    started.engine.destroy()
    weights = {name: tensor.numpy().copy() for name, tensor in tensors.items() if name.startswith("weight/")}
    return {name[len("weight/") : -len("@0")]: array for name, array in weights.items()}, started.parent


def checksums_of_initial_state(ranks: Ranks, settings: dict[str, Any]) -> str:
    """Return the checksums of a state that the ranks divide as the settings say; moments are not zero."""
    config = TrainingConfig.model_validate(settings)
    model = build_model_on_meta(config.model, VOCABULARY)
    engine = Engine(config, model, ranks, 1, make_param_init(model, config.seed))
    state = engine.state()[0]
    for name, tensor in state.items():
        start = int(name.rpartition("@")[2])
        if not name.startswith("weight/"):
            tensor.copy_(torch.arange(start, start + tensor.numel()))
    return state_checksums(ranks, engine.state_names, state)


def message_of_check(ranks: Ranks, settings: dict[str, Any], fault: str) -> str | None:
    """Train a step, plant a fault on rank 1, and return what the check of the replicas says; None: it finds nothing."""
    config = TrainingConfig.model_validate(settings)
    model = build_model_on_meta(config.model, VOCABULARY)
    engine = Engine(config, model, ranks, 1, make_param_init(model, config.seed))
    (batch,) = some_batches(config.seed, 0, 1, 16)
    engine.forward_backward(batch, {name: float(count * ranks.world_size) for name, count in batch.counts.items()})
    engine.step(config.phases[0].lr)
    step = 1
    if ranks.rank == 1:
        tensors = dict(engine.replicated_tensors())
        if fault in tensors:
            tensor = tensors[fault]
            integers = tensor.detach().view(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
            integers[5] ^= 1  # the lowest bit of its mantissa
        elif fault == "betas":
            engine._optimizer.param_groups[0]["betas"] = (0.9, 0.98)
        elif fault == "step":
            step = 2
        elif fault == "loss_scale":
            engine._scaler.cur_scale = 2.0
        else:
            assert fault == "none"
    else:
        list(engine.replicated_tensors())  # in stage 3 it may be collective
    facts = {"step": step, **engine.metrics(), "changed hyperparameters": engine.changed_hyperparameters()}
    try:
        check_replicas(ranks, engine.replicated_tensors(), facts, 1)
    except InconsistentStateError as error:
        return str(error)
    finally:
        engine.destroy()
    return None


def message_of_installed(ranks: Ranks, other: bool) -> str | None:
    """What the comparison of installed software says, with another version on the last rank or not."""
    installed = installed_versions()
    before = installed["torch"]
    if other and ranks.rank == ranks.world_size - 1:
        installed["torch"] = "1.0"
    try:
        check_installed(ranks)
    except UserError as error:
        return str(error)
    finally:
        installed["torch"] = before
    return None


def message_of_own_folders(ranks: Ranks, run_dirs: list[Path]) -> str:
    """Run as a worker, each rank in a folder of its own; returns the message of this rank's failure."""
    folder = run_dirs[ranks.rank]
    build_indexes(folder / "index", open_dataset(folder / "data"), read_config(folder))
    try:
        run_worker(ranks, folder)
    except InconsistentStateError as error:
        return str(error)
    return ""


def run_worker_with_fault(ranks: Ranks, run_dir: Path, step: int, fault: str) -> str:
    """Run as a worker with a fault in a step; returns the message of this rank's failure.

    Args:
        fault: "weight" flips the lowest bit of one of rank 1's weights, of those that the model computes with;
            "exp_avg" and "master" one of this moment, and of the fp32 weights that it owns; "product" makes rank 1
            compute with another weight in this step; "gradient" flips a bit of one element of its gradient;
            "batch" gives rank 1 the samples of another step; "betas" sets
            them on all ranks, and "betas of a step" for this step alone.
    """
    update, forward, batch_of = Engine.step, Engine.forward_backward, BatchBuilder.step
    done = 0

    def with_fault_in_update(engine: Engine, lr: float) -> StepResult:
        nonlocal done
        (group, *_), done = engine._optimizer.param_groups, done + 1
        before = group["betas"]
        if done == step and fault.startswith("betas"):
            group["betas"] = (0.9, 0.98)
        result = update(engine, lr)
        if fault == "betas of a step":
            group["betas"] = before
        if done == step and ranks.rank == 1 and fault in ("exp_avg", "master"):
            owned = {"exp_avg": "exp_avg", "master": "weight"}[fault]
            tensor = next(each for name, each in engine.state()[0].items() if name.startswith(f"{owned}/layers.1"))
            tensor.view(torch.int32)[7] ^= 1
        if done == step and ranks.rank == 1 and fault == "weight":
            engine.module.get_parameter(A_WEIGHT).detach().view(torch.int32)[3, 4] ^= 1
        return result

    def with_fault_in_product(engine: Engine, batch: Batch, global_counts: dict[str, float]) -> dict[str, Tensor]:
        if done != step - 1 or ranks.rank != 1 or fault not in ("product", "gradient"):
            return forward(engine, batch, global_counts)
        if fault == "gradient":
            flipping = engine.module.get_parameter(A_WEIGHT).register_hook(_with_flipped_bit)
            sums = forward(engine, batch, global_counts)
            flipping.remove()
            return sums
        weight = engine.module.get_parameter(A_WEIGHT).detach()
        before = weight.clone()
        weight[3, 4] += 0.01
        sums = forward(engine, batch, global_counts)
        weight.copy_(before)
        return sums

    def other_batch(builder: BatchBuilder, number: int) -> RankBatch:
        is_wrong = fault == "batch" and number == step - 1 and ranks.rank == 1
        return replace(batch_of(builder, number + 1), step=number) if is_wrong else batch_of(builder, number)

    with (
        replaced(Engine, step=with_fault_in_update, forward_backward=with_fault_in_product),
        replaced(BatchBuilder, step=other_batch),
    ):
        try:
            run_worker(ranks, run_dir)
        except InconsistentStateError as error:
            return str(error)
    return ""


def _with_flipped_bit(gradient: Tensor) -> Tensor:
    flipped = gradient.clone()
    flipped.view(torch.int32)[3, 4] ^= 1 << 12  # the lowest ones may be rounded away in the sum over the ranks
    return flipped


def run_worker_to(ranks: Ranks, run_dir: Path, last: int) -> int:
    """Run as a worker until a step; returns the exit status."""
    os.environ[LAST_STEP] = str(last)
    try:
        return run_worker(ranks, run_dir)
    finally:
        del os.environ[LAST_STEP]
