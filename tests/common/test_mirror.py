"""Folders that are copied to a store and fetched from it."""

import json
import os
from pathlib import Path

import pytest
from s3_endpoint import S3

from multihop.common.errors import UserError
from multihop.common.mirror import FETCHED, LISTING, fetch, is_pushed, push
from multihop.common.storage import open_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files, one of them larger than a part, and what is not copied."""
    result = tmp_path / "folder"
    (result / "inner").mkdir(parents=True)
    (result / "a.txt").write_bytes(b"small")
    (result / "b.bin").write_bytes(bytes(range(256)) * 40_000)
    (result / ".hidden").write_bytes(b"local")
    (result / "remembered.json").write_bytes(b"{}")
    return result


def test_what_was_pushed_is_fetched_once(folder: Path, location: str, tmp_path: Path) -> None:
    remote, copy = open_folder(f"{location}/remote"), tmp_path / "copy"
    with pytest.raises(UserError, match=r"holds no whole copy \(files.json is missing\)"):
        fetch(remote, copy)
    push(folder, remote, without=("remembered.json",))
    assert is_pushed(remote)
    fetch(remote, copy)
    assert sorted(path.name for path in copy.iterdir() if not path.name.startswith(".")) == ["a.txt", "b.bin"]
    assert all((copy / name).read_bytes() == (folder / name).read_bytes() for name in ("a.txt", "b.bin"))
    before = (copy / "b.bin").stat().st_mtime_ns
    (copy / "a.txt").write_bytes(b"SMALL")
    fetch(remote, copy)
    assert (copy / "a.txt").read_bytes() == b"small" and (copy / "b.bin").stat().st_mtime_ns == before


def test_files_of_100_000_that_did_not_change_are_not_read_again(folder: Path, tmp_path: Path) -> None:
    remote, copy = open_folder(f"{tmp_path}/remote"), tmp_path / "copy"
    push(folder, remote)
    fetch(remote, copy)
    fetched = json.loads((copy / FETCHED).read_bytes())
    others = {f"train-{number:05d}.arrow": fetched["a.txt"] for number in range(100_000)}
    (copy / FETCHED).write_text(json.dumps({**others, **fetched}))
    status = (copy / "a.txt").stat()
    (copy / "a.txt").write_bytes(b"SMALL")  # unnoticed, with the size and the time of the file that was fetched
    os.utime(copy / "a.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
    fetch(remote, copy)
    assert (copy / "a.txt").read_bytes() == b"SMALL"


def test_requests_that_fail_are_repeated(folder: Path, bucket: str, s3: S3, tmp_path: Path) -> None:
    s3.failing_every = 3
    push(folder, open_folder(f"{bucket}/remote"))
    fetch(open_folder(f"{bucket}/remote"), tmp_path / "copy")
    assert (tmp_path / "copy" / "b.bin").read_bytes() == (folder / "b.bin").read_bytes()


def test_a_copy_that_is_damaged_or_not_whole_is_refused(folder: Path, tmp_path: Path) -> None:
    remote = open_folder(str(tmp_path / "remote"))
    push(folder, remote)
    (tmp_path / "remote" / "a.txt").write_bytes(b"SMALL")
    with pytest.raises(UserError, match=r"remote/a.txt is damaged"):
        fetch(remote, tmp_path / "copy")
    assert not (tmp_path / "copy" / "a.txt").exists()
    (tmp_path / "remote" / LISTING).write_bytes((tmp_path / "remote" / LISTING).read_bytes().replace(b"5", b"6", 1))
    with pytest.raises(UserError, match=r"files.json is damaged"):
        fetch(remote, tmp_path / "other")


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a/b", ".hidden", ""])
def test_a_listing_cannot_lead_out_of_the_folder(name: str, tmp_path: Path) -> None:
    from multihop.common.files import canonical_json, sha256_json

    remote = tmp_path / "remote"
    remote.mkdir()
    files = {name: {"bytes": 1, "sha256": "0" * 64}}
    (remote / LISTING).write_bytes(canonical_json({"files": files, "sha256": sha256_json(files)}))
    assert json.loads((remote / LISTING).read_bytes())["files"] == files
    with pytest.raises(UserError, match="an entry that is not one of a copied directory"):
        fetch(open_folder(str(remote)), tmp_path / "copy")
