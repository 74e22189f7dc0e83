"""A file's header is believed only where it fits."""

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from multihop.common.errors import UserError
from multihop.common.storage import open_folder
from multihop.pretrain.checkpoint.tensor_file import Extent, header_of, read_header


def read(folder: Path, data: bytes) -> tuple[dict[str, Extent], int]:
    (folder / "file").write_bytes(data)
    with open_folder(str(folder)).open("file") as source:
        return read_header(source)


def file_of(header: Any, body: int) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(body)


def f32(numel: int, start: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [numel], "data_offsets": [start, start + 4 * numel]}


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    data = save({"b": torch.arange(5.0), "a": torch.ones(3)}, {"format": "pt"})
    extents, begin = read(tmp_path, data)
    assert begin == 8 + struct.unpack("<Q", data[:8])[0] and begin % 8 == 0
    assert struct.unpack_from("<5f", data, extents["b"].offset) == (0, 1, 2, 3, 4)
    assert {name: extent.numel for name, extent in extents.items()} == {"a": 3, "b": 5}


def test_our_own_header(tmp_path: Path) -> None:
    header = header_of({"weight/é@0": 3, "empty": 0, "b": 1})
    extents, begin = read(tmp_path, header + bytes(16))
    assert begin == len(header)
    assert extents == {"weight/é@0": Extent(begin, 3), "empty": Extent(begin + 12, 0), "b": Extent(begin + 12, 1)}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"123", "ends after 3 bytes"),
        (struct.pack("<Q", 2**63) + bytes(20), "header is said to have"),
        (struct.pack("<Q", 21) + bytes(20), "header is said to have 21 bytes, the whole file has 28"),
        (struct.pack("<Q", 4) + b"{  ]", "its header is not a JSON object"),
        (struct.pack("<Q", 4) + b"\xff\xfe{}", "its header is not a JSON object"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "holds more lists than a table"),
        (file_of([], 0), "it holds a list"),
        (file_of({"a": f32(2, 0)}, 9), "tensors end at byte"),
        (file_of({"a": f32(2, 0)}, 7), "tensors end at byte"),
        (file_of({"a": f32(2, 0), "b": f32(2, 4)}, 12), "tensor b begins at byte"),
        (file_of({"a": f32(2, 0), "b": f32(2, 12)}, 20), "tensor b begins at byte"),
        (file_of({"a": f32(2, 4)}, 12), "tensor a begins at byte"),
        (file_of({"a": {**f32(2, 0), "dtype": "I32"}}, 8), "tensor a is not float32"),
        (file_of({"a": {**f32(2, 0), "shape": [2, 1]}}, 8), "tensor a is not float32"),
        (file_of({"a": {**f32(2, 0), "data_offsets": [0, 4]}}, 8), "tensor a is not float32"),
        (file_of({"a": {**f32(2, 0), "data_offsets": [-8, 0]}}, 8), "tensor a is not float32"),
        (file_of({"a": {**f32(2, 0), "shape": [-2], "data_offsets": [8, 0]}}, 8), "tensor a is not float32"),
        (file_of({"a": 7}, 8), "tensor a is not float32"),
        (file_of({"a": {**f32(1, 0), "shape": [True]}}, 4), "tensor a is not float32"),
        (file_of({"a": {**f32(0, 0), "shape": [-1], "data_offsets": [0, -4]}}, 0), "tensor a is not float32"),
        (file_of({"a": f32(3, 0), "b": f32(3, 0)}, 12), "tensor b begins at byte"),
        (file_of({"a": f32(10**30, 0)}, 8), "more than 64 bits"),
        (struct.pack("<Q", 2**33) + b"{}", "header is said to have"),
        (file_of({"a" * 9_000_000: f32(1, 0)}, 4), "it has more than 8,388,608 bytes"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        read(tmp_path, data)


@given(st.binary(max_size=60), st.booleans())
def test_random_bytes_give_no_tensors(tmp_path_factory: pytest.TempPathFactory, data: bytes, with_length: bool) -> None:
    if with_length:
        data = struct.pack("<Q", len(data)) + data
    with suppress(ValueError):
        assert read(tmp_path_factory.getbasetemp(), data)[0] == {}  # {} is a file without tensors
