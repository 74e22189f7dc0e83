"""Jobs of ranks on tensors as large as those of real models. Each job runs on every rank at once."""

import hashlib
from typing import Any

from rank_jobs import some_batches

from multihop.common.counter_rng import key_of
from multihop.pretrain.checkpoint.manifest import CheckpointManifest, folder_of_step
from multihop.pretrain.checkpoint.reader import CheckpointReader
from multihop.pretrain.checkpoint.writer import CheckpointWriter
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.phases import share_of_rank
from multihop.pretrain.engine.engine import Engine
from multihop.pretrain.engine.ranks import Ranks
from multihop.pretrain.models.build import build_model_on_meta, make_param_init
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.optim.lamb import Lamb
from multihop.pretrain.run.load_engine import restore


def go_on(
    ranks: Ranks, settings: dict[str, Any], vocab_size: int, checkpoints: str | None, first: int, steps: int, out: str
) -> dict[str, Any]:
    """Run steps `first` to `first + steps - 1` of a training, and save the state after the last one to `out`.

    Args:
        checkpoints: folder of the checkpoint of step `first`; None: begin with initial weights.

    Returns:
        The loss and the gradient's norm of each step; the trust ratios of the last step; the hash of this rank's state.
    """
    config = TrainingConfig.model_validate(settings)
    model = build_model_on_meta(config.model, vocab_size)
    engine = Engine(config, model, ranks, 1, None if checkpoints else make_param_init(model, config.seed))
    if checkpoints:
        with CheckpointReader(folder_of_step(checkpoints, first)) as reader:
            restore(engine, reader.manifest, reader.read, with_state=True)
    sequences = config.phases[0].global_batch_size
    losses, norms = [], []
    for step in range(first, first + steps):
        pairs = some_batches(config.seed, step, sequences, config.phases[0].seq_len, vocab_size)
        total = {"mlm": float(sum(len(batch.targets) for batch in pairs)), "nsp": float(sequences)}
        mine = pairs[share_of_rank(sequences, ranks.rank, ranks.world_size)]
        loss = 0.0
        for number in range(-(-sequences // ranks.world_size)):
            batch = mine[number] if number < len(mine) else pairs[0]
            if number >= len(mine):
                batch = Batch(batch.inputs, batch.targets[:0], dict.fromkeys(batch.counts, 0), 0)
            sums = engine.forward_backward(batch, total)
            loss += sum(float(sums[name]) / total[name] for name in total)
        taken = engine.step(config.phases[0].lr)
        assert taken.applied
        losses.append(ranks.all_reduce_sum({"loss": loss})["loss"])
        norms.append(taken.grad_norm)
    state, updates, counters = engine.state()
    run = f"{key_of('run', out):016x}"[:8]
    writer = CheckpointWriter(out, ranks.rank, ranks.world_size, f"{run}-00000000", keep=9)
    manifest = CheckpointManifest(
        step=first + steps, tokens=0, updates=updates, counters=counters, world_size=ranks.world_size,
        zero_stage=config.engine.zero_stage, data_fingerprint="d",
        parameters={name: list(shape) for name, shape in engine.parameters.items()},
    )  # fmt: skip
    writer.save(state, manifest)
    writer.wait()
    ranks.broadcast(0)
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(state[name].numpy().tobytes())
    optimizer = engine._optimizer
    ratios = optimizer.trust_ratios() if isinstance(optimizer, Lamb) else {}
    engine.destroy()
    return {"losses": losses, "norms": norms, "ratios": ratios, "state": digest.hexdigest()}
