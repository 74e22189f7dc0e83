"""Which files a recipe's sources name, in a fixed order, and how they are cut into splits of about 4 MB."""

import glob
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from data_prep.config import Source

FORMATS = ("txt", "jsonl", "json", "parquet")
SPLIT_BYTES = 4 * 2**20
_PACKAGE = "package:"


@dataclass(frozen=True)
class InputFile:
    """A file that holds documents."""

    name: str
    """How the user would call it: as the recipe writes it, relative where that is relative."""
    path: str
    """Absolute, for workers with another working directory."""
    source: int
    field: str
    format: str
    gz: bool
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Part:
    """The bytes [start, stop) of a file: lines that begin there (.jsonl), or the whole file (all others)."""

    file: InputFile
    start: int
    stop: int


def list_files(sources: list[Source]) -> list[InputFile]:
    """The files of all sources, by source and then by name.

    Raises ValueError when a path or package is missing, or names no file of a known format.
    """
    return [file for index, source in enumerate(sources) for file in _files_of(index, source)]


def group_into_splits(files: list[InputFile], split_bytes: int = SPLIT_BYTES) -> list[list[Part]]:
    """Consecutive parts, about `split_bytes` a split; depends on the files' order and sizes alone."""
    splits: list[list[Part]] = []
    room = 0
    for file in files:
        for part in _parts(file, split_bytes):
            if room <= 0:
                splits.append([])
                room = split_bytes
            splits[-1].append(part)
            room -= part.stop - part.start
    return splits


def _parts(file: InputFile, split_bytes: int) -> list[Part]:
    # Only lines can be found again from the middle of a file.
    if file.format != "jsonl" or file.gz or file.size <= split_bytes:
        return [Part(file, 0, file.size)]
    return [Part(file, at, min(at + split_bytes, file.size)) for at in range(0, file.size, split_bytes)]


def _files_of(index: int, source: Source) -> list[InputFile]:
    pattern, shown_root, root = source.path, "", ""
    if source.path.startswith(_PACKAGE):
        package, _, pattern = source.path.removeprefix(_PACKAGE).partition("/")
        root = _package_folder(package, index)
        shown_root = f"{_PACKAGE}{package}/"
        pattern = pattern or "."
    full = os.path.join(glob.escape(root), pattern) if root else pattern
    literal = os.path.join(root, pattern) if root else pattern
    matches = [literal] if os.path.exists(literal) else glob.glob(full, recursive=True)
    if not matches:
        raise ValueError(
            f"data.sources[{index}].path={source.path} does not exist; correct the path or put files there"
        )
    found = sorted({path for match in matches for path in _expand(match)})
    files = []
    for path in found:
        kind, gz = _format(path)
        if kind is None:
            continue
        name = shown_root + os.path.relpath(path, root) if root else path
        stat = os.stat(path)
        files.append(
            InputFile(name, os.path.abspath(path), index, source.field, kind, gz, stat.st_size, stat.st_mtime_ns)
        )
    if not files:
        endings = ", ".join(f".{kind}" for kind in FORMATS)
        raise ValueError(
            f"data.sources[{index}].path={source.path} names no file ending in {endings} (or .gz of the text ones); "
            "convert the texts or correct the path"
        )
    return files


def _expand(path: str) -> list[str]:
    """A file is itself; a folder is all files below it that are not hidden."""
    if not os.path.isdir(path):
        return [path] if os.path.isfile(path) else []
    below = []
    for folder, inner, names in os.walk(path):
        inner[:] = [name for name in inner if not name.startswith(".")]
        below += [os.path.join(folder, name) for name in names if not name.startswith(".")]
    return [file for file in below if os.path.isfile(file)]


def _format(path: str) -> tuple[str | None, bool]:
    name = Path(path).name.lower()
    gz = name.endswith(".gz")
    ending = name.removesuffix(".gz").rpartition(".")[2]
    known = ending in FORMATS and not (gz and ending == "parquet")
    return (ending if known else None), gz


def _package_folder(package: str, index: int) -> str:
    """Where an installed package lies. Only top-level names: looking up an inner one would run the outer's code."""
    if not package.isidentifier():
        raise ValueError(
            f"data.sources[{index}].path names the package {package!r}; write package:NAME/INNER/GLOB "
            "with the name of a top-level package"
        )
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"data.sources[{index}].path needs the Python package {package!r}, which is not installed; "
            f"pip install {package.replace('_', '-')}"
        )
    return next(iter(spec.submodule_search_locations))
