"""Checkpoints of a run: list and verify them, average them, export them to Hugging Face's format and import from it.

An import and an average are checkpoints of weights alone.
"""

import os
import re
import secrets
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from multihop.cluster.console import progress_line
from multihop.common.errors import UserError
from multihop.common.files import sync
from multihop.common.storage import open_folder
from multihop.data_prep.tokenizers.export import export_tokenizer
from multihop.data_prep.tokenizers.export_marian import export_marian_tokenizers
from multihop.pretrain.checkpoint.average import average, newest_committed
from multihop.pretrain.checkpoint.huggingface_config import read_source_vocab_size
from multihop.pretrain.checkpoint.huggingface_export import export_model
from multihop.pretrain.checkpoint.huggingface_import import import_model, is_huggingface
from multihop.pretrain.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    folder_of_step,
    read_checkpoint_manifest,
)
from multihop.pretrain.checkpoint.verify import find_damage, list_steps
from multihop.pretrain.checkpoint.writer import CheckpointWriter
from multihop.pretrain.models.build import build_model_on_meta, init_parameter
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import FAMILIES, family_module, family_of_original_checkpoint
from multihop.pretrain.run.find_checkpoint import checkpoints_at, find_checkpoint, run_dir_of

_SET_ASIDE = re.compile(r"step-\d+\.damaged-\w+")
NEVER_COMMITTED = "never committed: it is ignored, and the next start of its run removes the run's files in it"
_IMPORT_SEED = 1
"""Seed of the weights that an imported model does not have."""


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint as its manifest describes it, or a folder without a manifest and the reason."""

    folder: str
    """Name of its folder."""
    committed: bool
    note: str = ""
    step: int | None = None
    date: str | None = None
    """Local time of the commit, ISO 8601."""
    ranks: int | None = None
    zero_stage: int | None = None
    parameters: int | None = None
    """Number of elements of all parameters."""
    bytes: int | None = None
    tokens: int | None = None
    audit: str | None = None
    """What its newest audit found; None: it was not audited."""


@dataclass(frozen=True)
class VerifyResult:
    """Result of reading every byte of a checkpoint."""

    folder: str
    good: bool
    damages: list[str]
    """One sentence for each damaged file."""
    note: str = ""


def list_checkpoints(
    checkpoints: str, audits: Mapping[tuple[int, str], str] = MappingProxyType({})
) -> list[ListedCheckpoint]:
    """Return all folders of steps, oldest first, and then those that were renamed because they are damaged.

    Args:
        audits: what the newest audit of each checkpoint found, by the checkpoint's step and content hash.
    """
    rows = [_describe(checkpoints, step, audits) for step in list_steps(checkpoints)]
    aside = [name for name in open_folder(checkpoints).names() if _SET_ASIDE.fullmatch(name)]
    return rows + [
        ListedCheckpoint(name, False, "renamed because it is damaged; remove it when you have looked at it")
        for name in aside
    ]


def verify_checkpoints(checkpoints: str) -> list[VerifyResult]:
    """Read all bytes of all checkpoints, oldest first."""
    steps, results = list_steps(checkpoints), []
    with progress_line("verify   ") as line:
        for done, step in enumerate(steps):
            line.update(done, len(steps), f"step {step}")
            results.append(_verify_one(folder_of_step(checkpoints, step)))
        line.update(len(steps), len(steps))
    return results


def _describe(checkpoints: str, step: int, audits: Mapping[tuple[int, str], str]) -> ListedCheckpoint:
    folder = open_folder(folder_of_step(checkpoints, step))
    name = folder.location.rsplit("/", 1)[-1]
    if folder.size(MANIFEST) is None:
        return ListedCheckpoint(name, False, NEVER_COMMITTED, step)
    try:
        manifest = read_checkpoint_manifest(folder.location)
    except UserError as error:
        return ListedCheckpoint(name, False, str(error), step)
    return ListedCheckpoint(
        folder=name,
        committed=True,
        step=step,
        date=datetime.fromtimestamp(folder.modified_at(MANIFEST)).isoformat(timespec="seconds"),
        ranks=manifest.world_size,
        zero_stage=manifest.zero_stage,
        parameters=sum(prod(shape) for shape in manifest.parameters.values()),
        bytes=sum(entry.bytes for entry in manifest.files),
        tokens=manifest.tokens,
        audit=audits.get((step, manifest.content_hash())),
    )


def _verify_one(location: str) -> VerifyResult:
    name = location.rsplit("/", 1)[-1]
    if open_folder(location).size(MANIFEST) is None:
        return VerifyResult(name, True, [], NEVER_COMMITTED)
    try:
        sentences = find_damage(location, read_checkpoint_manifest(location))
    except UserError as error:
        sentences = [str(error)]
    return VerifyResult(name, not sentences, sentences)


@dataclass(frozen=True)
class Exported:
    """The checkpoint that was exported."""

    checkpoint: str
    step: int
    model: ModelConfig
    skipped: list[str]
    """The reasons why newer checkpoints were skipped."""


@dataclass(frozen=True)
class Imported:
    """The checkpoint that was written, and what the source lacked."""

    checkpoint: str
    model: ModelConfig
    vocab_size: int
    initialized: list[str]
    """Parameters that the source does not have: initialized at random."""


def export_checkpoint(location: str, out: Path, step: int | None = None) -> Exported:
    """Write a checkpoint's weights, sizes and tokenizer to the directory `out`, which appears when it is complete.

    Args:
        location: a run's directory, its checkpoints' directory or s3://BUCKET/PREFIX, or the directory of one step.
        step: step of the checkpoint; None: the newest good one.

    Raises:
        UserError: there is no such checkpoint or no data beside it, `out` is not empty, or the package tokenizers is
            not installed.
    """
    with _create_directory(out) as temporary:
        checkpoint = find_checkpoint(location, step)
        model, data, folder = checkpoint.model, checkpoint.data, checkpoint.data_folder
        family, info = FAMILIES[model.family], data.output_tokenizer
        if family.translates:
            source, *target = [(folder / each.file, each) for each in data.tokenizers]
            export_marian_tokenizers(source, target[0] if target else None, model.max_positions, temporary)
        else:
            export_tokenizer(
                folder / info.file, info, family.has_token_types, model.max_positions, temporary, family.cls_last
            )
        size = info.vocab_size
        export_model(checkpoint.location, model, size, info.special_ids, temporary, data.source_vocab_size)
    return Exported(checkpoint.location, checkpoint.manifest.step, model, checkpoint.skipped)


def import_checkpoint(source: Path, out: Path) -> Imported:
    """Write the weights of a Hugging Face directory, or of one in the layout of a family's authors, as a checkpoint of
    step 0 to the directory `out`.

    Raises:
        UserError: `source` is not such a directory or its model is of no known family, or `out` is not empty.
    """
    with _create_directory(out) as temporary:
        family = None if is_huggingface(source) else family_of_original_checkpoint(source)
        if family is None:
            model, vocab_size, weights = import_model(source)
        else:
            model, vocab_size, weights = family_module(family, "original_checkpoint").read_weights(source)
        initialized, shapes = [], {}
        source_vocab_size = read_source_vocab_size(source) if family is None else None
        on_meta = build_model_on_meta(model, vocab_size, source_vocab_size)
        for name, outline in on_meta.named_parameters():
            shapes[name] = list(outline.shape)
            if name not in weights:
                weights[name] = torch.empty(outline.shape)
                init_parameter(on_meta, name, weights[name], _IMPORT_SEED)
                initialized.append(name)
        manifest = CheckpointManifest(
            step=0,
            tokens=0,
            updates=0,
            world_size=1,
            zero_stage=0,
            parameters=shapes,
            recipe={"model": model.model_dump(mode="json")},
            data_fingerprint="",
        )
        _save_weights(temporary, {name: weights[name] for name in shapes}, manifest, "import")
    return Imported(folder_of_step(str(out), 0), model, vocab_size, initialized)


def average_checkpoints(location: str, last: int, out: Path) -> str:
    """Write the mean of the newest `last` checkpoints at `location` as a checkpoint of weights alone to the directory
    `out`; returns its location. If `out` is outside the run's directory, it gets a link to the data, for the tokenizer.

    Raises:
        UserError: there are fewer, one is damaged, or `out` is not empty.
    """
    with _create_directory(out) as temporary:
        newest, means = average(newest_committed(checkpoints_at(location), last))
        changed = {"world_size": 1, "zero_stage": 0, "parent": newest.content_hash(), "mlflow_run_id": None}
        manifest = newest.model_copy(update={**changed, "files": [], "kinds": [], "stripes": None})
        _save_weights(temporary, means, manifest, "average")
        run_dir = run_dir_of(location)
        if (run_dir / "data").exists() and run_dir_of(str(out)) != run_dir:
            (temporary / "data").symlink_to((run_dir / "data").resolve(), target_is_directory=True)
    return folder_of_step(str(out), newest.step)


def _save_weights(checkpoints: Path, weights: dict[str, Tensor], manifest: CheckpointManifest, who: str) -> None:
    run = uuid.uuid4().hex  # its own id, so that no run's retention takes it for one of its checkpoints
    writer = CheckpointWriter(str(checkpoints), 0, 1, f"{run[:8]}-{who}", keep=1)
    slices = {f"weight/{name}@0": weight.reshape(-1) for name, weight in weights.items()}
    writer.save(slices, manifest.model_copy(update={"run": run}))
    writer.wait()


@contextmanager
def _create_directory(out: Path) -> Iterator[Path]:
    """A temporary directory beside `out`: synced and renamed to it when the block succeeds, removed when it raises."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not an empty directory; give an output directory that is absent or empty")
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    temporary = out.absolute().with_name(f".{out.absolute().name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            sync(path)
        os.rename(temporary, out)
        sync(out.absolute().parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
