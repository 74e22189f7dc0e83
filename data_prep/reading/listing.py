"""Lists the files of a location, local or remote: a file, all files below a directory, or the matches of a glob.

What cannot be read is listed too, with its problem: a directory without permission, a broken link.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from pyarrow import fs

from multihop.common.errors import UserError
from multihop.common.s3 import error_reason
from multihop.data_prep.reading import http
from multihop.data_prep.reading.errors import ReadFailed
from multihop.data_prep.reading.http import is_http
from multihop.data_prep.reading.locations import filesystem_for, is_remote

_MAGIC = re.compile(r"[*?[]")
_Ancestors = tuple[tuple[int, int], ...]
"""Device and inode of the parent directories, to detect loops of links."""


@dataclass(frozen=True)
class Entry:
    """Describes a file, a directory, or something else."""

    path: str
    size: int = 0
    mtime_ns: int = 0
    is_folder: bool = False
    problem: str = ""
    """The reason why it cannot be read; "": it can."""
    version: str = ""
    """The version that the server reported in the listing, see `Description.version`; "" if none."""
    is_sequential: bool = False
    """True if one worker reads it from the beginning: the server has no range requests, or it reports no versions, so
    that the whole file must be hashed while it is read."""

    @property
    def is_hidden(self) -> bool:
        """True if the name begins with a dot; such entries are listed only if the pattern names them."""
        return os.path.basename(self.path).startswith(".")


def list_location(location: str, key: str, root: str = "") -> list[Entry]:
    """List the files of a location, and entries that cannot be read, sorted by path; empty if there are none.

    Args:
        key: the recipe's key, for messages.
        root: a prefix of the path in which no character is part of a glob.

    Raises:
        UserError: a remote location cannot be listed.
    """
    try:
        entries = _list_location(location, key, root)
    except OSError as error:
        if isinstance(error, ReadFailed):
            raise UserError(f"{key}={error}") from None
        raise UserError(
            f"{key}={location} cannot be listed ({error_reason(error)}); check the location and the credentials"
        ) from None
    return sorted({entry.path: entry for entry in entries}.values(), key=lambda entry: entry.path)


def _list_location(location: str, key: str, root: str) -> list[Entry]:
    if is_http(location):
        try:
            about = http.describe(location)
        except FileNotFoundError:
            return []
        is_sequential = not (about.ranges and about.version)
        return [Entry(location, about.size, about.mtime_ns, version=about.version, is_sequential=is_sequential)]
    if not is_remote(location):
        anchor = os.path.join(root, "") if root else Path(location).anchor
        return _matches(_Local(), location, anchor, location)
    protocol = location.partition("://")[0]
    filesystem, path = filesystem_for(location, key)
    return _matches(_Remote(f"{protocol}://", filesystem), path, "", path)


def _matches(tree: "_Local | _Remote", location: str, anchor: str, pattern: str) -> list[Entry]:
    """Return the matches of a pattern; a file of exactly this name takes precedence over the glob."""
    itself = tree.entry(location)
    if itself is not None:
        return list(tree.below(itself, ()))
    parts = pattern[len(anchor) :].split("/")
    first = next((number for number, part in enumerate(parts) if _MAGIC.search(part)), None)
    if first is None:
        return []
    base = tree.entry(anchor + "/".join(parts[:first]) or ".")
    return list(_glob(tree, base, [part for part in parts[first:] if part], ())) if base is not None else []


def _glob(tree: "_Local | _Remote", folder: Entry, parts: list[str], ancestors: _Ancestors) -> Iterator[Entry]:
    if folder.problem or not folder.is_folder:
        return
    head, *rest = parts
    if head == "**" and not rest:
        yield from tree.below(folder, ancestors)
        return
    if head == "**":
        yield from _glob(tree, folder, rest, ancestors)
    for child, above in tree.children(folder, ancestors):
        if child.problem and child.path == folder.path:
            yield child
        elif head == "**":
            if not child.is_hidden:
                yield from _glob(tree, child, parts, above)
        elif fnmatchcase(os.path.basename(child.path), head) and child.is_hidden == head.startswith("."):
            yield from tree.below(child, above) if not rest else _glob(tree, child, rest, above)


class _Local:
    """Lists the local file system. Links to directories are followed, except into a loop."""

    def entry(self, path: str) -> Entry | None:
        """Return the entry at a path; None if it does not exist."""
        try:
            status = os.stat(path)
        except OSError as error:
            is_link, is_missing = os.path.islink(path), isinstance(error, FileNotFoundError | NotADirectoryError)
            if is_missing and not is_link:
                return None
            if is_missing or error.errno == errno.ELOOP:
                return Entry(path, problem="broken link" if is_missing else "link loop")
            return Entry(path, problem=f"cannot be opened ({error.strerror})")
        if stat.S_ISDIR(status.st_mode):
            return Entry(path, is_folder=True)
        if not stat.S_ISREG(status.st_mode):
            return Entry(path, problem="not a file")
        return Entry(path, status.st_size, status.st_mtime_ns)

    def children(self, folder: Entry, ancestors: _Ancestors) -> Iterator[tuple[Entry, _Ancestors]]:
        """Yield the entries of a directory, each with its parent directories."""
        try:
            status = os.stat(folder.path)
            if (status.st_dev, status.st_ino) in ancestors:
                yield Entry(folder.path, problem="link loop"), ancestors
                return
            names = sorted(os.listdir(folder.path))
        except OSError as error:
            yield Entry(folder.path, problem=f"cannot be opened ({error.strerror})"), ancestors
            return
        above = (*ancestors, (status.st_dev, status.st_ino))
        for name in names:
            entry = self.entry(name if folder.path == "." else os.path.join(folder.path, name))
            if entry is not None:
                yield entry, above

    def below(self, entry: Entry, ancestors: _Ancestors) -> Iterator[Entry]:
        """Yield all files below a directory that are not hidden; a file yields itself."""
        if not entry.is_folder:
            yield entry
            return
        for child, above in self.children(entry, ancestors):
            if child.path == entry.path:
                yield child
            elif not child.is_hidden:
                yield from self.below(child, above)


class _Remote:
    """Lists a remote file system, which has no links; an error ends the listing."""

    def __init__(self, prefix: str, filesystem: fs.FileSystem) -> None:
        self._prefix = prefix
        self._filesystem = filesystem

    def entry(self, path: str) -> Entry | None:
        """Return the entry at a path; None if it does not exist."""
        info = self._filesystem.get_file_info(path.removeprefix(self._prefix).strip("/"))
        return None if info.type == fs.FileType.NotFound else self._entry(info)

    def children(self, folder: Entry, ancestors: _Ancestors) -> Iterator[tuple[Entry, _Ancestors]]:
        """Yield the entries of a directory."""
        if not isinstance(self._filesystem, fs.GcsFileSystem):
            for info in self._list(folder, recursive=False):
                yield self._entry(info), ancestors
            return
        # It always lists recursively, and does not report directories that are mere prefixes of names.
        prefix, seen_names = folder.path.rstrip("/") + "/", set()
        for info in self._list(folder, recursive=True):
            entry = self._entry(info)
            name, inner, _ = entry.path.removeprefix(prefix).partition("/")
            if name not in seen_names:
                seen_names.add(name)
                yield Entry(prefix + name, is_folder=True) if inner else entry, ancestors

    def below(self, entry: Entry, ancestors: _Ancestors) -> Iterator[Entry]:
        """Yield all files below a directory that are not hidden; a file yields itself."""
        if not entry.is_folder:
            yield entry
            return
        for info in self._list(entry, recursive=True):
            child = self._entry(info)
            inner = child.path.removeprefix(entry.path)
            if not child.is_folder and not any(part.startswith(".") for part in inner.split("/")):
                yield child

    def _list(self, folder: Entry, recursive: bool) -> list[fs.FileInfo]:
        path = folder.path.removeprefix(self._prefix).strip("/")
        return self._filesystem.get_file_info(fs.FileSelector(path, recursive=recursive))

    def _entry(self, info: fs.FileInfo) -> Entry:
        path = self._prefix + info.path
        if info.type == fs.FileType.Directory:
            return Entry(path, is_folder=True)
        return Entry(path, info.size or 0, info.mtime_ns or 0, is_sequential=not info.mtime_ns)
