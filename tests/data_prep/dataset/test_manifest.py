"""`manifest.json`: any changed byte is found, the first format version is read, and forged ones do no harm."""

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multihop.common.errors import UserError
from multihop.common.files import canonical_json, sha256_file, sha256_json
from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.dataset.manifest import MANIFEST, data_fingerprint, read_data_manifest, read_token_counts
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.dataset.verify import verify_dataset
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.tokenizers.info import word_start_flags

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, document) -> tuple[DataConfig, TokenizerConfig, Path, dict[str, bytes]]:
    """A data set's settings, its folder, and the content of its files."""
    folder = tmp_path_factory.mktemp("prepared")
    for number in range(60):
        (folder / f"{number:02d}.txt").write_text(document(number))
    data = DataConfig(sources=[Source(path=str(folder / "*.txt"))], heldout_fraction=0.1)
    tok = TokenizerConfig(vocab_size=150, threads=1)
    prepare(data, tok, folder / "out")
    return data, tok, folder / "out", {path.name: path.read_bytes() for path in files_of(folder / "out")}


@pytest.fixture
def whole(prepared) -> tuple[DataConfig, TokenizerConfig, Path]:
    """The data set as it was written, restored after changes by other tests."""
    data, tok, folder, files = prepared
    for path in {*files_of(folder)} - {folder / name for name in files}:
        path.unlink()
    for name, content in files.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content)
    return data, tok, folder


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.is_dir()]


def forge(folder: Path, change: Change) -> None:
    """Change the manifest and give it matching hashes, as anyone can."""
    content = json.loads((folder / MANIFEST).read_bytes())
    change(content)
    content.pop("sha256")
    if content["shards"]:
        shards = [[shard["split"], shard["sha256"]] for shard in content["shards"]]
        form = {"version": 1, "token_dtype": content["token_dtype"]}
        content["fingerprint"] = sha256_json(
            {"format": form, "tokenizer": content["tokenizer"]["sha256"], "shards": shards}
        )
    (folder / MANIFEST).write_bytes(canonical_json({**content, "sha256": sha256_json(content)}))


def test_every_changed_byte_of_the_manifest_is_found(whole):
    folder = whole[-1]
    good = (folder / MANIFEST).read_bytes()
    for at in range(len(good)):
        (folder / MANIFEST).write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(UserError, match=MANIFEST) as refused:
            read_data_manifest(folder)
        assert "multihop" in str(refused.value)
    for other in (good + b"\n", b" " + good, good[:-1], b"", bytes(len(good)), json.dumps(json.loads(good)).encode()):
        (folder / MANIFEST).write_bytes(other)
        (complaint,) = verify_dataset(folder)
        assert MANIFEST in complaint


def test_a_changed_special_id_is_refused_and_prepare_writes_the_right_one(whole):
    data, tok, folder = whole
    good = (folder / MANIFEST).read_bytes()
    (folder / MANIFEST).write_bytes(good.replace(b'"mask":4', b'"mask":5'))
    with pytest.raises(
        UserError, match=r"manifest.json is damaged \(its own hash does not match\); run `multihop prep`"
    ):
        open_dataset(folder)
    prepare(data, tok, folder)
    assert (folder / MANIFEST).read_bytes() == good


@pytest.mark.parametrize(
    "change",
    [
        lambda info: info["special_ids"].update(mask=5),
        lambda info: info.update(word_start="f" + info["word_start"][1:]),
        lambda info: info.update(vocab_size=info["vocab_size"] - 1),
    ],
    ids=["special id", "word start", "vocab_size"],
)
def test_what_it_says_of_the_tokenizer_must_be_what_the_tokenizer_says(whole, change):
    """The fingerprint covers all that decides batches, since the hash of the tokenizer's file is in it."""
    data, tok, folder = whole
    good = (folder / MANIFEST).read_bytes()
    forge(folder, lambda content: change(content["tokenizer"]))
    assert (folder / MANIFEST).read_bytes() != good
    prepare(data, tok, folder)
    assert (folder / MANIFEST).read_bytes() == good


@pytest.mark.parametrize("name", ["../secret.txt", "/etc/hostname", "a/b", "..", ".", "", ".hidden", "a\0b", "a\n"])
@pytest.mark.parametrize("of", ["shards", "tokenizer", "token_counts"])
def test_a_name_that_leaves_the_folder_is_refused(whole, of, name):
    folder = whole[-1]
    forge(folder, lambda content: (content[of][0] if of == "shards" else content[of]).update(file=name))
    with pytest.raises(UserError, match=rf"manifest.json is not valid \({of}.*file.*run `multihop prep` again$"):
        open_dataset(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["tokenizer"].update(vocab_size=10**11),
        lambda content: content["tokenizer"].update(vocab_size=2**32),
        lambda content: content["tokenizer"].update(vocab_size=-5),
        lambda content: content["tokenizer"].update(vocab_size=0, word_start=""),
        lambda content: content["tokenizer"].update(vocab_size=10**30),
        lambda content: content["tokenizer"].update(vocab_size=150.0),
        lambda content: content["tokenizer"].update(word_start=content["tokenizer"]["word_start"][:4]),
        lambda content: content["tokenizer"].update(word_start="zz" * 19),
        lambda content: content["tokenizer"].update(special_ids={"pad": 150}),
        lambda content: content["tokenizer"].update(special_ids={"pad": -1}),
        lambda content: content["shards"][0].update(documents=-1),
        lambda content: content["shards"][0].update(tokens="12"),
        lambda content: content["shards"][0].update(bytes=2**63),
        lambda content: content["shards"][0].update(sha256="x"),
        lambda content: content.update(format_version=1),
        lambda content: content.update(format_version=3),
        lambda content: content.update(format_version=None),
        lambda content: content.update(extra=1),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_anything_is_made_of_them(whole, change):
    folder = whole[-1]
    forge(folder, change)
    with pytest.raises(UserError, match=MANIFEST) as refused:
        word_start_flags(read_data_manifest(folder).tokenizer)
    assert "\n" not in str(refused.value) and "multihop" in str(refused.value)


@pytest.mark.parametrize("content", [b'{"settings":' + b'{"a":' * 10**5 + b"1" + b"}" * 10**5 + b"}", b"[" * 10**6])
def test_a_manifest_that_is_nested_without_end_is_one_sentence(whole, content):
    (whole[-1] / MANIFEST).write_bytes(content)
    with pytest.raises(UserError, match=r"manifest.json is not a JSON object .*deep.*; run `multihop prep` again$"):
        read_data_manifest(whole[-1])


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize("name", ["train-00000.arrow", "tokenizer.model", "token_counts.npy", MANIFEST])
def test_what_is_no_file_is_reported_at_once_and_rebuilt(prepared, whole, name, kind):
    data, tok, folder = whole
    (folder / name).unlink()
    if kind == "fifo":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero")
    (complaint,) = verify_dataset(folder)
    assert name in complaint and "not a regular file" in complaint and "run `multihop prep` again" in complaint
    if name.endswith(".arrow"):
        with pytest.raises(UserError, match=r"train-00000.arrow cannot be read \(not a regular file\)"):
            open_dataset(folder)
    prepare(data, tok, folder)
    assert (folder / name).read_bytes() == prepared[-1][name]


def test_counts_of_another_size_than_the_vocabulary_are_refused_before_they_are_read(whole):
    folder = whole[-1]
    counts = read_token_counts(folder, read_data_manifest(folder))
    assert counts.shape == (150,) and counts.dtype == np.int64 and counts.sum() > 1_000
    assert np.array_equal(counts, np.load(folder / "token_counts.npy"))
    good = (folder / "token_counts.npy").read_bytes()
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (10**12,)})
    for content in (header.getvalue() + bytes(150 * 8 - 8), header.getvalue(), b"", good[:-8], good + bytes(8)):
        (folder / "token_counts.npy").write_bytes(content)
        sha256 = sha256_file(folder / "token_counts.npy")
        forge(folder, lambda content, sha256=sha256: content["token_counts"].update(sha256=sha256))
        with pytest.raises(UserError, match=r"token_counts.npy is damaged; run `multihop prep` to rebuild it"):
            read_token_counts(folder, read_data_manifest(folder))


def test_the_fingerprint_is_what_it_was_in_the_first_format_version(whole):
    manifest = read_data_manifest(whole[-1])
    expected = {
        "format": {"version": 1, "token_dtype": "uint16"},
        "tokenizer": sha256_file(whole[-1] / "tokenizer.model"),
        "shards": [[split, sha256_file(whole[-1] / f"{split}-00000.arrow")] for split in ("train", "heldout")],
    }
    assert manifest.fingerprint == sha256_json(expected)
    assert manifest.fingerprint == data_fingerprint(manifest.tokenizer.sha256, "uint16", manifest.shards)
