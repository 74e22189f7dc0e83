"""Folders that are copied to a store and fetched from it."""

import json
from pathlib import Path

import pytest
from s3_endpoint import S3

from multihop.common.errors import UserError
from multihop.common.mirror import LISTING, fetch, is_pushed, push
from multihop.common.storage import open_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files, one of them larger than a part, and what is not copied."""
    found = tmp_path / "folder"
    (found / "inner").mkdir(parents=True)
    (found / "a.txt").write_bytes(b"small")
    (found / "b.bin").write_bytes(bytes(range(256)) * 40_000)
    (found / ".hidden").write_bytes(b"local")
    (found / "remembered.json").write_bytes(b"{}")
    return found


def test_what_was_pushed_is_fetched_once(folder: Path, place: str, tmp_path: Path) -> None:
    there, copy = open_folder(f"{place}/there"), tmp_path / "copy"
    with pytest.raises(UserError, match=r"holds no whole copy \(files.json is missing\)"):
        fetch(there, copy)
    push(folder, there, without=("remembered.json",))
    assert is_pushed(there)
    fetch(there, copy)
    assert sorted(path.name for path in copy.iterdir() if not path.name.startswith(".")) == ["a.txt", "b.bin"]
    assert all((copy / name).read_bytes() == (folder / name).read_bytes() for name in ("a.txt", "b.bin"))
    before = (copy / "b.bin").stat().st_mtime_ns
    (copy / "a.txt").write_bytes(b"SMALL")
    fetch(there, copy)
    assert (copy / "a.txt").read_bytes() == b"small" and (copy / "b.bin").stat().st_mtime_ns == before


def test_requests_that_fail_are_repeated(folder: Path, bucket: str, s3: S3, tmp_path: Path) -> None:
    s3.failing_every = 3
    push(folder, open_folder(f"{bucket}/there"))
    fetch(open_folder(f"{bucket}/there"), tmp_path / "copy")
    assert (tmp_path / "copy" / "b.bin").read_bytes() == (folder / "b.bin").read_bytes()


def test_a_copy_that_is_damaged_or_not_whole_is_refused(folder: Path, tmp_path: Path) -> None:
    there = open_folder(str(tmp_path / "there"))
    push(folder, there)
    (tmp_path / "there" / "a.txt").write_bytes(b"SMALL")
    with pytest.raises(UserError, match=r"there/a.txt is damaged"):
        fetch(there, tmp_path / "copy")
    assert not (tmp_path / "copy" / "a.txt").exists()
    (tmp_path / "there" / LISTING).write_bytes((tmp_path / "there" / LISTING).read_bytes().replace(b"5", b"6", 1))
    with pytest.raises(UserError, match=r"files.json is damaged"):
        fetch(there, tmp_path / "other")


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a/b", ".hidden", ""])
def test_a_listing_cannot_lead_out_of_the_folder(name: str, tmp_path: Path) -> None:
    from multihop.common.files import canonical_json, sha256_json

    there = tmp_path / "there"
    there.mkdir()
    files = {name: {"bytes": 1, "sha256": "0" * 64}}
    (there / LISTING).write_bytes(canonical_json({"files": files, "sha256": sha256_json(files)}))
    assert json.loads((there / LISTING).read_bytes())["files"] == files
    with pytest.raises(UserError, match="an entry that is not one of a copied folder"):
        fetch(open_folder(str(there)), tmp_path / "copy")
