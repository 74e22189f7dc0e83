"""Lists the files of a recipe's sources in a fixed order, and cuts them into splits."""

import dataclasses
import importlib.util
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from multihop.common.errors import UserError
from multihop.data_prep.config import Source
from multihop.data_prep.reading.http import is_http
from multihop.data_prep.reading.listing import Entry, list_location
from multihop.data_prep.reading.locations import is_remote

FORMATS = ("txt", "jsonl", "json", "parquet", "arrow")
"""Suffixes of files of documents."""
_WITH_FIELDS = ("jsonl", "json", "parquet", "arrow")
COMPRESSIONS = ("gz", "zst", "bz2", "xz")
_READER_REVISIONS = {"bz2": "empty streams"}
"""Revision of a compression's reader: it is part of keys, so that files that older versions read are read again."""
_COMPRESSED_INTERNALLY = ("parquet", "arrow")
PACKAGE = "package:"

MIN_SPLIT_BYTES = 4 * 2**20
MAX_SPLIT_BYTES = 256 * 2**20
_TARGET_SPLITS = 1024
_MAX_FILE_BYTES = 2**46
_MAX_TOTAL_BYTES = 2**50
"""64 TiB per file and 1 PiB in total, 2^18 and 2^22 of the largest splits: a server can claim any size and a sparse
file can have it at no cost, but the list of splits takes memory."""
_MAX_FILES_PER_SPLIT = 4096
"""Most files of a split: opening a file takes time too."""


@dataclass(frozen=True)
class InputFile:
    """Describes a file of documents or pairs, or an entry that cannot be read."""

    name: str
    """The name for the user: as in the recipe, relative if the recipe's path is. Unprintable characters (a line break,
    bytes that are not UTF-8) are escaped as in Python, so that it is one line of valid UTF-8; the file is opened by
    `path`."""
    path: str
    """An absolute path, for workers with another working directory; or a URL."""
    source: int
    field: str
    format: str
    """One of FORMATS; for pairs also tsv, and lines of two files; "" if there is a problem."""
    compression: str
    """One of COMPRESSIONS, if the whole file is compressed and can only be read from its beginning; else ""."""
    size: int
    """Bytes when it was listed; what is appended later is not read."""
    mtime_ns: int
    documents: str = "file"
    """Unit of a document in a .txt file: file, line or block."""
    is_sequential: bool = False
    """True if one worker reads it from the beginning, see `Entry.is_sequential`."""
    problem: str = ""
    """The reason why nothing of it can be used, as listing reports it; "": no problem."""
    version: str = ""
    """The version from the listing, see `Entry.version`."""
    identity: str = ""
    """Identifies the content, see `identities.content_identity`; "" before it is known."""
    fields: tuple[str | int, ...] | None = None
    """Fields, or columns from 1, of source and target, for pairs in one file, and of the relation, for triples."""
    target: "InputFile | None" = None
    """The file of the target sides, for pairs in two line files."""

    @property
    def holds_pairs(self) -> bool:
        """True for a file of pairs, false for one of documents."""
        return self.fields is not None or self.target is not None

    @property
    def bytes(self) -> int:
        """Size of the file in bytes, with that of the target sides' file."""
        return self.size + (0 if self.target is None else self.target.size)

    @property
    def is_splittable(self) -> bool:
        """True if a worker can start in the middle of it."""
        if self.compression or self.is_sequential:
            return False
        return self.format in ("jsonl", "parquet", "arrow", "tsv") or (
            self.format == "txt" and self.documents != "file"
        )


@dataclass(frozen=True)
class FileRange:
    """Selects the lines, blocks, row groups or record batches that begin in bytes [start, stop) of a file.

    Two line files are one range, since the offsets of the lines of the one say nothing of the other's.
    """

    file: InputFile
    start: int
    stop: int


def list_files(sources: Sequence[Source]) -> list[InputFile]:
    """List the files of all sources, sorted by source and path.

    Call it once per start and hand the list on: it may be long, and files may change meanwhile.

    Raises:
        UserError: a path or package is missing, cannot be listed, or has no file of a known format, or the total size
            is implausible.
    """
    files = [file for index, source in enumerate(sources) for file in _files_of(index, source)]
    total = sum(file.bytes for file in files)
    if total > _MAX_TOTAL_BYTES:
        raise UserError(
            f"data.sources have {total:,} bytes in total, more than the limit of {_MAX_TOTAL_BYTES:,}; remove files "
            "whose size is not real, or prepare them in parts"
        )
    return files


def split_bytes_for(total: int) -> int:
    """Return the bytes per split: about a thousandth of `total`, between 4 and 256 MiB.

    A power of two, so that adding or removing a file seldom changes the other splits and their outputs.
    """
    size = MIN_SPLIT_BYTES
    while size < MAX_SPLIT_BYTES and size * _TARGET_SPLITS < total:
        size *= 2
    return size


def group_into_splits(files: Sequence[InputFile], split_bytes: int | None = None) -> list[list[FileRange]]:
    """Group files, or ranges of them, into splits of about `split_bytes`: consecutive ranges of one source.

    Depends on the files' order, formats and sizes only. A file that is cut has splits of its own, so that a change of
    it changes no other split.
    """
    split_bytes = split_bytes or split_bytes_for(sum(file.bytes for file in files))
    splits: list[list[FileRange]] = []
    room = 0
    for file in files:
        if file.is_splittable and file.size > split_bytes:
            cuts = range(0, file.size, split_bytes)
            splits += [[FileRange(file, at, min(at + split_bytes, file.size))] for at in cuts]
            room = 0
            continue
        if room <= 0 or splits[-1][0].file.source != file.source:
            splits.append([])
            room = split_bytes
        splits[-1].append(FileRange(file, 0, file.size))
        room -= max(file.bytes, split_bytes // _MAX_FILES_PER_SPLIT)
    return splits


def range_key(file_range: FileRange) -> list[Any]:
    """Return everything that decides a range's documents, as JSON for a stage's key; the file must be identified."""
    file = file_range.file
    what = [
        file.identity,
        file.size,
        file.source,
        file.field,
        file.format,
        file.compression,
        file.documents,
        file.problem,
    ]
    if file.fields is not None:
        what.append(list(file.fields))
    if file.target is not None:
        other = file.target
        what.append([other.identity, other.size, other.compression, other.problem, *reader_revisions(other)])
    return [*what, *reader_revisions(file), file_range.start, file_range.stop]


def reader_revisions(file: InputFile) -> list[str]:
    """Return the revision of the reader of this compression, for keys of the file's documents; empty if it is the
    first."""
    return [_READER_REVISIONS[file.compression]] if file.compression in _READER_REVISIONS else []


def with_targets(files: Iterable[InputFile]) -> Iterator[InputFile]:
    """Yield all files of a list, where two line files make one item of it."""
    for file in files:
        yield file
        if file.target is not None:
            yield file.target


def _printable(name: str) -> str:
    """Escape `name` as Python does if it has unprintable characters or undecodable bytes."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def _files_of(index: int, source: Source) -> list[InputFile]:
    if source.target_path is not None:
        return [_two_line_files(index, source, source.target_path)]
    key, formats = f"data.sources[{index}].path", _formats(source)
    files = []
    for entry, name in _list_entries(index, key, source.path):
        kind, compression = _format(entry.path, formats)
        if kind or entry.problem:
            files.append(_input_file(entry, name, index, source, kind, compression))
    if files and all(file.problem for file in files):
        raise UserError(_cannot_be_read(key, source.path, files[0].problem))
    if not files:
        endings = ", ".join(f".{kind}" for kind in formats)
        compressions = ", ".join(f".{compression}" for compression in COMPRESSIONS)
        raise UserError(
            f"{key}={source.path} has no file ending in {endings} (text formats also with {compressions}); "
            "convert the texts or correct the path"
        )
    return files


def _two_line_files(index: int, source: Source, target_path: str) -> InputFile:
    """Return the two files as one item: a file of source sides with its `target`."""
    pair = []
    for key, path in (("path", source.path), ("target_path", target_path)):
        key = f"data.sources[{index}].{key}"
        entries = _list_entries(index, key, path)
        if len(entries) != 1:
            raise UserError(
                f"{key}={path} matches {len(entries)} files, expected one file of lines; give each two files that "
                "belong together a source of their own"
            )
        ((entry, name),) = entries
        kind, _ = _format(entry.path, (*_WITH_FIELDS, "tsv"))
        if kind:
            raise UserError(
                f"{key}={path} is a .{kind} file, but target_path is for two files of lines; give a file with a text "
                "on each line, or one file with both sides and fields={source: …, target: …}"
            )
        file = _input_file(entry, name, index, source, "lines", _suffix(entry.path)[1])
        if file.problem:
            raise UserError(_cannot_be_read(key, path, file.problem))
        pair.append(file)
    return dataclasses.replace(pair[0], target=pair[1])


def _list_entries(index: int, key: str, path: str) -> list[tuple[Entry, str]]:
    """List the entries of a path or a glob, each with its name for the user."""
    location, root, shown_root = path, "", ""
    if path.startswith(PACKAGE):
        package, _, pattern = path.removeprefix(PACKAGE).partition("/")
        root = _package_folder(package, index)
        location, shown_root = os.path.join(root, pattern or "."), f"{PACKAGE}{package}/"
    entries = list_location(location, key, root)
    if not entries:
        if os.path.isdir(location):
            raise UserError(f"{key}={path} is a directory without files of texts; correct the path or put files there")
        raise UserError(f"{key}={path} does not exist; correct the path or put files there")
    return [(entry, shown_root + os.path.relpath(entry.path, root) if root else entry.path) for entry in entries]


def _cannot_be_read(key: str, path: str, problem: str) -> str:
    return f"{key}={path} cannot be read ({problem}); correct the path or the file"


def _formats(source: Source) -> tuple[str, ...]:
    fields = source.pair_fields
    if fields is None:
        return FORMATS
    return ("tsv",) if fields.are_columns else _WITH_FIELDS


def _input_file(entry: Entry, name: str, index: int, source: Source, kind: str, compression: str) -> InputFile:
    path = entry.path if is_remote(entry.path) else os.path.abspath(entry.path)
    is_too_large = entry.size > _MAX_FILE_BYTES
    fields: Any = source.pair_fields
    return InputFile(
        name=_printable(name),
        path=path,
        source=index,
        field=source.field,
        format=kind,
        compression=compression,
        size=0 if is_too_large else entry.size,
        mtime_ns=entry.mtime_ns,
        documents=source.documents,
        is_sequential=entry.is_sequential,
        version=entry.version,
        problem=f"larger than {_MAX_FILE_BYTES:,} bytes" if is_too_large else entry.problem,
        fields=None if fields is None else fields.sides,
    )


def _format(path: str, formats: Sequence[str]) -> tuple[str, str]:
    """Return format, one of `formats`, and compression by the file's suffix, each "" if there is none."""
    ending, compression = _suffix(path)
    known = ending in formats and not (compression and ending in _COMPRESSED_INTERNALLY)
    return (ending, compression) if known else ("", "")


def _suffix(path: str) -> tuple[str, str]:
    """Return the suffix before that of a compression, and the latter."""
    if is_http(path):
        path = path.partition("?")[0].partition("#")[0]
    stem, _, ending = os.path.basename(path).lower().rpartition(".")
    if ending in COMPRESSIONS:
        return stem.rpartition(".")[2], ending
    return ending, ""


def _package_folder(package: str, index: int) -> str:
    """Return the directory of an installed package.

    Top-level only: looking up a subpackage would run its parent's code.
    """
    if not package.isidentifier():
        raise UserError(
            f"data.sources[{index}].path names the package {package!r}; write package:NAME/INNER/GLOB "
            "with the name of a top-level package"
        )
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"data.sources[{index}].path needs the Python package {package!r}, which is not installed; "
            f"pip install {package.replace('_', '-')}"
        )
    return next(iter(spec.submodule_search_locations))
