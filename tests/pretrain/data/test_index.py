"""Sample indexes on the disk: one that is not as it was written is rebuilt, and never read."""

import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from multihop.common.errors import UserError
from multihop.data_prep.dataset.shards import open_dataset
from multihop.pretrain.data.index import build_index, index_path, open_index
from multihop.pretrain.objectives.config import ObjectiveConfig


def header_of(shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<i8", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def with_content(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


@pytest.mark.parametrize(
    "put",
    [
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        with_content(b""),
        with_content(header_of((10**12,)) + bytes(800)),
        with_content(header_of((4,))[:-20]),
        with_content(np.lib.format.magic(1, 0) + b"\xff\xff" + b"(" * 65_535),
    ],
    ids=["fifo", "device", "empty", "1e12", "cut", "nested"],
)
def test_an_index_that_is_none_is_refused_by_name_and_made_again(tmp_path, bert_data, put):
    data, objective = open_dataset(bert_data), ObjectiveConfig.model_validate({"name": "mlm"})
    path = index_path(tmp_path, data, "train", objective, 24)
    build_index(tmp_path, data, "train", objective, 24)
    good = path.read_bytes()
    for name in (path, path.with_suffix(".json")):
        name.unlink()
        put(name)
        if name == path:
            with pytest.raises(
                UserError, match=rf"^the sample index {path} cannot be read .* rerun the same command to rebuild it"
            ):
                open_index(tmp_path, data, "train", objective, 24)
        build_index(tmp_path, data, "train", objective, 24)
        assert path.read_bytes() == good
        assert open_index(tmp_path, data, "train", objective, 24).size > 10


def test_an_index_is_trusted_by_size_and_time_and_hashed_when_asked(tmp_path, bert_data):
    data, objective = open_dataset(bert_data), ObjectiveConfig.model_validate({"name": "mlm"})
    path = index_path(tmp_path, data, "train", objective, 24)
    build_index(tmp_path, data, "train", objective, 24)
    good, before = path.read_bytes(), os.stat(path)
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    build_index(tmp_path, data, "train", objective, 24)
    assert path.read_bytes() != good
    build_index(tmp_path, data, "train", objective, 24, full=True)
    assert path.read_bytes() == good
    os.utime(path, ns=(1, 1))  # a copy: hashed once, then trusted
    build_index(tmp_path, data, "train", objective, 24)
    assert path.read_bytes() == good and os.stat(path).st_mtime_ns == 1
    path.write_bytes(good[:-8])
    build_index(tmp_path, data, "train", objective, 24)
    assert path.read_bytes() == good
