"""Measure what grows with the ranks that write a checkpoint: `python bench/scale_checkpoint.py checkpoint`.

The checkpoint is that of a GPT-2 8.3B as ZeRO-3 ranks write it: true names, slices, headers and sizes. The tensors'
bytes are holes of sparse files on the disk, and missing on S3; hashes are made up, except that of the one file which is
verified. Nothing else that is measured reads these bytes. `bench/restart.py` measures reading, with the bytes of a
smaller model.
"""

import hashlib
import os
from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from scale_data import Row, main, measure, s3_endpoint, with_requests

KINDS = ("exp_avg", "exp_avg_sq", "weight")
RUN = "b" * 32
"""An id that no run has."""
LAUNCH = f"{RUN[:8]}-bench"
CHECKPOINTS = 20


def checkpoint(folder: Path, ranks: int) -> Iterator[Row]:
    """Measure a checkpoint of `ranks` ranks: its commit, listing 20 of them, and resuming on 3/4 of the ranks."""
    from multihop.common.storage import open_folder
    from multihop.pretrain.checkpoint.manifest import layout_of, read_checkpoint_manifest
    from multihop.pretrain.checkpoint.verify import file_checks

    shapes = shapes_of_the_model()
    numels = {name: prod(shape) for name, shape in shapes.items()}
    checkpoints = folder / f"checkpoints-{ranks}"
    first = checkpoints / "step-00000001"
    yield measure("a rank's part: kinds, slices, header", write_part, first, numels, ranks, 0)
    for rank in range(1, ranks):
        write_part(first, numels, ranks, rank)
    yield measure("rank 0's commit", commit, checkpoints, shapes, ranks)

    def open_it() -> dict[str, Any]:
        return {"files": len(read_checkpoint_manifest(str(first)).files)}

    def open_and_plan() -> dict[str, Any]:
        manifest = read_checkpoint_manifest(str(first))
        layout = layout_of(manifest)
        assert layout is not None
        fewer, files, pieces = ranks * 3 // 4, set[int](), 0
        for name, start, numel in slices_of_rank(numels, fewer, fewer // 2):
            for kind in KINDS:
                found = layout.locate(kind, name, start, numel)
                files.update(piece.file for piece in found)
                pieces += len(found)
        return {"files": len(files), "pieces": pieces}

    yield measure("open", open_it)
    yield measure("open, plan a rank's resume on 3/4 of the ranks", open_and_plan)

    def check_one() -> dict[str, Any]:
        manifest = read_checkpoint_manifest(str(first))
        assert file_checks(str(first), manifest)[ranks // 2]() is None
        return {"bytes": manifest.files[ranks // 2].bytes}

    yield measure("verify a rank's share, one file", check_one)
    more_checkpoints(checkpoints, ranks)
    yield measure("list 20: newest step, nothing to remove", list_all, str(checkpoints))
    with s3_endpoint() as server:
        bucket = server.make_bucket()
        names = store_objects(bucket, checkpoints)
        location = f"s3://{bucket}/checkpoints"
        yield {**with_requests(server, "S3: list 20", partial(list_all, location)), "objects": names}
        yield with_requests(
            server, "S3: list one", lambda: {"names": len(open_folder(f"{location}/step-00000020").names())}
        )
        read_parts = partial(gather_parts, f"{location}/step-00000001", ranks)
        yield with_requests(server, "S3: rank 0 reads the parts", read_parts)
    yield measure("remove the oldest of 20", remove_oldest, str(checkpoints))


def shapes_of_the_model() -> dict[str, list[int]]:
    """Return the shape of each parameter of recipes/gpt2-8.3b.yaml."""
    from multihop.pretrain.models.build import build_model_on_meta
    from multihop.pretrain.models.families import parse_model_config

    model = build_model_on_meta(parse_model_config({"preset": "gpt2-8.3b"}), 51_200)
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def slices_of_rank(numels: dict[str, int], ranks: int, rank: int) -> Iterator[tuple[str, int, int]]:
    """Yield (parameter, first element, elements) of what a ZeRO-3 rank owns: an equal part of each parameter."""
    for name, numel in numels.items():
        part = -(-numel // ranks)
        if (elements := min(part, numel - part * rank)) > 0:
            yield name, part * rank, elements


def write_part(folder: Path, numels: dict[str, int], ranks: int, rank: int) -> dict[str, Any]:
    """Write a rank's .done file as `CheckpointWriter` does, and its file with a hole instead of the tensors."""
    from multihop.common.files import canonical_json, sha256_file
    from multihop.pretrain.checkpoint.layout import file_order, kinds_and_slices, tensor_name
    from multihop.pretrain.checkpoint.manifest import CheckpointFile
    from multihop.pretrain.checkpoint.tensor_file import ITEM_BYTES, header_of

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        tensor_name(kind, name, start): elements
        for name, start, elements in slices_of_rank(numels, ranks, rank)
        for kind in KINDS
    }
    tensors = {key: tensors[key] for key in sorted(tensors, key=file_order)}
    kinds, slices = kinds_and_slices(tensors, dict.fromkeys(numels, ()))
    header, stem = header_of(tensors), f"rank-{rank:04d}.{LAUNCH}"
    path = folder / f"{stem}.safetensors"
    path.write_bytes(header)
    os.truncate(path, len(header) + ITEM_BYTES * sum(tensors.values()))
    sha256 = sha256_file(path) if rank == ranks // 2 else hashlib.sha256(stem.encode()).hexdigest()
    entry = CheckpointFile(file=path.name, bytes=path.stat().st_size, sha256=sha256)
    done = canonical_json({"launch": LAUNCH, "kinds": kinds, "slices": slices, **entry.model_dump()})
    (folder / f"{stem}.done").write_bytes(done)
    return {"header_bytes": len(header), "done_bytes": len(done)}


def commit(checkpoints: Path, shapes: dict[str, list[int]], ranks: int) -> dict[str, Any]:
    """Gather all parts and commit the checkpoint, as the thread of rank 0 does."""
    from multihop.common.storage import open_folder
    from multihop.pretrain.checkpoint.manifest import MANIFEST, CheckpointManifest

    first = checkpoints / "step-00000001"
    manifest = CheckpointManifest(
        run=RUN,
        step=1,
        tokens=0,
        updates=1,
        world_size=ranks,
        zero_stage=3,
        parameters=shapes,
        data_fingerprint="bench",
    )
    writer_of(checkpoints, ranks)._commit(open_folder(str(first)), manifest)
    return {"manifest_bytes": (first / MANIFEST).stat().st_size}


def writer_of(checkpoints: Path | str, ranks: int) -> Any:
    """Return rank 0's writer."""
    from multihop.pretrain.checkpoint.writer import CheckpointWriter

    return CheckpointWriter(str(checkpoints), 0, ranks, LAUNCH, keep=CHECKPOINTS)


def gather_parts(location: str, ranks: int) -> dict[str, Any]:
    """Read all .done files, as rank 0 does before the commit."""
    from multihop.common.storage import open_folder

    folder = open_folder(location)
    folder.remove("manifest.json")
    return {"parts": len(writer_of(location, ranks)._gather_parts(folder))}


def more_checkpoints(checkpoints: Path, ranks: int) -> None:
    """Make the checkpoints of further steps, whose other files are empty."""
    from multihop.pretrain.checkpoint.manifest import commit, folder_of_step, read_checkpoint_manifest

    manifest = read_checkpoint_manifest(folder_of_step(str(checkpoints), 1))
    for step in range(2, CHECKPOINTS + 1):
        folder = Path(folder_of_step(str(checkpoints), step))
        folder.mkdir()
        for entry in manifest.files:
            (folder / entry.file).touch()
            (folder / entry.file).with_suffix(".done").touch()
        assert commit(str(folder), manifest.model_copy(update={"step": step}))


def list_all(checkpoints: str) -> dict[str, Any]:
    """Find the newest step, and the steps that are too old, as after each save."""
    from multihop.pretrain.checkpoint.retention import remove_old
    from multihop.pretrain.checkpoint.verify import newest_step

    assert newest_step(checkpoints) == CHECKPOINTS
    assert not remove_old(checkpoints, CHECKPOINTS, None, RUN[:8])
    return {}


def remove_oldest(checkpoints: str) -> dict[str, Any]:
    """Remove one checkpoint, as after a save."""
    from multihop.pretrain.checkpoint.retention import remove_old
    from multihop.pretrain.checkpoint.verify import list_steps

    assert not remove_old(checkpoints, CHECKPOINTS - 1, None, RUN[:8])
    return {"left": len(list_steps(checkpoints))}


def store_objects(bucket: str, checkpoints: Path) -> int:
    """Put the checkpoints into the endpoint's memory without a request for each; returns the number of objects."""
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    backend, objects = s3_backends[DEFAULT_ACCOUNT_ID]["aws"], 0
    for path in sorted(checkpoints.glob("*/*")):
        content = b"" if path.suffix == ".safetensors" else path.read_bytes()
        backend.put_object(
            bucket, str(path.relative_to(checkpoints.parent)).replace(checkpoints.name, "checkpoints"), content
        )
        objects += 1
    return objects


if __name__ == "__main__":
    main(__doc__, {"checkpoint": (checkpoint, [64, 256, 1_024])})
