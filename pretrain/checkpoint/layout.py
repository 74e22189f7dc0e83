"""The layout of a checkpoint: which file holds which elements of a parameter, and at which byte.

A rank owns a slice of a parameter, and ZeRO gives consecutive ranks equal slices of it. The manifest therefore holds
stripes: `[first_file, files, elements]` means that each of `files` consecutive files holds `elements` elements. The
stripes of a parameter follow each other from its first element to its last, which rules out gaps and overlaps. There
are about three per parameter at most, whatever number of ranks wrote the checkpoint.

Offsets are not stored: a file holds its slices sorted by parameter, start and kind, without gaps, up to its end.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from multihop.common.errors import UserError
from multihop.pretrain.checkpoint.tensor_file import ITEM_BYTES

Slices = Sequence[tuple[int, int, int]]
"""The slices in one file: (index of the parameter among the sorted names, first element, number of elements)."""
_START = re.compile(r"0|[1-9][0-9]{0,17}")
_MAX_FILE_BYTES = 2**47
_MAX_FILES = 2**16
"""With both limits, the offset of every byte of a checkpoint is below 2**63."""


class Stripe(NamedTuple):
    """Equal slices of a parameter in consecutive files."""

    first_file: Annotated[int, Field(strict=True, ge=0)]
    files: Annotated[int, Field(strict=True, ge=1)]
    elements: Annotated[int, Field(strict=True, ge=1)]
    """Elements of each slice."""


class Piece(NamedTuple):
    """Consecutive elements in one file."""

    file: int
    """Index of the file in the manifest."""
    offset: int
    """Position of the first byte in the file."""
    elements: int


Locate = Callable[[str, str, int, int], list[Piece]]
"""(kind, parameter, start, elements) -> the pieces that hold these elements, in order; they are incomplete if the
checkpoint has fewer elements."""


class Layout:
    """Finds the bytes of any slice from the stripes in a manifest."""

    def __init__(
        self,
        parameters: Mapping[str, Sequence[int]],
        kinds: Mapping[str, Sequence[str]],
        stripes: Mapping[str, Sequence[Stripe]],
        file_bytes: Sequence[int],
    ) -> None:
        """Check that the stripes match the parameters and fit into the files.

        Args:
            parameters: Name -> shape.
            kinds: Parameter -> the kinds of tensor that the files hold for each slice of it, sorted.
            file_bytes: The size of each file.

        Raises:
            UserError: They do not. The message does not name the checkpoint's location.
        """
        self._check(parameters, kinds, stripes, file_bytes)
        self._kinds, self._rows = {name: list(kinds[name]) for name in parameters}, dict[str, list[int]]()
        self._names: list[str] = []
        """The parameter of each stripe."""
        starts: list[int] = []
        for name in sorted(stripes):
            self._rows[name] = list(range(len(starts), len(starts) + len(stripes[name])))
            self._names += [name] * len(stripes[name])
            starts += accumulate((each.files * each.elements for each in stripes[name][:-1]), initial=0)
        rows = [stripe for name in sorted(stripes) for stripe in stripes[name]]
        self._first, files, self._elements = np.array(rows, np.int64).reshape(-1, 3).T
        self._start, self._stop = np.array(starts, np.int64), self._first + files
        self._stored = self._elements * np.array([len(self._kinds[name]) for name in self._names], np.int64)
        """Elements of each slice of each stripe, of all kinds together."""
        changes = np.zeros(len(file_bytes) + 1, np.int64)  # of the elements per file, from one file to the next
        np.add.at(changes, self._first, self._stored)
        np.subtract.at(changes, self._stop, self._stored)
        data_bytes = changes.cumsum()[:-1] * ITEM_BYTES
        self._data_start = np.array(file_bytes, np.int64) - data_bytes
        if (short := np.flatnonzero(self._data_start < 0)).size:
            index = int(short[0])
            raise UserError(f"file {index} has {file_bytes[index]:,} bytes, its slices need {data_bytes[index]:,}")
        self._positions = lru_cache(256)(self._positions_in)  # one per open file

    def locate(self, kind: str, name: str, start: int, elements: int) -> list[Piece]:
        """The pieces that hold `elements` elements of a parameter from `start` on, as `Locate` describes."""
        if kind not in self._kinds.get(name, ()):
            return []
        pieces = []
        for row in self._rows.get(name, ()):
            size, first, before = int(self._elements[row]), int(self._first[row]), int(self._start[row])
            begin, end = max(start - before, 0), start + elements - before  # in elements of this stripe
            if begin >= end:
                continue
            for file in range(first + begin // size, min(first - (-end // size), int(self._stop[row]))):
                skip = max(begin - (file - first) * size, 0)
                count = min(end - (file - first) * size, size) - skip
                pieces.append(self._piece(file, row, kind, skip, count))
        return pieces

    def tensors_of(self, file: int) -> dict[str, int]:
        """The name and number of elements of each tensor in a file, in the file's order."""
        tensors: dict[str, int] = {}
        for row in np.flatnonzero(self._has_slice(file)).tolist():
            elements = int(self._elements[row])
            start = int(self._start[row]) + (file - int(self._first[row])) * elements
            name = self._names[row]
            tensors |= {tensor_name(kind, name, start): elements for kind in self._kinds[name]}
        return tensors

    def _has_slice(self, file: int) -> NDArray[np.bool_]:
        """(stripes,): whether each stripe has a slice in a file."""
        return (self._first <= file) & (file < self._stop)

    def _piece(self, file: int, row: int, kind: str, skip: int, count: int) -> Piece:
        before = int(self._positions(file)[row])
        within = self._kinds[self._names[row]].index(kind) * int(self._elements[row]) + skip
        return Piece(file, int(self._data_start[file]) + ITEM_BYTES * (before + within), count)

    def _positions_in(self, file: int) -> NDArray[np.int64]:
        """(stripes,): the number of elements, of all kinds, before a stripe's slice in a file."""
        elements = np.where(self._has_slice(file), self._stored, 0)
        positions: NDArray[np.int64] = elements.cumsum() - elements
        return positions

    @staticmethod
    def _check(
        parameters: Mapping[str, Sequence[int]],
        kinds: Mapping[str, Sequence[str]],
        stripes: Mapping[str, Sequence[Stripe]],
        file_bytes: Sequence[int],
    ) -> None:
        for name, own in kinds.items():
            if "weight" not in own or list(own) != sorted(set(own)) or any("/" in kind for kind in own):
                raise UserError(f"the kinds of {name[:200]} are not a sorted list with weight in it")
        if len(file_bytes) > _MAX_FILES or max(file_bytes, default=0) > _MAX_FILE_BYTES:
            raise UserError(f"it has more than {_MAX_FILES:,} files, or one of more than {_MAX_FILE_BYTES:,} bytes")
        for name in sorted(parameters.keys() ^ stripes.keys()):
            raise UserError(f"{name[:200]} is not in both parameters and stripes")
        for name, shape in parameters.items():
            held, wanted = sum(stripe.files * stripe.elements for stripe in stripes[name]), math.prod(shape)
            if held != wanted:
                raise UserError(f"its stripes hold {held:,} elements of {name[:200]}, its shape has {wanted:,}")
            if any(stripe.first_file + stripe.files > len(file_bytes) for stripe in stripes[name]):
                raise UserError(f"its stripes of {name[:200]} are in more than its {len(file_bytes):,} files")


def build_stripes(
    parameters: Mapping[str, Sequence[int]], files: Sequence[Slices | NDArray[np.int64]]
) -> dict[str, list[Stripe]]:
    """The stripes of all parameters, from the slices that each file holds.

    Raises:
        UserError: The slices do not cover each element of each parameter exactly once.
    """
    names = sorted(parameters)
    file = np.repeat(np.arange(len(files)), [len(slices) for slices in files])
    rows = [np.asarray(slices, np.int64).reshape(-1, 3) for slices in files]
    parameter, start, elements = np.concatenate([np.empty((0, 3), np.int64), *rows]).T
    order = np.lexsort((start, parameter))
    file, parameter, start, elements = file[order], parameter[order], start[order], elements[order]
    is_next = parameter[1:] == parameter[:-1]  # the same parameter as the row before
    bounds = np.concatenate([[0], 1 + np.flatnonzero(~is_next), [len(order)]]) if len(order) else np.array([0])
    stop = start + elements
    expected = np.concatenate([[0], np.where(is_next, stop[:-1], 0)])[: len(order)]
    for row in np.flatnonzero(start != expected)[:1]:
        name = names[parameter[row]]
        raise UserError(f"the ranks hold {name} up to element {expected[row]}, and then from {start[row]}")
    held = {names[parameter[first]]: int(stop[last - 1]) for first, last in pairwise(bounds.tolist())}
    for name in names:
        if held.get(name, 0) != math.prod(parameters[name]):
            raise UserError(
                f"the ranks hold {held.get(name, 0)} elements of {name}, its shape has {math.prod(parameters[name])}"
            )
    same = is_next & (elements[1:] == elements[:-1]) & (file[1:] == file[:-1] + 1)
    firsts = np.concatenate([[0], 1 + np.flatnonzero(~same)])[: len(order)]
    counts = np.diff(firsts, append=len(order))
    stripes: dict[str, list[Stripe]] = {name: [] for name in names}
    for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
        stripes[names[parameter[first]]].append(Stripe(int(file[first]), count, int(elements[first])))
    return stripes


def kinds_and_slices(
    tensors: Mapping[str, int], parameters: Mapping[str, Sequence[int]]
) -> tuple[dict[str, list[str]], Slices]:
    """The kinds of each parameter in a file, and the slices, given the names and numbers of elements of its tensors.

    Raises:
        UserError: The slices of a parameter are not the same for every kind.
    """
    numbers = {name: number for number, name in enumerate(sorted(parameters))}
    slices: dict[str, dict[str, list[tuple[int, int, int]]]] = {}
    for key, elements in tensors.items():
        kind, name, start = parse_tensor_name(key)
        if name not in numbers:
            raise UserError(f"{name} is not a parameter of the manifest")
        slices.setdefault(name, {}).setdefault(kind, []).append((numbers[name], start, elements))
    for name, by_kind in slices.items():
        if len({tuple(each) for each in by_kind.values()}) > 1:
            raise UserError(f"the slices of {', '.join(sorted(by_kind))} of {name} differ")
    kinds = {name: sorted(by_kind) for name, by_kind in slices.items()}
    return kinds, [piece for name in slices for piece in slices[name][kinds[name][0]]]


def file_order(tensor: str) -> tuple[str, int, str]:
    """The key by which the tensors in a file are sorted."""
    kind, name, start = parse_tensor_name(tensor)
    return name, start, kind


def tensor_name(kind: str, name: str, start: int) -> str:
    """Return KIND/NAME@START."""
    return f"{kind}/{name}@{start}"


def parse_tensor_name(tensor: str) -> tuple[str, str, int]:
    """Split KIND/NAME@START into its three parts.

    Raises:
        UserError: The name is not of this form.
    """
    kind, slash, rest = tensor.partition("/")
    name, at, start = rest.rpartition("@")
    if not (kind and slash and name and at and _START.fullmatch(start)):
        raise UserError(f"tensor {tensor[:200]!r} is not named KIND/NAME@START")
    return kind, name, int(start)
