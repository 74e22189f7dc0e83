"""Where a run starts from: its own newest checkpoint, another run's weights, or random ones."""

import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from data_prep.manifest import Manifest
from pretrain.changes import allowed_in, binding_differences, check_allowed, completed, training_part
from pretrain.checkpoint import CheckpointManifest, CheckpointReader, folder_of_step, newest_good, verify
from pretrain.config import TrainingConfig
from pretrain.engine import Engine
from pretrain.huggingface import content_hash, import_model, is_huggingface
from pretrain.loop import Progress
from pretrain.models import Model, draw, first_weights, outline_model
from pretrain.ranks import Ranks
from pretrain.run_files import checkpoints_of, read_config

_READS_AT_ONCE = 16
"""A bucket answers many requests in the time of one; what is read ahead takes memory."""

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
    model = outline_model(config.model, data.tokenizer.vocab_size)
    if resume_from < 0 and config.model.init_from is None:
        return Start(
            Engine(config, model, ranks, micro_batch, first_weights(config.model, config.seed)), Progress(), None
        )
    own = resume_from >= 0
    if not own and is_huggingface(Path(config.model.init_from or "")):
        return _begin_with_huggingface(config, model, data, ranks, micro_batch)
    folder = folder_of_step(checkpoints_of(run_dir, config), resume_from) if own else _parent(config, ranks)
    with CheckpointReader(folder) as reader:
        saved = reader.manifest
        if own:
            _check_unchanged(saved, config, data.fingerprint, run_dir)
        shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        _check_fits(saved, shapes, data, folder)
        engine = Engine(config, model, ranks, micro_batch)
        _restore(engine, reader, with_state=own)
    log.info("%s %s: this rank read %d bytes", "goes on from" if own else "begins with", folder, reader.bytes_read)
    if not own:
        return Start(engine, Progress(), saved.content_hash(), reader.bytes_read)
    progress = Progress(saved.step, saved.tokens, saved.skipped, saved.skipped_in_a_row)
    return Start(engine, progress, saved.parent, reader.bytes_read)


def _begin_with_huggingface(
    config: TrainingConfig, model: Model, data: Manifest, ranks: Ranks, micro_batch: int
) -> Start:
    """With the weights of a folder of Hugging Face's; heads that it does not have are drawn as in any new run."""
    source = Path(config.model.init_from or "")
    theirs, vocab_size, weights = import_model(source)
    sizes = {"family", "layers", "hidden", "embedding", "heads", "intermediate", "max_positions"}
    there = {**theirs.model_dump(include=sizes), "vocab_size": vocab_size}
    here = {**config.model.model_dump(include=sizes), "vocab_size": data.tokenizer.vocab_size}
    if differing := [key for key in there if there[key] != here[key]]:
        raise ValueError(
            f"model.init_from={source} has {', '.join(f'{key}={there[key]}' for key in differing)}, and this run "
            f"{', '.join(f'{key}={here[key]}' for key in differing)}; give model the sizes of that one, and data its "
            "tokenizer"
        )
    lacking = [name for name, _ in model.named_parameters() if name not in weights]
    if lacking:
        log.info("%s has no %s: drawn with seed %d", source, ", ".join(lacking), config.seed)
    for name in lacking:
        weights[name] = torch.empty(model.get_parameter(name).shape)
        draw(config.model, name, weights[name], config.seed)
    engine = Engine(config, model, ranks, micro_batch)
    wanted = [(name, slice(start, start + numel)) for _, name, start, numel in engine.wanted(with_state=False)]
    engine.restore((weights[name].reshape(-1)[part] for name, part in wanted), None, {})
    log.info("begins with %s", source)
    return Start(engine, Progress(), content_hash(source))


def _restore(engine: Engine, reader: CheckpointReader, with_state: bool) -> None:
    saved = reader.manifest
    wanted = engine.wanted(with_state)
    with ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="restore") as threads:
        ahead = deque(threads.submit(reader.read, *each) for each in wanted[:_READS_AT_ONCE])
        left = iter(wanted[_READS_AT_ONCE:])

        def values() -> Iterator[Tensor]:
            while ahead:
                yield ahead.popleft().result()
                ahead.extend(threads.submit(reader.read, *each) for each in islice(left, 1))

        engine.restore(values(), saved.updates if with_state else None, saved.counters)


def _check_unchanged(saved: CheckpointManifest, config: TrainingConfig, data_fingerprint: str, run_dir: Path) -> None:
    allowed = allowed_in(run_dir)
    if saved.recipe is not None:
        check_allowed(binding_differences(completed(saved.recipe), training_part(config)), allowed, str(run_dir))
    if saved.data_fingerprint != data_fingerprint and "data" not in allowed:
        raise ValueError(
            f"{run_dir} was trained on other data (fingerprint {saved.data_fingerprint[:12]}, now "
            f"{data_fingerprint[:12]}); bring the data back, set name=… for another run, or add --allow-change data"
        )


def _parent(config: TrainingConfig, ranks: Ranks) -> str:
    """The folder of the checkpoint that `model.init_from` names, or the newest good one of the run it names."""
    given = config.model.init_from
    assert given is not None
    run_dir = Path(given)
    location = checkpoints_of(run_dir, read_config(run_dir)) if (run_dir / "recipe.json").exists() else given
    step = -1
    if ranks.rank == 0:
        found, _ = newest_good(location)
        step = found.step if found else -1
        if found is None:
            try:
                verify(given)
            except ValueError as error:
                raise ValueError(f"model.init_from={given} holds no whole checkpoint: {error}") from None
    step = ranks.from_first(step)
    return folder_of_step(location, step) if step >= 0 else given


def _check_fits(saved: CheckpointManifest, shapes: dict[str, list[int]], data: Manifest, folder: str) -> None:
    for name in [*shapes, *saved.parameters]:
        there, here = saved.parameters.get(name), shapes.get(name)
        if there != here:
            raise ValueError(
                f"{folder} has {name} of shape {there}, and this model's is {here} (None: there is none); give model, "
                "objective and tokenizer the sizes of that run's"
            )
    if saved.tokenizer_sha256 not in (None, data.tokenizer.sha256):
        raise ValueError(
            f"{folder} knows the pieces of another tokenizer ({saved.tokenizer_sha256[:12]}) than the data's "
            f"({data.tokenizer.sha256[:12]}): the same numbers would mean other words; use data of that tokenizer"
        )
