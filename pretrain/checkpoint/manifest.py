"""A checkpoint's manifest.json, whose creation is the commit: what was saved, by which run, in which files."""

import errno
import math
import re
import reprlib
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from multihop.common.errors import UserError
from multihop.common.files import canonical_json, json_object, sha256_json
from multihop.common.storage import open_folder
from multihop.pretrain.checkpoint.layout import Layout, Stripe
from multihop.pretrain.checkpoint.tensor_file import ITEM_BYTES

MANIFEST = "manifest.json"
_MAX_BYTES = 4 * 2**20
"""A GPT-2 1.5B that 8,192 ranks wrote needs 1.3 MB, and its size grows by 150 bytes per rank."""
_READABLE = (2, 3, 4, 5)
_FOLDER = re.compile(r"step-([0-9]{8,18})")
_FILE = r"^rank-[0-9]{4,9}(\.[0-9A-Za-z_-]+)?\.safetensors$"

Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
_Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Shape = Annotated[list[Count], Field(max_length=8)]


@dataclass
class TrainState:
    """The progress of a run: the state that its loop needs to resume, besides the weights and moments."""

    step: int = 0
    """Optimizer steps done, which is also the 0-based number of the next one."""
    tokens: int = 0
    """Tokens trained on so far, over all ranks, without padding."""
    skipped: int = 0
    """Steps that were skipped because of a non-finite loss or gradient."""
    skipped_in_a_row: int = 0
    """The number of consecutive skipped steps at the end."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CheckpointFile(_Part):
    """One rank's file."""

    file: str = Field(pattern=_FILE)
    bytes: Count
    sha256: str


class CheckpointManifest(_Part):
    """The content of manifest.json."""

    format_version: Literal[5] = 5
    run: str | None = None
    """Id of the run that wrote it, 32 hex digits; None in format version 2, which does not record it."""
    step: Count
    """Optimizer steps done."""
    tokens: Count
    """Tokens trained on so far, over all ranks, without padding."""
    updates: Count
    """Updates of the optimizer's moments so far; a skipped step makes none."""
    skipped: Count = 0
    """Steps that were skipped so far because of a non-finite loss or gradient."""
    skipped_in_a_row: Count = 0
    """The number of consecutive skipped steps at the end."""
    counters: dict[str, _Finite] = {}
    """Scalars of the engine, such as the loss scale."""
    world_size: Annotated[Count, Field(ge=1)]
    zero_stage: Annotated[Count, Field(le=3)]
    parameters: dict[str, _Shape]
    """Parameter -> shape."""
    files: list[CheckpointFile] = []
    """One file per rank, in the order of ranks."""
    kinds: list[str] = []
    """The kinds of tensor that the files hold for each slice, sorted: weight, and the optimizer's moments unless the
    checkpoint was imported."""
    other_kinds: dict[str, list[str]] = {}
    """Parameter -> its kinds, for parameters whose kinds are not `kinds`: under Muon, those of AdamW have other moments
    than matrices."""
    stripes: dict[str, list[Stripe]] | None = None
    """Parameter -> which files hold it (see `layout`); None in format versions 2 and 3, which do not record it."""
    recipe: dict[str, Any] | None = None
    """The resolved training recipe; None if it is not known."""
    data_fingerprint: str
    tokenizer_sha256: str | None = None
    """Hash of the tokenizer that the model was trained with; None if it is not known."""
    parent: str | None = None
    """Content hash of the checkpoint that the run's first weights came from."""
    mlflow_run_id: str | None = None
    sha256: str = ""
    """Hash of this manifest's canonical JSON without this field."""

    def compute_hash(self) -> str:
        """The hash that `sha256` must have."""
        return sha256_json(self.model_dump(exclude={"sha256"}))

    def content_hash(self) -> str:
        """A hash that identifies these weights and moments, whatever else is in the manifest."""
        return sha256_json([entry.sha256 for entry in self.files])


def folder_of_step(checkpoints: str, step: int) -> str:
    """The location of a step's checkpoint."""
    return f"{checkpoints}/step-{step:08d}"


def step_of_folder(name: str) -> int | None:
    """The step of a checkpoint folder of this name; None: it is not the name of a checkpoint folder."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match and name == f"step-{int(match[1]):08d}" else None


def commit(location: str, manifest: CheckpointManifest) -> bool:
    """Commit the checkpoint at `location`, whose files are written and synced.

    Returns:
        Whether this manifest is the committed one; False: another one was committed before, and is kept.

    Raises:
        UserError: The manifest does not cover every element of every parameter.
    """
    complete = manifest.model_copy(update={"sha256": manifest.compute_hash()})
    layout_of(complete)
    data, folder = canonical_json(complete.model_dump()), open_folder(location)
    if len(data) > _MAX_BYTES:
        raise UserError(f"the manifest of {location} would have {len(data):,} bytes, the limit is {_MAX_BYTES:,}")
    launch = manifest.files[0].file.split(".")[1] if manifest.files else "none"
    return folder.create(MANIFEST, data, launch) or folder.read_bytes(MANIFEST, _MAX_BYTES) == data


def layout_of(manifest: CheckpointManifest) -> Layout | None:
    """The layout of the slices; None in format versions 2 and 3, where only the files' headers have it.

    Raises:
        UserError: Stripes and files do not fit the parameters; never for a manifest that was read or committed.
    """
    if manifest.stripes is None:
        return None
    sizes = [entry.bytes for entry in manifest.files]
    kinds = {name: manifest.other_kinds.get(name, manifest.kinds) for name in manifest.parameters}
    return Layout(manifest.parameters, kinds, manifest.stripes, sizes)


def read_checkpoint_manifest(location: str) -> CheckpointManifest:
    """The manifest of a committed checkpoint, converted to the newest format version.

    Raises:
        UserError: There is none, it is damaged, its format version is unknown, or it is for another step than the
            folder's name says.
    """
    manifest, name = read_any_manifest(location), location.rstrip("/").rsplit("/", 1)[-1]
    if step_of_folder(name) not in (None, manifest.step):
        raise UserError(
            f"{location} holds the checkpoint of step {manifest.step}, not that of the step in its name; rename it to "
            f"step-{manifest.step:08d}, or remove it if there is one of that name"
        )
    return manifest


def read_any_manifest(location: str) -> CheckpointManifest:
    """Read a manifest as `read_checkpoint_manifest` does, without comparing its step with the folder's name."""
    path = f"{location}/{MANIFEST}"
    try:
        data = open_folder(location).read_bytes(MANIFEST, _MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{location} was never committed: it has no {MANIFEST}") from None
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EISDIR, errno.EIO):
            raise
        raise UserError(f"{path} is damaged: it cannot be read ({error.strerror})") from None
    try:
        content = json_object(data, "it", max_bytes=_MAX_BYTES)
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    if "format_version" not in content:
        raise UserError(f"{path} is damaged: it has no format_version")
    version = content["format_version"]
    if type(version) is not int or version not in _READABLE:
        raise UserError(
            f"{path} has format version {reprlib.repr(version)}, supported are {_READABLE[0]} to {_READABLE[-1]}; read "
            "it with the version of multihop that wrote it"
        )
    if not _is_intact(content, data):
        raise UserError(f"{path} is damaged: its own hash does not match")
    try:
        manifest = CheckpointManifest.model_validate(_migrated(content))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"{path} is not a manifest of format version {version} ({where[:100]}: {first['msg']})"
        ) from None
    _check_files(manifest, path)
    return manifest.model_copy(update={"sha256": manifest.compute_hash()})


def _is_intact(content: dict[str, Any], data: bytes) -> bool:
    """Whether a manifest has its hash. Its bytes count too: 1e-06 and 1E-06 are the same number, but a flipped bit."""
    written_hash = content.pop("sha256", None)
    try:
        return written_hash == sha256_json(content) and data == canonical_json({**content, "sha256": written_hash})
    except ValueError:  # not canonical JSON, which has no NaN and no unpaired surrogates
        return False


def _migrated(content: dict[str, Any]) -> dict[str, Any]:
    """Format version 2 had no `run`, versions 2 and 3 had neither `kinds` nor `stripes`, and none before 5 had
    `other_kinds`."""
    if content["format_version"] < 4:
        return {**content, "format_version": 5, "kinds": [], "stripes": None}
    content = {**content, "format_version": 5}
    return content if content.get("stripes") is not None else {**content, "stripes": {}}


def _check_files(manifest: CheckpointManifest, path: str) -> None:
    """Check, before memory is allocated, that files of these sizes can hold these parameters."""
    named = [entry.file for entry in manifest.files]
    if len(set(named)) < len(named):
        raise UserError(f"{path} names a file twice; restore it from a copy")
    wanted = ITEM_BYTES * sum(math.prod(shape) for shape in manifest.parameters.values())
    stored = sum(entry.bytes for entry in manifest.files)
    if wanted > stored:
        raise UserError(
            f"{path} has parameters of {wanted:,} bytes, and its files hold {stored:,}; restore it from a copy"
        )
    try:
        layout_of(manifest)
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; restore it from a copy") from None
