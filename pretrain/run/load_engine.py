"""Builds a run's engine and loads its state: from its newest checkpoint, another model, or random weights."""

import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from multihop.common.errors import UserError
from multihop.data_prep.dataset.manifest import Manifest, read_token_counts
from multihop.pretrain.checkpoint.added_tokens import Read, extended_parameters, fit_vocabulary, read_with_added_rows
from multihop.pretrain.checkpoint.huggingface_config import read_source_vocab_size
from multihop.pretrain.checkpoint.huggingface_import import content_hash, import_model, is_huggingface
from multihop.pretrain.checkpoint.manifest import CheckpointManifest, TrainState, folder_of_step
from multihop.pretrain.checkpoint.reader import CheckpointReader
from multihop.pretrain.checkpoint.verify_shared import newest_good_shared, verify_shared
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.word_vectors import open_word_vectors
from multihop.pretrain.engine.engine import Engine
from multihop.pretrain.engine.ranks import Ranks
from multihop.pretrain.models.build import Model, ParamInit, build_model_on_meta, make_param_init
from multihop.pretrain.run.changes import allowed_in, check_allowed, fill_recorded_part, locked_changes, recorded_part
from multihop.pretrain.run.check_parent import check_same_model, trained_length
from multihop.pretrain.run.check_start import check_init_keys
from multihop.pretrain.run.files import checkpoints_of, read_config
from multihop.pretrain.run.find_checkpoint import recorded_model
from multihop.pretrain.run.heldout import unigram_log_probabilities

_PREFETCHED_SLICES = 16
"""Number of slices that are read ahead, which hides the latency of a bucket; each takes memory."""

log = logging.getLogger("multihop")


@dataclass(frozen=True)
class LoadedEngine:
    """An engine with its weights and moments, and the progress of the run."""

    engine: Engine
    state: TrainState
    parent: str | None
    """Content hash of the checkpoint that the run's first weights came from."""
    bytes_read: int = 0
    """Bytes that this rank read from a checkpoint."""
    files_opened: int = 0
    """Files of a checkpoint that this rank opened."""


def load_engine(
    config: TrainingConfig, run_dir: Path, data: Manifest, ranks: Ranks, micro_batch_size: int, resume_from: int
) -> LoadedEngine:
    """Build an engine and load its state from the run's checkpoint of step `resume_from`, or initialize it if negative.

    Raises:
        UserError: The recipe or the data changed without permission, or `model.init_from` does not fit.
    """
    model = build_model_on_meta(config.model, data.output_tokenizer.vocab_size, data.source_vocab_size)
    if resume_from < 0 and config.model.init_from is None:
        engine = Engine(config, model, ranks, micro_batch_size, _param_init(config, run_dir, model, data))
        return LoadedEngine(engine, TrainState(), None)
    is_resumed = resume_from >= 0
    if not is_resumed and is_huggingface(Path(config.model.init_from or "")):
        return _load_huggingface(config, run_dir, model, data, ranks, micro_batch_size)
    if not is_resumed:
        check_init_keys(config.model)
    folder = (
        folder_of_step(checkpoints_of(run_dir, config), resume_from)
        if is_resumed
        else _parent_checkpoint(config, ranks)
    )
    with CheckpointReader(folder) as reader:
        saved = reader.manifest
        if is_resumed:
            _check_unchanged(saved, config, data.fingerprint, run_dir)
        shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        extended = [] if is_resumed else extended_parameters(saved.parameters, shapes, data.tokenizer)
        if not is_resumed and (theirs := recorded_model(saved)) is not None:
            has_same_shapes = all(saved.parameters.get(name) == shapes[name] for name in shapes.keys() - {*extended})
            check_same_model(folder, theirs, trained_length(saved, theirs), config, has_same_shapes, {}, {})
        _check_fits(saved, shapes, extended, data, folder)
        engine = Engine(config, model, ranks, micro_batch_size)
        read = read_with_added_rows(reader.read, shapes, extended, data.tokenizer)
        restore(engine, saved, read, with_state=is_resumed)
    log.info(
        "%s %s: this rank opened %d of its %d files and read %d bytes",
        "resumes from" if is_resumed else "starts with the weights of",
        folder,
        reader.files_opened,
        len(saved.files),
        reader.bytes_read,
    )
    state = TrainState(saved.step, saved.tokens, saved.skipped, saved.skipped_in_a_row) if is_resumed else TrainState()
    parent = saved.parent if is_resumed else saved.content_hash()
    return LoadedEngine(engine, state, parent, reader.bytes_read, reader.files_opened)


def restore(engine: Engine, saved: CheckpointManifest, read: Read, with_state: bool) -> None:
    """Set an engine's weights from a checkpoint of any number of ranks and ZeRO stage. A collective call.

    Only the slices that this rank needs are read.

    Args:
        read: Reads the checkpoint.
        with_state: Also set the optimizer's state.
    """
    slices = engine.slices_to_restore(with_state)
    with ThreadPoolExecutor(_PREFETCHED_SLICES, thread_name_prefix="restore") as threads:
        ahead = deque(threads.submit(read, *each) for each in slices[:_PREFETCHED_SLICES])
        remaining = iter(slices[_PREFETCHED_SLICES:])

        def values() -> Iterator[Tensor]:
            while ahead:
                yield ahead.popleft().result()
                ahead.extend(threads.submit(read, *each) for each in islice(remaining, 1))

        engine.restore(values(), saved.updates if with_state else None, saved.counters)


def _param_init(config: TrainingConfig, run_dir: Path, model: Model, data: Manifest) -> ParamInit:
    """A function that sets a new model's initial weights, including those computed from the training text."""
    unigram = vectors = None
    if config.model.needs_token_counts:
        unigram = unigram_log_probabilities(read_token_counts(run_dir / "data", data))
    if config.model.needs_word_vectors:
        vectors = open_word_vectors(run_dir / "index", data.fingerprint, config.model.embedding_width)
    return make_param_init(model, config.seed, unigram, vectors)


def _load_huggingface(
    config: TrainingConfig, run_dir: Path, model: Model, data: Manifest, ranks: Ranks, micro_batch_size: int
) -> LoadedEngine:
    """An engine with the weights of a Hugging Face model; heads that it lacks are initialized as in a new run."""
    source = Path(config.model.init_from or "")
    weights = _huggingface_weights(source, config, model, data)
    missing = [name for name, _ in model.named_parameters() if name not in weights]
    check_init_keys(config.model, missing)
    if missing:
        log.info("%s has no %s: initialized at random with seed %d", source, ", ".join(missing), config.seed)
    param_init = _param_init(config, run_dir, model, data)
    for name in missing:
        weights[name] = torch.empty(model.get_parameter(name).shape)
        param_init(name, weights[name])
    engine = Engine(config, model, ranks, micro_batch_size)
    slices = [
        (name, slice(start, start + numel)) for _, name, start, numel in engine.slices_to_restore(with_state=False)
    ]
    engine.restore((weights[name].reshape(-1)[part] for name, part in slices), None, {})
    log.info("starts with the weights of %s", source)
    return LoadedEngine(engine, TrainState(), content_hash(source))


def _huggingface_weights(source: Path, config: TrainingConfig, model: Model, data: Manifest) -> dict[str, Tensor]:
    """The weights of a Hugging Face model by our names, with rows for the tokens that were added to its vocabulary.

    Raises:
        UserError: It is a model of other sizes, or of another vocabulary.
    """
    imported, vocab_size, stored = import_model(source)
    weights = fit_vocabulary(stored, model, data.tokenizer)
    if weights["word.weight"].shape != stored["word.weight"].shape:
        vocab_size = data.tokenizer.vocab_size
        log.info(
            "the word embeddings of %s have %d rows, and the tokenizer has %d tokens: padding rows are dropped, and "
            "added tokens get new rows",
            source,
            len(stored["word.weight"]),
            vocab_size,
        )
    theirs = {"vocab_size": vocab_size, "source's vocab_size": read_source_vocab_size(source)}
    ours = {"vocab_size": data.output_tokenizer.vocab_size, "source's vocab_size": data.source_vocab_size}
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    has_same_shapes = all(list(weights[name].shape) == shapes[name] for name in weights.keys() & shapes.keys())
    check_same_model(source, imported, imported.max_positions, config, has_same_shapes, theirs, ours)
    return weights


def _check_unchanged(saved: CheckpointManifest, config: TrainingConfig, data_fingerprint: str, run_dir: Path) -> None:
    allowed = allowed_in(run_dir)
    if saved.recipe is not None:
        changed = locked_changes(fill_recorded_part(saved.recipe), recorded_part(config), TrainingConfig)
        check_allowed(changed, TrainingConfig, allowed, str(run_dir))
    if saved.data_fingerprint != data_fingerprint and "data" not in allowed:
        raise UserError(
            f"{run_dir} was trained on other data (fingerprint {saved.data_fingerprint[:12]}, now "
            f"{data_fingerprint[:12]}); restore that data, set name=… for another run, or add --allow-change data"
        )


def _parent_checkpoint(config: TrainingConfig, ranks: Ranks) -> str:
    """The location of the checkpoint at `model.init_from`, or of the newest good one if that is a run."""
    parent = config.model.init_from
    assert parent is not None
    run_dir = Path(parent)
    location = checkpoints_of(run_dir, read_config(run_dir)) if (run_dir / "recipe.json").exists() else parent
    saved, rejected = newest_good_shared(location, ranks)
    if saved is not None:
        return folder_of_step(location, saved.step)
    try:
        verify_shared(parent, ranks)
    except ValueError as error:
        raise UserError(f"model.init_from={parent} has no good checkpoint: {'; '.join(rejected) or error}") from None
    return parent


def _check_fits(
    saved: CheckpointManifest, shapes: dict[str, list[int]], extended: list[str], data: Manifest, location: str
) -> None:
    """Check that a checkpoint has these parameters, and was trained with the data's tokenizer.

    Args:
        shapes: The model's parameters and their shapes.
        extended: Those that get rows for added tokens; the checkpoint has the tokenizer without them.

    Raises:
        UserError: It does not, or was not.
    """
    for name in [*shapes, *saved.parameters]:
        stored, expected = saved.parameters.get(name), shapes.get(name)
        if stored != expected and name not in extended:
            raise UserError(
                f"{location} has {name} of shape {stored}, this model has {expected} (None: it has no such parameter); "
                "set model and objective as in that run, tokenizer.path to its tokenizer, and tokenizer.add_words for "
                "words of your texts"
            )
    tokenizer_sha256 = data.tokenizer.added.base_sha256 if extended and data.tokenizer.added else data.tokenizers_sha256
    if saved.tokenizer_sha256 not in (None, tokenizer_sha256):
        raise UserError(
            f"{location} was trained with a different tokenizer ({saved.tokenizer_sha256[:12]}) than the data "
            f"({tokenizer_sha256[:12]}): the same ids would mean other tokens; set tokenizer.path to the tokenizer of "
            "that run, in its folder data"
        )
