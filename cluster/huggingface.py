"""`multihop checkpoints export` and `import`: a checkpoint with its tokenizer as a Hugging Face folder, and back."""

import os
import secrets
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from cluster.checkpoints import checkpoints_at
from data_prep import manifest as data_manifest
from data_prep.files import sha256_file, sync
from data_prep.shown import shown
from data_prep.tokenizers.huggingface import export_tokenizer
from pretrain.checkpoint import MANIFEST, CheckpointManifest, folder_of_step, newest_good, read_manifest
from pretrain.checkpoint_writer import CheckpointWriter
from pretrain.config import ModelConfig
from pretrain.huggingface import export_model, import_model
from pretrain.models import draw, outline_model
from pretrain.presets import Family
from pretrain.run_files import read_config

_AUTO_CLASSES: dict[Family, str] = {
    "bert": "AutoModelForPreTraining", "albert": "AutoModelForPreTraining", "roberta": "AutoModelForMaskedLM",
    "gpt": "AutoModelForCausalLM", "gpt2": "AutoModelForCausalLM",
}  # fmt: skip
_IMPORT_SEED = 1
"""Of the weights that an imported folder does not have."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    checkpoint: str
    step: int
    model: ModelConfig
    passed_over: list[str]
    """Why newer checkpoints were not taken."""


@dataclass(frozen=True)
class Imported:
    """What was read, and what it lacked."""

    checkpoint: str
    model: ModelConfig
    vocab_size: int
    drawn: list[str]
    """Parameters that the source does not have: fresh random weights."""


def export_checkpoint(place: str, out: Path, step: int | None = None) -> Exported:
    """Write a checkpoint's weights, sizes and tokenizer to the folder `out`, which appears when it is whole.

    Args:
        place: a run's folder, its checkpoints' folder or s3://BUCKET/PREFIX, or the folder of one step.
        step: which checkpoint; None: the newest good one.

    Raises:
        ValueError: there is no such checkpoint or no data beside it, `out` is not empty, or the tokenizer's library
            is not installed.
    """
    with _appearing(out) as temporary:
        checkpoint, saved, passed_over = _find(place, step)
        run_dir = _run_of(place)
        data = _data_of(run_dir, saved)
        model = _model_of(run_dir, saved)
        tokenizer = data.tokenizer
        has_segments = model.family in ("bert", "albert")
        export_tokenizer(run_dir / "data" / tokenizer.file, tokenizer, has_segments, model.max_positions, temporary)
        export_model(checkpoint, model, tokenizer.vocab_size, tokenizer.special_ids, temporary)
    return Exported(checkpoint, saved.step, model, passed_over)


def import_checkpoint(source: Path, out: Path) -> Imported:
    """Write the weights of a Hugging Face folder as the only checkpoint, of step 0, in the folder `out`.

    Raises:
        ValueError: `source` is no such folder or its model is none of ours, or `out` is not empty.
    """
    with _appearing(out) as temporary:
        model, vocab_size, weights = import_model(source)
        drawn, shapes = [], {}
        for name, outline in outline_model(model, vocab_size).named_parameters():
            shapes[name] = list(outline.shape)
            if name not in weights:
                weights[name] = torch.empty(outline.shape)
                draw(model, name, weights[name], _IMPORT_SEED)
                drawn.append(name)
        run = uuid.uuid4().hex  # of its own: no run's retention takes it for one of its checkpoints
        manifest = CheckpointManifest(
            run=run,
            step=0,
            tokens=0,
            updates=0,
            world_size=1,
            zero_stage=0,
            parameters=shapes,
            recipe={"model": model.model_dump(mode="json")},
            data_fingerprint="",
        )
        writer = CheckpointWriter(str(temporary), 0, 1, f"{run[:8]}-import", keep=1)
        writer.save({f"weight/{name}@0": weights[name].reshape(-1) for name in shapes}, manifest)
        writer.wait()
    return Imported(folder_of_step(str(out), 0), model, vocab_size, drawn)


def show_export(place: str, out: Path, step: int | None) -> None:
    """Export, and print what was written and how to open it."""
    exported = export_checkpoint(place, out, step)
    for reason in exported.passed_over:
        print(f"passed over: {shown(reason)}")
    print(f"{exported.checkpoint} is in {out}:")
    for path in sorted(out.iterdir()):
        print(f"  {path.name:24}{path.stat().st_size:>15,} bytes")
    auto_class = _AUTO_CLASSES[exported.model.family]
    print(f"\nfrom transformers import {auto_class}, AutoTokenizer")
    print(f'model = {auto_class}.from_pretrained("{out}")')
    print(f'tokenizer = AutoTokenizer.from_pretrained("{out}")')


def show_import(source: Path, out: Path) -> None:
    """Import, and print what a recipe needs to begin with it."""
    imported = import_checkpoint(source, out)
    print(f"{source} is in {imported.checkpoint}. A recipe begins with it by:\n\nmodel:")
    for key, value in imported.model.model_dump(exclude={"preset", "init_from"}).items():
        print(f"  {key}: {value}")
    print(f"  init_from: {out}\n\nThe data's tokenizer has to have {imported.vocab_size:,} pieces that mean the same.")
    if imported.drawn:
        print(f"Not in {source}, and random now: {', '.join(imported.drawn)}")


def _find(place: str, step: int | None) -> tuple[str, CheckpointManifest, list[str]]:
    location = place.rstrip("/")
    if (Path(location) / MANIFEST).is_file():
        if step is not None:
            raise ValueError(f"{place} is one checkpoint, of which --step {step} chooses none; leave --step out")
        return location, read_manifest(location), []
    checkpoints = checkpoints_at(place)
    if step is not None:
        chosen = folder_of_step(checkpoints, step)
        return chosen, read_manifest(chosen), []
    saved, passed_over = newest_good(checkpoints)
    if saved is None:
        raise ValueError(f"{checkpoints} holds no whole checkpoint: {'; '.join(passed_over)}")
    return folder_of_step(checkpoints, saved.step), saved, passed_over


def _run_of(place: str) -> Path:
    """The run's folder: the place itself, or above its checkpoints."""
    folder = Path(place).absolute()
    return next((each for each in (folder, *folder.parents[:2]) if (each / "data").exists()), folder)


def _data_of(run_dir: Path, saved: CheckpointManifest) -> data_manifest.Manifest:
    if not (run_dir / "data").exists():
        raise ValueError(
            f"{run_dir / 'data'} is missing, which has the tokenizer; give the run's folder with its data, or run "
            "`multihop prep RECIPE`"
        )
    data = data_manifest.read_manifest(run_dir / "data")
    model = run_dir / "data" / data.tokenizer.file
    found = sha256_file(model) if model.exists() else None
    if found != data.tokenizer.sha256:
        raise ValueError(f"{model} is missing or damaged; run `multihop prep RECIPE` again")
    if saved.tokenizer_sha256 not in (None, found):
        raise ValueError(
            f"{model} is another tokenizer ({data.tokenizer.sha256[:12]}) than the checkpoint's "
            f"({str(saved.tokenizer_sha256)[:12]}); bring the run's data back"
        )
    return data


def _model_of(run_dir: Path, saved: CheckpointManifest) -> ModelConfig:
    if saved.recipe is not None:
        return ModelConfig.model_validate(saved.recipe["model"])
    return read_config(run_dir).model


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out`: synced and renamed to it when the block ends well, removed when it does not."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already and not an empty folder; give another one")
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
