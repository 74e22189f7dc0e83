"""Manifests and files that are wrong but have the right hashes, as anyone can write them, are refused."""

import hashlib
import json
import re
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from saved_tensors import as_version_3, rank_file, rewrite_manifest, save

from multihop.common.errors import UserError
from multihop.common.files import canonical_json, sha256_json
from multihop.pretrain.checkpoint.manifest import read_checkpoint_manifest
from multihop.pretrain.checkpoint.verify import load_weights, newest_good, verify

STRIPES = {"norm.bias": [[0, 1, 9]], "word.weight": [[0, 1, 35]]}
F0 = {"file": rank_file(0), "bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "changes",
    [
        {"files": [{**F0, "file": "../secret"}]},
        {"files": [{**F0, "file": "/etc/passwd"}]},
        {"files": [{**F0, "file": ".."}]},
        {"files": [{**F0, "file": f"{rank_file(0)}\n"}]},
        {"files": [{**F0, "bytes": 10**6}] * 2},
        {"files": [{**F0, "bytes": -1}]},
        {"files": []},
        {"parameters": {"a": [10**12]}},
        {"parameters": {"a": [10**30]}},
        {"parameters": {"a": [2**31, 2**31, 4]}},
        {"parameters": {"a": [-4, -3]}},
        {"parameters": {"a": [True]}},
        {"parameters": {"a": [2**62] * 10_000}},
        {"parameters": {f"p{i}": [1] for i in range(100_000)}},
        {"step": -7},
        {"step": 10**30},
        {"step": "1"},
        {"step": 1.0},
        {"world_size": 0},
        {"zero_stage": 4},
        {"counters": {"x": "nan"}},
        {"recipe": {"a": "deep"}},
        {"recipe": {"a": "\ud800"}},
        {"run": 7},
        {"format_version": True},
        {"format_version": [3]},
        {"kinds": []},
        {"kinds": ["exp_avg"]},
        {"kinds": ["weight", "exp_avg"]},
        {"kinds": ["weight", "weight"]},
        {"kinds": ["exp_avg", "exp_avg_sq", "weight"]},
        {"stripes": None},
        {"stripes": {}},
        {"stripes": {"norm.bias": [[0, 1, 9]]}},
        {"stripes": {**STRIPES, "other": [[0, 1, 1]]}},
        {"stripes": {**STRIPES, "norm.bias": [[0, 1, 8]]}},
        {"stripes": {**STRIPES, "norm.bias": [[0, 1, 10]]}},
        {"stripes": {**STRIPES, "norm.bias": [[0, 9, 1]]}},
        {"stripes": {**STRIPES, "norm.bias": [[1, 1, 9]]}},
        {"stripes": {**STRIPES, "norm.bias": [[-1, 1, 9]]}},
        {"stripes": {**STRIPES, "norm.bias": [[0, -3, -3]]}},
        {"stripes": {**STRIPES, "norm.bias": [[0, 1, 10], [0, 1, -1]]}},
        {"stripes": {**STRIPES, "norm.bias": [[0, 1, 9], [0, 0, 4]]}},
        {"stripes": {**STRIPES, "norm.bias": [[0, 1, True]] * 9}},
        {"stripes": {**STRIPES, "norm.bias": [[0, 1]]}},
        {"stripes": {**STRIPES, "norm.bias": [[0, 2**62, 2**62]]}},
        {"stripes": {**STRIPES, "norm.bias": [[0, 10**30, 1]]}},
        {"stripes": {"a": [[0, 1, 2**62]]}, "parameters": {"a": [2**62]}, "files": [{**F0, "bytes": 2**62}]},
        {
            "stripes": {"a": [[0, 1, 2**61]]},
            "parameters": {"a": [2**61]},
            "files": [{**F0, "bytes": 2**62}, {**F0, "file": rank_file(1), "bytes": 2**62}],
        },
    ],
)
def test_a_manifest_that_asks_for_too_much_is_a_sentence(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = Path(save(tmp_path, 1, 1))
    content = {**json.loads((folder / "manifest.json").read_bytes()), **changes}
    del content["sha256"]
    text = json.dumps({**content, "sha256": "0"}, sort_keys=True, separators=(",", ":"))
    with suppress(ValueError):
        text = canonical_json({**content, "sha256": sha256_json(content)}).decode()
    (folder / "manifest.json").write_text(text.replace('"deep"', "[" * 980 + "]" * 980))
    reasons = [refused(read_checkpoint_manifest, folder), refused(verify, folder), refused(load_weights, folder)]
    assert len(set(reasons)) == 1 and "\n" not in reasons[0] and len(reasons[0]) < 600
    assert newest_good(str(tmp_path)) == (None, reasons[:1])


def refused(read: Callable[[str], object], folder: Path) -> str:
    with pytest.raises(UserError, match=re.escape(str(folder))) as error:
        read(str(folder))
    assert type(error.value) is UserError
    return str(error.value)


A = {"dtype": "F32", "shape": [12], "data_offsets": [0, 48]}


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ({"weight/a@0": A, "weight/a@00": {**A, "data_offsets": [48, 96]}}, 96),
        ({"weight/a@0": A, "weight/a@4": {**A, "data_offsets": [48, 96]}}, 96),
        ({"weight/a@0": {**A, "shape": [4], "data_offsets": [0, 16]}, "weight/a@8": {**A, "shape": [4],
          "data_offsets": [16, 32]}}, 48),
        ({"weight/a@0": A, "weight/b@0": {**A, "data_offsets": [48, 96]}}, 96),
        ({"weight/a@0": A, "exp_avg/a@3": {**A, "data_offsets": [48, 96]}}, 96),
        ({"exp_avg/a@0": A}, 48),
        ({"weight/a@\u0660": A}, 48),
        ({"a": A}, 48),
        ({"weight/a@0": [[[[]]]]}, 48),
    ],
)  # fmt: skip
def test_slices_that_are_not_each_parameters_once_and_whole_are_a_sentence(
    tmp_path: Path, header: dict[str, Any], body: int
) -> None:
    folder = Path(save(tmp_path, 1, 1))
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(body)
    (folder / rank_file(0)).write_bytes(data)
    entry = {"file": rank_file(0), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    as_version_3(folder, files=[entry], parameters={"a": [12]})
    reasons = [refused(verify, folder), refused(load_weights, folder)]
    assert reasons[0] == reasons[1] and "\n" not in reasons[0]
    assert newest_good(str(tmp_path)) == (None, reasons[:1])


def test_a_header_that_does_not_have_the_manifests_slices_is_a_sentence(tmp_path: Path) -> None:
    """The hash is right, but other programs would read other numbers from the file than multihop."""
    folder = Path(save(tmp_path, 1, 1))
    path = folder / rank_file(0)
    swapped = path.read_bytes().replace(b"norm.bias", b"norm.xxxx")
    path.write_bytes(swapped)
    entry = {"file": path.name, "bytes": len(swapped), "sha256": hashlib.sha256(swapped).hexdigest()}
    rewrite_manifest(folder, files=[entry])
    assert refused(verify, folder) == f"{path} is damaged: its header does not have the slices that the manifest says"
