"""`multihop checkpoints export` and `import`: a checkpoint with its tokenizer as a Hugging Face directory, and back;
and `average`, which writes what `import` writes: a checkpoint of weights alone."""

import os
import secrets
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from multihop.common.errors import UserError
from multihop.common.files import sync
from multihop.common.redaction import shown
from multihop.data_prep.tokenizers.export import export_tokenizer
from multihop.data_prep.tokenizers.export_marian import export_marian_tokenizers
from multihop.pretrain.checkpoint.average import average, newest_committed
from multihop.pretrain.checkpoint.huggingface_config import read_source_vocab_size
from multihop.pretrain.checkpoint.huggingface_export import export_model
from multihop.pretrain.checkpoint.huggingface_import import import_model
from multihop.pretrain.checkpoint.manifest import CheckpointManifest, folder_of_step
from multihop.pretrain.checkpoint.writer import CheckpointWriter
from multihop.pretrain.models.build import build_model_on_meta, init_parameter
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.run.find_checkpoint import checkpoints_at, find_checkpoint, run_of

_IMPORT_SEED = 1
"""Of the weights that an imported model does not have."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    checkpoint: str
    step: int
    model: ModelConfig
    skipped: list[str]
    """Why newer checkpoints were skipped."""


@dataclass(frozen=True)
class Imported:
    """What was read, and what was missing."""

    checkpoint: str
    model: ModelConfig
    vocab_size: int
    drawn: list[str]
    """Parameters that the source does not have: initialised at random."""


def export_checkpoint(place: str, out: Path, step: int | None = None) -> Exported:
    """Write a checkpoint's weights, sizes and tokenizer to the directory `out`, which appears when it is complete.

    Args:
        place: a run's directory, its checkpoints' directory or s3://BUCKET/PREFIX, or the directory of one step.
        step: which checkpoint; None: the newest good one.

    Raises:
        UserError: there is no such checkpoint or no data beside it, `out` is not empty, or the package tokenizers is
            not installed.
    """
    with _appearing(out) as temporary:
        found = find_checkpoint(place, step)
        model, data, folder = found.model, found.data, found.data_folder
        family, info = FAMILIES[model.family], data.output_tokenizer
        if family.translates:
            source, *target = [(folder / each.file, each) for each in data.tokenizers]
            export_marian_tokenizers(source, target[0] if target else None, model.max_positions, temporary)
        else:
            export_tokenizer(folder / info.file, info, family.has_token_types, model.max_positions, temporary)
        size = info.vocab_size
        export_model(found.location, model, size, info.special_ids, temporary, data.source_vocab_size)
    return Exported(found.location, found.manifest.step, model, found.skipped)


def import_checkpoint(source: Path, out: Path) -> Imported:
    """Write the weights of a Hugging Face directory as a checkpoint of step 0 to the directory `out`.

    Raises:
        UserError: `source` is not such a directory or its model is of no family here, or `out` is not empty.
    """
    with _appearing(out) as temporary:
        model, vocab_size, weights = import_model(source)
        drawn, shapes = [], {}
        on_meta = build_model_on_meta(model, vocab_size, read_source_vocab_size(source))
        for name, outline in on_meta.named_parameters():
            shapes[name] = list(outline.shape)
            if name not in weights:
                weights[name] = torch.empty(outline.shape)
                init_parameter(on_meta, name, weights[name], _IMPORT_SEED)
                drawn.append(name)
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
    return Imported(folder_of_step(str(out), 0), model, vocab_size, drawn)


def average_checkpoints(place: str, last: int, out: Path) -> str:
    """Write the mean of the newest `last` checkpoints at `place` as a checkpoint of weights alone to the directory
    `out`; its location. Outside the run's directory a link leads to the run's data, which has the tokenizer.

    Raises:
        UserError: there are fewer, one is damaged, or `out` is not empty.
    """
    with _appearing(out) as temporary:
        newest, means = average(newest_committed(checkpoints_at(place), last))
        changed = {"world_size": 1, "zero_stage": 0, "parent": newest.content_hash(), "mlflow_run_id": None}
        manifest = newest.model_copy(update={**changed, "files": [], "kinds": [], "stripes": None})
        _save_weights(temporary, means, manifest, "average")
        run_dir = run_of(place)
        if (run_dir / "data").exists() and run_of(str(out)) != run_dir:
            (temporary / "data").symlink_to((run_dir / "data").resolve(), target_is_directory=True)
    return folder_of_step(str(out), newest.step)


def _save_weights(checkpoints: Path, weights: dict[str, Tensor], manifest: CheckpointManifest, who: str) -> None:
    run = uuid.uuid4().hex  # its own id, so that no run's retention takes it for one of its checkpoints
    writer = CheckpointWriter(str(checkpoints), 0, 1, f"{run[:8]}-{who}", keep=1)
    slices = {f"weight/{name}@0": weight.reshape(-1) for name, weight in weights.items()}
    writer.save(slices, manifest.model_copy(update={"run": run}))
    writer.wait()


def show_average(place: str, last: int, out: Path) -> None:
    """Average, and print what was written."""
    made = average_checkpoints(place, last, out)
    print(f"{shown(made)} has the mean of the weights of the {last} newest checkpoints of {shown(place)}")


def show_export(place: str, out: Path, step: int | None) -> None:
    """Export, and print what was written and how to open it."""
    exported = export_checkpoint(place, out, step)
    for reason in exported.skipped:
        print(f"skipped: {shown(reason)}")
    print(f"{exported.checkpoint} was exported to {out}:")
    for path in sorted(out.iterdir()):
        print(f"  {path.name:24}{path.stat().st_size:>15,} bytes")
    auto_class = FAMILIES[exported.model.family].auto_class
    print(f"\nfrom transformers import {auto_class}, AutoTokenizer")
    print(f'model = {auto_class}.from_pretrained("{out}")')
    print(f'tokenizer = AutoTokenizer.from_pretrained("{out}")')


def show_import(source: Path, out: Path) -> None:
    """Import, and print what a recipe needs to start from it."""
    imported = import_checkpoint(source, out)
    print(f"{source} was imported to {imported.checkpoint}. To start from it, write in the recipe:\n\nmodel:")
    for key, value in imported.model.model_dump(exclude={"preset", "init_from"}).items():
        print(f"  {key}: {value}")
    print(f"  init_from: {out}\n\nThe data's tokenizer must have the same {imported.vocab_size:,} tokens and ids.")
    if imported.drawn:
        print(f"Not in {source}, initialised at random: {', '.join(imported.drawn)}")


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
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
