"""The checkpoint format: named slices in safetensors, and a manifest that is the commit.

    checkpoints/step-00001000/  rank-0000.safetensors  rank-0000.done  …  manifest.json

A tensor is called KIND/NAME@START: the fp32 elements from START on of the flattened parameter NAME, or of one of its
optimizer moments. Any number of ranks reads what it needs of them, whoever wrote them. A folder without a valid
manifest does not exist for anybody.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data_prep.files import canonical_json, sha256_file, sha256_json, write_atomically

MANIFEST = "manifest.json"
_FOLDER = re.compile(r"step-(\d{8,})")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CheckpointFile(_Part):
    """One rank's file."""

    file: str
    bytes: int
    sha256: str


class CheckpointManifest(_Part):
    """What was saved, and the proof that it is whole."""

    format_version: Literal[1] = 1
    step: int
    """Optimizer steps done."""
    tokens: int
    """Real pieces seen so far, over all ranks."""
    updates: int
    """How many updates the optimizer's moments went through."""
    world_size: int
    zero_stage: int
    parameters: dict[str, list[int]]
    """Name and shape of each parameter, in the model's order."""
    files: list[CheckpointFile]
    recipe_fingerprint: str
    data_fingerprint: str
    mlflow_run_id: str | None = None
    sha256: str = ""
    """Of this manifest's canonical JSON without this field."""

    def own_hash(self) -> str:
        """What `sha256` must be."""
        return sha256_json(self.model_dump(exclude={"sha256"}))

    def content_hash(self) -> str:
        """Tells these weights and moments from any others, whatever else stands in the manifest."""
        return sha256_json([entry.sha256 for entry in self.files])


def folder_of_step(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of a step stands."""
    return checkpoints / f"step-{step:08d}"


def commit(folder: Path, manifest: CheckpointManifest) -> None:
    """Make the checkpoint in `folder` exist; its files are written and synced."""
    whole = manifest.model_copy(update={"sha256": manifest.own_hash()})
    write_atomically(folder / MANIFEST, canonical_json(whole.model_dump()))


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of a committed checkpoint.

    Raises:
        ValueError: there is none, it is of another format version, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        manifest = CheckpointManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{folder} was never committed: it has no {MANIFEST}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ValueError(f"{path} is damaged or of another format version ({where}: {first['msg']})") from None
    if manifest.sha256 != manifest.own_hash():
        raise ValueError(f"{path} is damaged: its own hash does not match")
    return manifest


def verify(folder: Path) -> CheckpointManifest:
    """The manifest, after every file was read and compared with its hash.

    Raises:
        ValueError: with the name of the first file that is missing or damaged.
    """
    manifest = read_manifest(folder)
    for entry in manifest.files:
        path = folder / entry.file
        if not path.exists():
            raise ValueError(f"{path} is missing")
        if path.stat().st_size != entry.bytes or sha256_file(path) != entry.sha256:
            raise ValueError(f"{path} is damaged: its size or SHA-256 does not match the manifest")
    return manifest


def list_steps(checkpoints: Path) -> list[int]:
    """Steps that have a folder, committed or not, oldest first."""
    if not checkpoints.is_dir():
        return []
    return sorted(int(match[1]) for path in checkpoints.iterdir() if (match := _FOLDER.fullmatch(path.name)))


def newest_step(checkpoints: Path) -> int | None:
    """The newest step whose manifest is valid; its files are not read."""
    for step in reversed(list_steps(checkpoints)):
        try:
            read_manifest(folder_of_step(checkpoints, step))
        except ValueError:
            continue
        return step
    return None


def newest_good(checkpoints: Path) -> tuple[CheckpointManifest | None, list[str]]:
    """The newest checkpoint that verifies, and why newer ones were passed over."""
    passed_over: list[str] = []
    for step in reversed(list_steps(checkpoints)):
        try:
            return verify(folder_of_step(checkpoints, step)), passed_over
        except ValueError as error:
            passed_over.append(str(error))
    return None, passed_over


class CheckpointReader:
    """Reads any slice of a committed checkpoint. A context manager: the files stay mapped while it is open."""

    def __init__(self, folder: Path) -> None:
        self.manifest = read_manifest(folder)
        self._folder = folder
        self._stack = ExitStack()
        self._parts: dict[tuple[str, str], list[tuple[int, int, Any, str]]] = {}

    def __enter__(self) -> "CheckpointReader":
        for entry in self.manifest.files:
            path = self._folder / entry.file
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} cannot be read: {error}") from None
            for key in file.keys():  # noqa: SIM118 (a safetensors file is not a mapping)
                kind, name, start = parse_key(key)
                length = file.get_slice(key).get_shape()[0]
                self._parts.setdefault((kind, name), []).append((start, start + length, file, key))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """float32 (numel,) from `start` on; only those bytes are read.

        Raises:
            ValueError: the checkpoint does not hold all of it.
        """
        out = torch.empty(numel, dtype=torch.float32)
        filled = 0
        for part_start, part_stop, file, key in self._parts.get((kind, name), []):
            low, high = max(start, part_start), min(start + numel, part_stop)
            if low < high:
                out[low - start : high - start] = file.get_slice(key)[low - part_start : high - part_start]
                filled += high - low
        if filled != numel:
            raise ValueError(f"{self._folder} holds {filled} of {numel} elements of {kind}/{name} from {start} on")
        return out

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter, whole, by name."""
        for name, shape in self.manifest.parameters.items():
            yield name, self.read("weight", name, 0, torch.Size(shape).numel()).view(shape)


def parse_key(key: str) -> tuple[str, str, int]:
    """KIND/NAME@START in its three parts."""
    kind, _, rest = key.partition("/")
    name, _, start = rest.rpartition("@")
    return kind, name, int(start)


def load_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The fp32 weights of a committed checkpoint, whole, by parameter name.

    Raises:
        ValueError: it is not committed or cannot be read.
    """
    with CheckpointReader(checkpoint) as reader:
        return dict(reader.weights())
