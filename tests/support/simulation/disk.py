"""A simulated disk: a real folder, of which a power cut leaves what was synced, and any part of the rest.

Calls of `os` that change the folder are operations of the world. What is written is not followed: at a sync the disk
remembers the content of a file, or the entries of a directory. Changes of directories that no sync has made durable may
be left or not, each by itself and each whole, as POSIX allows; the content of a file that was not synced may be the one
before, a part of the new one, or as many zeros.
"""

import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from simulation.world import World

_Serial = int
"""Number of a file or directory: unlike an inode's, it is never used again."""
_Change = list[tuple[_Serial, str, _Serial | None]]
"""Entries of directories that change together: directory, name, and what it names from now on."""


@dataclass
class _Durable:
    """What a power cut leaves of a file or a directory."""

    content: bytes | None = None
    """Of a file; None: it was never synced."""
    entries: dict[str, _Serial] | None = None
    """Of a directory."""


class SimulatedDisk:
    """The disk below a folder, for the processes of a world."""

    def __init__(self, world: World, root: Path, seed: int = 0) -> None:
        """Take what is in the folder for durable."""
        self._world, self._root, self._random = world, root, random.Random(seed)
        self._serials: dict[int, _Serial] = {}
        """Inode -> serial number, of everything that exists."""
        self._durable: dict[_Serial, _Durable] = {}
        self._changes: list[_Change] = []
        """Changes of directories that were not synced, oldest first."""
        self._remember(root)
        world.on_cut.append(self.cut_power)

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Follow the calls of `os` during a block."""
        replacements = {
            "fsync": self._fsync,
            "rename": self._rename,
            "replace": self._rename,
            "link": self._link,
            "unlink": self._unlink,
            "remove": self._unlink,
            "mkdir": self._mkdir,
            "rmdir": self._rmdir,
            "truncate": self._truncate,
            "ftruncate": self._truncate,
            "write": self._write,
        }
        with mock.patch.multiple(os, **replacements):
            yield

    def _is_inside(self, path: str) -> bool:
        return self._world.process() is not None and (path == str(self._root) or path.startswith(f"{self._root}/"))

    def _operate(self, what: str, path: str, call: Callable[[], Any], then: Callable[[], Any] = lambda: None) -> Any:
        if not self._is_inside(path):
            return call()

        def effect() -> Any:
            result = call()
            then()
            return result

        return self._world.operate(f"{what} {os.path.relpath(path, self._root)}", effect)

    def _fsync(self, descriptor: int) -> None:
        path = _path_of(descriptor)

        def synced() -> None:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                self._sync_directory(path)
            elif stat.S_ISREG(status.st_mode):
                self._node(status.st_ino).content = Path(f"/proc/self/fd/{descriptor}").read_bytes()

        self._operate("fsync", path, synced if self._is_inside(path) else lambda: _OS["fsync"](descriptor))

    def _rename(self, old: Any, new: Any, **_: Any) -> None:
        old, new = os.path.abspath(old), os.path.abspath(new)
        replaced = _last_name(new)

        def changed() -> None:
            self._forget(replaced)
            serial = self._serial(os.lstat(new).st_ino)
            self._changes.append([(*self._entry(old), None), (*self._entry(new), serial)])

        self._operate("rename", new, lambda: _OS["rename"](old, new), changed)

    def _link(self, old: Any, new: Any, **_: Any) -> None:
        new = os.path.abspath(new)
        self._operate("link", new, lambda: _OS["link"](old, new), lambda: self._appeared(new))

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._disappear("unlink", path, dir_fd)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._disappear("rmdir", path, dir_fd)

    def _disappear(self, what: str, path: Any, dir_fd: int | None) -> None:
        full = os.path.join(_path_of(dir_fd), os.fspath(path)) if dir_fd is not None else os.path.abspath(path)
        removed = _last_name(full)

        def changed() -> None:
            self._changes.append([(*self._entry(full), None)])
            self._forget(removed)

        self._operate(what, full, lambda: _OS[what](path, dir_fd=dir_fd), changed)

    def _mkdir(self, path: Any, mode: int = 0o777, **_: Any) -> None:
        path = os.path.abspath(path)

        def changed() -> None:
            self._appeared(path)
            self._entries(os.stat(path).st_ino)

        self._operate("mkdir", path, lambda: _OS["mkdir"](path, mode), changed)

    def _truncate(self, path: Any, length: int) -> None:
        full = _path_of(path) if isinstance(path, int) else os.path.abspath(path)
        self._operate("truncate", full, lambda: _OS["truncate"](path, length))

    def _write(self, descriptor: int, data: Any) -> int:
        return int(self._operate("write", _path_of(descriptor), lambda: _OS["write"](descriptor, data)))

    def _appeared(self, path: str) -> None:
        self._changes.append([(*self._entry(path), self._serial(os.lstat(path).st_ino))])

    def _entry(self, path: str) -> tuple[_Serial, str]:
        parent, name = os.path.split(path)
        inode = os.stat(parent).st_ino
        self._entries(inode)
        return self._serial(inode), name

    def _serial(self, inode: int) -> _Serial:
        serial = self._serials.setdefault(inode, len(self._durable))
        self._durable.setdefault(serial, _Durable())
        return serial

    def _node(self, inode: int) -> _Durable:
        return self._durable[self._serial(inode)]

    def _entries(self, inode: int) -> dict[str, _Serial]:
        node = self._node(inode)
        if node.entries is None:
            node.entries = {}
        return node.entries

    def _forget(self, inode: int | None) -> None:
        """An inode has lost its last name: its number is free for another file."""
        if inode is not None:
            self._serials.pop(inode, None)

    def _sync_directory(self, path: str) -> None:
        inode = os.stat(path).st_ino
        number, rest = self._serial(inode), []
        for change in self._changes:
            if any(directory == number for directory, _, _ in change):
                self._apply(change)
            else:
                rest.append(change)
        self._changes = rest
        entries = self._entries(inode)
        entries.clear()
        with os.scandir(path) as scan:  # files appear without a call that is followed
            entries.update((entry.name, self._serial(entry.stat(follow_symlinks=False).st_ino)) for entry in scan)

    def _apply(self, change: _Change) -> None:
        for directory, name, serial in change:
            entries = self._durable[directory].entries
            assert entries is not None, "it has entries"
            if serial is None:
                entries.pop(name, None)
            else:
                entries[name] = serial

    def _remember(self, path: Path) -> None:
        inode = path.lstat().st_ino
        if path.is_dir():
            entries = self._entries(inode)
            for each in path.iterdir():
                entries[each.name] = self._serial(each.lstat().st_ino)
                self._remember(each)
        else:
            self._node(inode).content = path.read_bytes()

    def cut_power(self, torn: bool = False) -> None:
        """Make the folder what a power cut leaves of it; no process may run."""
        live = {self._serial(path.lstat().st_ino): path for path in [self._root, *self._root.rglob("*")]}
        contents = {serial: path.read_bytes() for serial, path in live.items() if path.is_file()}
        if torn:
            seen = {(directory, name) for change in self._changes for directory, name, _ in change}
            for serial, path in live.items():  # and what has appeared without a call that is followed
                if path != self._root:
                    directory, name = self._entry(str(path))
                    is_durable = self._entries(path.parent.lstat().st_ino).get(name) == serial
                    if not is_durable and (directory, name) not in seen:
                        self._changes.append([(directory, name, serial)])
            for change in self._changes:
                if self._random.random() < 0.5:
                    self._apply(change)
        for each in self._root.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()

        def make(serial: _Serial, path: Path) -> None:
            node = self._durable[serial]
            if node.entries is not None:
                path.mkdir(exist_ok=True)
                for name, inner in node.entries.items():
                    make(inner, path / name)
            else:
                path.write_bytes(self._content_after_cut(node.content, contents.get(serial), torn))

        make(self._serial(self._root.stat().st_ino), self._root)
        self._serials, self._durable, self._changes = {}, {}, []
        self._remember(self._root)

    def _content_after_cut(self, synced: bytes | None, written: bytes | None, torn: bool) -> bytes:
        before = synced or b""
        if not torn or written is None or written == before:
            return before
        kept = len(before) if written.startswith(before) else 0  # appending does not touch what was synced
        cut = self._random.randrange(kept, len(written) + 1)
        return self._random.choice([before, written, written[:cut], written[:kept] + bytes(len(written) - kept)])


_OS: dict[str, Callable[..., Any]] = {
    name: getattr(os, name) for name in ("fsync", "rename", "link", "unlink", "mkdir", "rmdir", "truncate", "write")
}


def _path_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def _last_name(path: str) -> int | None:
    """The inode of which this is the only name; None: it has others, or there is no such file."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_ino if stat.S_ISDIR(status.st_mode) or status.st_nlink == 1 else None
