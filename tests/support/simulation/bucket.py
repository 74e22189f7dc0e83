"""A simulated bucket: objects in memory, and at any operation a fault of the world's."""

import hashlib
from collections.abc import Iterable

from multihop.common.store import Bytes, Kind, RandomAccessFile
from simulation.world import World


class SimulatedBucket:
    """`Store` of a world's objects, by BUCKET/KEY."""

    is_local = False

    def __init__(self, world: World) -> None:
        """Start empty."""
        self._world = world
        self.objects: dict[str, bytes] = {}
        self._history: list[tuple[str, bytes | None]] = []
        """Each changed path, with its object before the change."""
        self._times: dict[str, float] = {}
        self._versions: dict[str, str] = {}

    def entries(self, folder: str) -> dict[str, Kind]:
        """List a folder."""

        def entries() -> dict[str, Kind]:
            kinds: dict[str, Kind] = {}
            for path in self._listed(folder):
                if path.startswith(f"{folder}/"):
                    name, inner, _ = path[len(folder) + 1 :].partition("/")
                    kinds[name] = "folder" if inner else "file"
            return dict(sorted(kinds.items()))

        return self._world.operate(f"list {folder}", entries)

    def files(self, folder: str) -> list[str]:
        """List what is below a folder."""
        prefix = f"{folder}/"
        return self._world.operate(
            f"list all of {folder}",
            lambda: sorted(path.removeprefix(prefix) for path in self._listed(folder) if path.startswith(prefix)),
        )

    def size(self, path: str) -> int | None:
        """Return an object's size."""

        def size() -> int | None:
            return len(self.objects[path]) if path in self.objects else None

        return self._world.operate(f"head {path}", size)

    def modified_at(self, path: str) -> float:
        """Return the time of an object's newest change."""
        return self._world.operate(f"head {path}", lambda: self._times[path])

    def open(self, path: str) -> RandomAccessFile:
        """Open an object; reading from it is no operation of its own."""

        def opened() -> RandomAccessFile:
            if path not in self.objects:
                raise FileNotFoundError(path)
            return RandomAccessFile(_Object(self.objects[path]))

        return self._world.operate(f"get {path}", opened)

    def write(self, path: str, chunks: Iterable[Bytes]) -> None:
        """Write an object."""
        self.put(path, b"".join(chunks))

    def put(self, path: str, data: bytes) -> None:
        """Write an object."""
        self._world.operate(f"put {path}", lambda: self._change(path, data))

    def create(self, path: str, data: bytes, writer: str) -> bool:
        """Write an object unless it exists."""

        def created() -> bool:
            if path in self.objects:
                return False
            self._change(path, data)
            return True

        return self._world.operate(f"create {path}", created)

    def read(self, path: str) -> tuple[bytes, str]:
        """Read an object, and its version."""

        def read() -> tuple[bytes, str]:
            if path not in self.objects:
                raise FileNotFoundError(path)
            return self.objects[path], self._versions[path]

        return self._world.operate(f"get {path}", read)

    def replace(self, path: str, data: bytes, version: str | None) -> str | None:
        """Write an object that has a version."""

        def replaced() -> str | None:
            if self._versions.get(path) == version:
                self._change(path, data)
            return self._versions[path] if self.objects.get(path) == data else None

        return self._world.operate(f"replace {path}", replaced)

    def remove(self, path: str) -> None:
        """Remove an object."""
        self._world.operate(f"remove {path}", lambda: self._change(path, None))

    def sync(self, folder: str) -> None:
        """Do nothing: what was answered is durable."""

    def remove_folder(self, path: str) -> None:
        """Do nothing: a bucket has no folders."""

    def move(self, folder: str, to: str) -> None:
        """Copy and then remove each object of a folder, as `s3.Bucket` does."""
        names = [name for name, kind in self.entries(folder).items() if kind == "file"]
        for name in reversed(names):
            self._world.operate(
                f"copy {folder}/{name}",
                lambda name=name: self._change(f"{to}/{name}", self.objects[f"{folder}/{name}"]),
            )
        for name in names:
            self.remove(f"{folder}/{name}")

    def _listed(self, folder: str) -> dict[str, bytes]:
        """The objects; for a stale listing without the newest change in a folder."""
        changes = [change for change in self._history if change[0].startswith(f"{folder}/")]
        if not changes or not self._world.is_stale():
            return self.objects
        path, before = changes[-1]
        listed = {each: data for each, data in self.objects.items() if each != path}
        return listed if before is None else {**listed, path: before}

    def _change(self, path: str, data: bytes | None) -> None:
        self._history.append((path, self.objects.get(path)))
        if data is None:
            self.objects.pop(path, None)
            self._versions.pop(path, None)
        else:
            self._versions[path] = hashlib.md5(data, usedforsecurity=False).hexdigest()  # as S3's ETag
            self.objects[path], self._times[path] = bytes(data), self._world.time


class _Object:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def size(self) -> int:
        return len(self._data)

    def read_at(self, nbytes: int, offset: int) -> bytes:
        return self._data[offset : offset + nbytes]

    def close(self) -> None:
        """Nothing is open."""
