"""A checkpoint's manifest.json: what was saved, by which run, and the proof that it is whole. It is the commit."""

import errno
import math
import re
import reprlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from data_prep.files import canonical_json, json_object, sha256_json
from pretrain.storage import open_folder
from pretrain.tensor_file import ITEM_BYTES

MANIFEST = "manifest.json"
_MOST_BYTES = 2 * 2**20
"""That of a model with a thousand layers, on several thousand ranks."""
_FOLDER = re.compile(r"step-([0-9]{8,18})")
_FILE = r"^rank-[0-9]{4,9}(\.[0-9A-Za-z_-]+)?\.safetensors$"

Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
_Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Shape = Annotated[list[Count], Field(max_length=8)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CheckpointFile(_Part):
    """One rank's file."""

    file: str = Field(pattern=_FILE)
    bytes: Count
    sha256: str


class CheckpointManifest(_Part):
    """What was saved, and the proof that it is whole."""

    format_version: Literal[3] = 3
    run: str | None = None
    """Which run wrote it, 32 hex digits; None where nobody says: in the format versions before the third."""
    step: Count
    """Optimizer steps done."""
    tokens: Count
    """Real pieces seen so far, over all ranks."""
    updates: Count
    """How many updates the optimizer's moments went through."""
    skipped: Count = 0
    """Steps so far that were passed over because a loss or a gradient was not finite."""
    skipped_in_a_row: Count = 0
    """So many of them are the last ones."""
    counters: dict[str, _Finite] = {}
    """Small numbers of the engine's, such as the loss scale."""
    world_size: Annotated[Count, Field(ge=1)]
    zero_stage: Annotated[Count, Field(le=3)]
    parameters: dict[str, _Shape]
    """Name and shape of each parameter, by name."""
    files: list[CheckpointFile] = []
    recipe: dict[str, Any] | None = None
    """The resolved training recipe; None where the first format version kept only its hash."""
    data_fingerprint: str
    tokenizer_sha256: str | None = None
    """Of the tokenizer whose pieces the weights know; None in the first format version."""
    parent: str | None = None
    """The content hash of the checkpoint whose weights the run began with."""
    mlflow_run_id: str | None = None
    sha256: str = ""
    """Of this manifest's canonical JSON without this field."""

    def own_hash(self) -> str:
        """What `sha256` must be."""
        return sha256_json(self.model_dump(exclude={"sha256"}))

    def content_hash(self) -> str:
        """Tells these weights and moments from any others, whatever else stands in the manifest."""
        return sha256_json([entry.sha256 for entry in self.files])


def folder_of_step(checkpoints: str, step: int) -> str:
    """Where the checkpoint of a step stands."""
    return f"{checkpoints}/step-{step:08d}"


def step_of_folder(name: str) -> int | None:
    """The step whose checkpoint a folder of this name holds; None: it is no such name, which is spelt in one way."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match and name == f"step-{int(match[1]):08d}" else None


def commit(location: str, manifest: CheckpointManifest) -> bool:
    """Make the checkpoint at `location` exist; its files are written and synced.

    Returns:
        Whether it does; not, where another was committed there, which stays.
    """
    whole = manifest.model_copy(update={"sha256": manifest.own_hash()})
    data, folder = canonical_json(whole.model_dump()), open_folder(location)
    assert len(data) <= _MOST_BYTES, "nobody would read it"
    by = manifest.files[0].file.split(".")[1] if manifest.files else "none"
    return folder.create(MANIFEST, data, by) or folder.read_bytes(MANIFEST, _MOST_BYTES) == data


def read_manifest(location: str) -> CheckpointManifest:
    """The manifest of a committed checkpoint, as the newest format version has it.

    Raises:
        ValueError: there is none, it is of an unknown format version, it is damaged, or it is of another step than its
            folder.
    """
    manifest, name = read_any_manifest(location), location.rstrip("/").rsplit("/", 1)[-1]
    if step_of_folder(name) not in (None, manifest.step):
        raise ValueError(
            f"{location} holds the checkpoint of step {manifest.step}, under another step's name; rename it to "
            f"step-{manifest.step:08d}, or remove it where that is there"
        )
    return manifest


def read_any_manifest(location: str) -> CheckpointManifest:
    """`read_manifest`, whatever the folder is called."""
    path = f"{location}/{MANIFEST}"
    try:
        data = open_folder(location).read_bytes(MANIFEST, _MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{location} was never committed: it has no {MANIFEST}") from None
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EISDIR, errno.EIO):
            raise
        raise ValueError(f"{path} is damaged: it cannot be read ({error.strerror})") from None
    try:
        content = json_object(data, "it", most_bytes=_MOST_BYTES)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if "format_version" not in content:
        raise ValueError(f"{path} is damaged: it has no format_version")
    version = content["format_version"]
    if type(version) is not int or version not in (1, 2, 3):
        raise ValueError(
            f"{path} is of format version {reprlib.repr(version)}, known are 1 to 3; read it with the multihop that "
            "wrote it"
        )
    if not _is_as_written(content, data):
        raise ValueError(f"{path} is damaged: its own hash does not match")
    try:
        manifest = CheckpointManifest.model_validate(_migrated(content))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path} is no manifest of format version {version} ({where[:100]}: {first['msg']})") from None
    _check_files(manifest, path)
    return manifest.model_copy(update={"sha256": manifest.own_hash()})


def _is_as_written(content: dict[str, Any], data: bytes) -> bool:
    """By its own hash; the spelling too: 1e-06 and 1E-06 are one number, and a byte's difference."""
    written_hash = content.pop("sha256", None)
    try:
        return written_hash == sha256_json(content) and data == canonical_json({**content, "sha256": written_hash})
    except ValueError:  # what canonical JSON cannot say was not written by it: NaN, half a surrogate pair
        return False


def _migrated(content: dict[str, Any]) -> dict[str, Any]:
    """Version 1 kept the recipe's hash in place of the recipe, and knew no steps that were passed over; 1 and 2 did not
    say which run wrote them."""
    if content["format_version"] == 1:
        content = {key: value for key, value in content.items() if key != "recipe_fingerprint"}
    return {**content, "format_version": 3}


def _check_files(manifest: CheckpointManifest, path: str) -> None:
    """That the files, which are as large as the manifest says, can hold the parameters, before memory is taken."""
    named = [entry.file for entry in manifest.files]
    if len(set(named)) < len(named):
        raise ValueError(f"{path} names a file twice; restore it from a copy")
    wanted = ITEM_BYTES * sum(math.prod(shape) for shape in manifest.parameters.values())
    there = sum(entry.bytes for entry in manifest.files)
    if wanted > there:
        raise ValueError(
            f"{path} has parameters of {wanted:,} bytes, and its files hold {there:,}; restore it from a copy"
        )
