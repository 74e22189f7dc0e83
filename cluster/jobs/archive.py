"""What is sent to a cluster with a job: a .zip file with the recipe, and the code where the cluster has another."""

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from cluster.jobs.errands.look import code_files
from cluster.runs.code_version import CodeVersion, git
from common.redaction import shown

_EARLIEST = (1980, 1, 1, 0, 0, 0)
"""A fixed time: the same content makes the same archive, which Ray then does not upload again."""
_LARGEST = 5


def code_to_send(here: CodeVersion) -> list[Path]:
    """Files of the checkout that git tracks or would track, so no caches or runs; the packages' files without git.

    Links are left out: they could point anywhere.
    """
    listed = git(here.root, "ls-files", "-z", "--cached", "--others", "--exclude-standard") if here.commit else None
    found = [here.root / name for name in listed.split("\0") if name] if listed else code_files(here.root)
    return sorted(path for path in set(found) if path.is_file() and not path.is_symlink())


def write_archive(to: Path, contents: Mapping[str, bytes], code: Iterable[Path], root: Path) -> None:
    """Write `contents` by their names, and the files in `code` by their paths within `root`."""
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(contents.items()):
            archive.writestr(_entry(name), content)
        for path in code:
            archive.writestr(_entry(path.relative_to(root).as_posix()), path.read_bytes())


def check_size(archive: Path, code: Iterable[Path], root: Path, limit: int) -> str:
    """The archive's size with its largest files, as a sentence.

    Raises:
        ValueError: it is larger than `limit` bytes.
    """
    size = archive.stat().st_size
    largest = sorted(code, key=lambda path: -path.stat().st_size)[:_LARGEST]
    named = ", ".join(f"{path.relative_to(root).as_posix()} {megabytes(path.stat().st_size)}" for path in largest)
    if size >= limit:
        raise ValueError(
            f"the code in {root} makes {megabytes(size)}, and Ray takes {megabytes(limit)}; the largest files are "
            f"{shown(named)}: move them elsewhere, or name them in .gitignore"
        )
    return f"{megabytes(size)}" + (f"; largest: {shown(named)}" if named else "")


def megabytes(count: int) -> str:
    """For example 1.2 MB."""
    return f"{count / 1e6:.1f} MB"


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _EARLIEST)
    entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
    return entry
