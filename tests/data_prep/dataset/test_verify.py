"""Verification hashes a file once, then again whenever its size or its modification time has changed."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prepared_data import already_prepared, bytes_of

from multihop.common.errors import UserError
from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.dataset.manifest import MANIFEST, read_data_manifest, write_manifest
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.dataset.verify import (
    VERIFIED,
    is_verified,
    read_if_intact,
    read_if_verified,
    verify_dataset,
    verify_files,
)
from multihop.data_prep.pipeline.prepare import prepare

Recipe = tuple[DataConfig, TokenizerConfig]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, document) -> tuple[Recipe, Path]:
    folder = tmp_path_factory.mktemp("prepared")
    for number in range(60):
        (folder / f"{number:02d}.txt").write_text(document(number))
    data = DataConfig(sources=[Source(path=str(folder / "*.txt"))], heldout_fraction=0.1)
    tok = TokenizerConfig(vocab_size=150, threads=1)
    prepare(data, tok, folder / "out")
    return (data, tok), folder / "out"


@pytest.fixture
def folder(prepared, tmp_path) -> Path:
    """A data set as it was prepared, with its modification times."""
    shutil.copytree(prepared[1], tmp_path / "out")
    return tmp_path / "out"


def start(folder: Path, full: bool = False) -> tuple[bool, list[str]]:
    """Return whether a start accepts the data set as intact, and the names of the files that it hashed."""
    hashed: list[str] = []

    def watched(function, items):
        hashed.extend(Path(path).name for path, _ in items)
        return map(function, reversed(items))

    return read_if_intact(folder, read_data_manifest(folder).inputs, watched, full=full) is not None, sorted(hashed)


def files_in(folder: Path) -> list[str]:
    return sorted({*bytes_of(folder)} - {MANIFEST})


def flip(path: Path, at: int = 1_000) -> os.stat_result:
    """Change a bit in the middle of a file; returns its status before the change."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))
    return before


def test_a_data_set_is_trusted_from_the_start_that_wrote_it_on(folder):
    identity = read_data_manifest(folder).inputs
    assert read_if_verified(folder, identity) == read_data_manifest(folder) == read_if_intact(folder, identity)
    assert start(folder) == (True, [])
    assert start(folder, full=True) == (True, files_in(folder))
    assert read_if_verified(folder, "0" * 64) is None and read_if_intact(folder, "0" * 64) is None
    assert (
        read_if_verified(folder / "nowhere", identity) is None and read_if_intact(folder / "nowhere", identity) is None
    )


@pytest.mark.parametrize("name", ["train-00000.arrow", "heldout-00000.arrow", "tokenizer.model", "token_counts.npy"])
def test_a_file_of_another_time_or_size_is_hashed_again_and_it_alone(folder, name):
    os.utime(folder / name)
    assert read_if_verified(folder, read_data_manifest(folder).inputs) is None
    assert start(folder) == (True, [name])
    assert start(folder) == (True, [])
    before = (folder / name).stat()
    os.truncate(folder / name, before.st_size - 1)
    os.utime(folder / name, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert start(folder) == (False, [name])
    assert start(folder) == (False, [name]), "a bad file is never remembered"
    (folder / name).unlink()
    assert start(folder) == (False, [name])


def test_a_changed_byte_behind_the_same_size_and_time_is_found_by_verify_and_then_rebuilt(prepared, tmp_path):
    """A start cannot see such changes, by a failing disk or by a copy that keeps the times."""
    data, tok = prepared[0]
    out = tmp_path / "out"
    prepare(data, tok, out)
    good, shard = bytes_of(out), out / "train-00000.arrow"
    before = flip(shard)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert start(out) == (True, []) and already_prepared(data, tok, out) is not None
    assert prepare(data, tok, out) == read_data_manifest(out) and bytes_of(out) != good
    (sentence,) = verify_dataset(out)
    assert f"{shard} is damaged" in sentence
    assert start(out) == (False, [shard.name])
    prepare(data, tok, out)
    assert bytes_of(out) == good and start(out) == (True, [])


def test_a_copy_with_other_times_is_hashed_once(prepared, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    assert start(copy) == (True, files_in(folder))
    assert start(copy) == (True, [])
    kept = shutil.copytree(folder, tmp_path / "kept", copy_function=shutil.copy2)
    assert start(kept) == (True, []), "a copy that keeps the times is trusted as the original is"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_damaged_memory_never_makes_a_bad_file_good(folder, draw):
    """The record of verified files is cut, or one of its bytes is changed: that costs hashing at most."""
    shard = folder / "train-00000.arrow"
    good, memory, times = shard.read_bytes(), (folder / VERIFIED).read_bytes(), shard.stat()
    at = draw.draw(st.integers(0, len(memory) - 1))
    other = draw.draw(st.sampled_from([b"", bytes([draw.draw(st.integers(0, 255))]) + memory[at + 1 :]]))
    try:
        flip(shard)
        (folder / VERIFIED).write_bytes(memory[:at] + other)
        assert not start(folder)[0]
        shard.write_bytes(good)
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert start(folder)[0]
        assert start(folder) == (True, [])
    finally:
        shard.write_bytes(good)
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
        (folder / VERIFIED).write_bytes(memory)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"files": 1}', b"{" * 10**6, None, "fifo", "folder"])
def test_whatever_stands_in_its_place_costs_hashing_at_most(folder, content):
    path = folder / VERIFIED
    path.unlink()
    if content == "fifo":
        os.mkfifo(path)
    elif content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    assert start(folder) == (True, files_in(folder))
    assert start(folder) == (True, files_in(folder) if content == "folder" else [])


def test_a_changed_manifest_is_not_trusted_by_what_was_verified_of_the_old_one(folder):
    manifest = read_data_manifest(folder)
    write_manifest(folder, manifest.model_copy(update={"sources": ["elsewhere"]}))
    assert start(folder) == (True, files_in(folder))
    special = {**manifest.tokenizer.special_ids, "mask": 7}
    other = manifest.model_copy(update={"tokenizer": manifest.tokenizer.model_copy(update={"special_ids": special})})
    write_manifest(folder, other)
    for _ in range(2):
        assert not is_verified(folder, other)
        (sentence,) = verify_files(folder, other)
        assert "does not describe the tokenizer" in sentence


def test_where_it_cannot_be_written_each_start_hashes(folder, caplog):
    (folder / VERIFIED).unlink()
    (folder / VERIFIED).mkdir()  # root may write into any folder, but replaces none by a file
    for _ in range(2):
        assert start(folder) == (True, files_in(folder))
        assert "verified.json cannot be written" in caplog.text and "hashes again" in caplog.text
        caplog.clear()


def test_opening_reads_no_token_and_finds_a_cut_shard(folder):
    """A rank reads the size and the footer, whatever the tokens between are."""
    shard = folder / "train-00000.arrow"
    good = shard.read_bytes()
    lengths = open_dataset(folder).train.lengths.tolist()
    tokens = open_dataset(folder).train.tokens(0).tobytes()
    at = good.index(tokens)
    shard.write_bytes(good[:at] + bytes(len(tokens)) + good[at + len(tokens) :])
    assert open_dataset(folder).train.lengths.tolist() == lengths
    shard.write_bytes(good[: len(good) // 2] + bytes(len(good) - len(good) // 2))
    with pytest.raises(UserError, match=r"train-00000.arrow is damaged .*; run `multihop prep` again"):
        open_dataset(folder)
    shard.write_bytes(good[:-1])
    with pytest.raises(UserError, match=r"train-00000.arrow has \d+ bytes, expected \d+; run `multihop prep` again"):
        open_dataset(folder)
