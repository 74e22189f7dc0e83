"""Sample indexes on the disk: one that is not as it was written is made again, and never read as it is."""

import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.shards import open_dataset
from pretrain.config import ObjectiveConfig
from pretrain.samples import build_index, index_path, open_index


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
    for name in (path, path.with_suffix(".sha256")):
        name.unlink()
        put(name)
        if name == path:
            with pytest.raises(ValueError, match=rf"^the sample index {path} cannot be read .* start the run again"):
                open_index(tmp_path, data, "train", objective, 24)
        build_index(tmp_path, data, "train", objective, 24)
        assert path.read_bytes() == good
        assert open_index(tmp_path, data, "train", objective, 24).size > 10
