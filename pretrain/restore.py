"""Where a run starts from: its own newest checkpoint, another run's weights, or random ones."""

import logging
from dataclasses import dataclass
from pathlib import Path

from data_prep.manifest import Manifest
from pretrain.changes import allowed_in, binding_differences, check_allowed, training_part
from pretrain.checkpoint import CheckpointManifest, CheckpointReader, folder_of_step, newest_good, verify
from pretrain.config import TrainingConfig
from pretrain.engine import Engine
from pretrain.loop import Progress
from pretrain.models import build_model, initialise
from pretrain.ranks import Ranks
from pretrain.run_files import checkpoints_of

log = logging.getLogger("multihop")


@dataclass(frozen=True)
class Start:
    """An engine that is set, and how far its run is."""

    engine: Engine
    progress: Progress
    parent: str | None
    """Content hash of the checkpoint that the run's first weights came from."""
    bytes_read: int = 0
    """By this rank, from a checkpoint."""


def start_engine(
    config: TrainingConfig, run_dir: Path, data: Manifest, ranks: Ranks, micro_batch: int, resume_from: int
) -> Start:
    """An engine that goes on from the run's checkpoint of step `resume_from`, or begins where that is negative.

    Raises:
        ValueError: recipe or data changed and nobody allowed it, or `model.init_from` does not fit.
    """
    model = build_model(config.model, data.tokenizer.vocab_size)
    if resume_from >= 0:
        folder = folder_of_step(checkpoints_of(run_dir, config), resume_from)
        with CheckpointReader(folder) as reader:
            saved = reader.manifest
            _check_unchanged(saved, config, data.fingerprint, run_dir)
            engine = Engine(config, model, ranks, micro_batch)
            _restore(engine, reader, with_state=True)
        log.info("goes on from %s, of which this rank read %d bytes", folder, reader.bytes_read)
        progress = Progress(saved.step, saved.tokens, saved.skipped, saved.skipped_in_a_row)
        return Start(engine, progress, saved.parent, reader.bytes_read)
    if config.model.init_from is None:
        initialise(model, config.seed)
        return Start(Engine(config, model, ranks, micro_batch), Progress(), None)
    folder = _parent(config.model.init_from, ranks)
    with CheckpointReader(folder) as reader:
        shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        _check_fits(reader.manifest, shapes, folder)
        engine = Engine(config, model, ranks, micro_batch)
        _restore(engine, reader, with_state=False)
    log.info("starts with the weights of %s", folder)
    return Start(engine, Progress(), reader.manifest.content_hash(), reader.bytes_read)


def _restore(engine: Engine, reader: CheckpointReader, with_state: bool) -> None:
    saved = reader.manifest
    engine.restore(
        lambda kind, piece: reader.read(kind, piece.name, piece.start, piece.numel),
        saved.updates if with_state else None,
        saved.counters,
    )


def _check_unchanged(saved: CheckpointManifest, config: TrainingConfig, data_fingerprint: str, run_dir: Path) -> None:
    allowed = allowed_in(run_dir)
    if saved.recipe is not None:
        check_allowed(binding_differences(saved.recipe, training_part(config)), allowed, str(run_dir))
    if saved.data_fingerprint != data_fingerprint and "data" not in allowed:
        raise ValueError(
            f"{run_dir} was trained on other data (fingerprint {saved.data_fingerprint[:12]}, now "
            f"{data_fingerprint[:12]}); bring the data back, set name=… for another run, or add --allow-change data"
        )


def _parent(init_from: str, ranks: Ranks) -> str:
    """The folder of the checkpoint that `model.init_from` names, or the newest good one of the run it names."""
    if ranks.rank == 0:
        found, _ = newest_good(f"{init_from}/checkpoints")
        step = found.step if found else -1
        if found is None:
            try:
                verify(init_from)
            except ValueError as error:
                raise ValueError(f"model.init_from={init_from} holds no whole checkpoint: {error}") from None
    step = ranks.from_first(step if ranks.rank == 0 else 0)
    return folder_of_step(f"{init_from}/checkpoints", step) if step >= 0 else init_from


def _check_fits(saved: CheckpointManifest, shapes: dict[str, list[int]], folder: str) -> None:
    if saved.parameters == shapes:
        return
    for name in [*shapes, *saved.parameters]:
        there, here = saved.parameters.get(name), shapes.get(name)
        if there != here:
            raise ValueError(
                f"model.init_from: {folder} has {name} of shape {there}, and this model's is {here} (None: there is "
                "none); give model, objective and tokenizer the sizes of that run's"
            )
