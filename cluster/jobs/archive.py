"""The .zip file that is sent to a cluster with a job: the recipe, and the code unless the cluster has the same."""

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from multihop.cluster.jobs.head_scripts.inspect_head import PACKAGES, code_files
from multihop.cluster.runs.code_version import CodeVersion, git
from multihop.common.errors import UserError
from multihop.common.redaction import safe_text

_EARLIEST = (1980, 1, 1, 0, 0, 0)
"""A fixed time: the same content makes the same archive, which Ray then does not upload again."""
_LARGEST = 5
_CHUNK = 2**20


def code_to_send(local: CodeVersion) -> dict[str, Path]:
    """Return the files of the checkout that git tracks or would track, so no caches or runs; the package's files
    without git.

    Links are left out: they could point anywhere.

    Returns:
        {name in the archive: file}. The package is at the top, as `multihop/`: jobs import from where they start.
    """
    paths = _regular(_git_files(local, "--cached", "--others")) if local.commit else []
    if not paths:
        return {f"multihop/{path.relative_to(local.package).as_posix()}": path for path in code_files(local.package)}
    return {_name_in_archive(path.relative_to(local.checkout)): path for path in paths}


def _name_in_archive(path: Path) -> str:
    if path.parts[0] in PACKAGES:
        return f"multihop/{path.as_posix()}"
    return path.as_posix().removeprefix("src/")


def untracked_files(local: CodeVersion) -> list[str]:
    """Return the names of the files of `code_to_send` that git does not track, because they may be sent by mistake."""
    paths = _regular(_git_files(local, "--others")) if local.commit else []
    return [path.relative_to(local.checkout).as_posix() for path in paths]


def format_untracked(names: Sequence[str]) -> str:
    """Return the user's line about untracked files."""
    more = f" and {len(names) - _LARGEST} more" if len(names) > _LARGEST else ""
    return f"{safe_text(', '.join(names[:_LARGEST]))}{more}: sent as well; add to .gitignore what must not be sent"


def write_archive(to: Path, contents: Mapping[str, bytes], code: Mapping[str, Path], limit: int) -> str:
    """Write `contents` and the files in `code` by their names.

    Returns:
        The archive's size with its largest files, as a sentence.

    Raises:
        UserError: the archive reaches `limit` bytes, or a name is not UTF-8.
    """
    with open(to, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(contents.items()):
            archive.writestr(_entry(name), content)
        for name, path in sorted(code.items()):
            with open(path, "rb") as source, archive.open(_entry(name), "w", force_zip64=True) as target:
                while chunk := source.read(_CHUNK):
                    target.write(chunk)
                    if file.tell() >= limit:
                        raise UserError(
                            f"the code is too large: Ray accepts {megabytes(limit)} compressed; the largest files are "
                            f"{_largest(code)}: move them elsewhere, or add them to .gitignore"
                        )
    largest = _largest(code)
    return megabytes(to.stat().st_size) + (f"; largest: {largest}" if largest else "")


def _git_files(local: CodeVersion, *which: str) -> list[Path]:
    names = git(local.checkout, "ls-files", "-z", *which, "--exclude-standard") or ""
    return [local.checkout / name for name in names.split("\0") if name]


def _regular(paths: Iterable[Path]) -> list[Path]:
    return sorted(path for path in set(paths) if path.is_file() and not path.is_symlink())


def _largest(code: Mapping[str, Path]) -> str:
    sizes = sorted(((path.stat().st_size, name) for name, path in code.items()), reverse=True)[:_LARGEST]
    return safe_text(", ".join(f"{name} {megabytes(size)}" for size, name in sizes))


def megabytes(count: int) -> str:
    """Format a number of bytes, for example 1.2 MB."""
    return f"{count / 1e6:.1f} MB"


def _entry(name: str) -> zipfile.ZipInfo:
    try:
        name.encode()
    except UnicodeEncodeError:
        encoded = name.encode(errors="surrogateescape")
        raise UserError(f"the name of the file {encoded!r} is not UTF-8; rename it, or add it to .gitignore") from None
    entry = zipfile.ZipInfo(name, _EARLIEST)
    entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
    return entry
