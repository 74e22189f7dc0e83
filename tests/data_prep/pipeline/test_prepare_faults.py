"""Faults during preparation: partial results are never used as complete, and the same command repairs it."""

import errno
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prepared_data import already_prepared, bytes_of

from multihop.common.errors import UserError
from multihop.common.files import atomic_replace, canonical_json
from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.dataset.manifest import SetAside, read_data_manifest
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.dataset.verify import VERIFIED, verify_dataset
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.pipeline.shards import assemble_shard
from multihop.data_prep.stages import documents

# Prepares what CONFIG.json says into OUT; at the rename of that number something happens: "kill" is what the kernel
# does, before it, "full" is a disk that is full from then on, "list" prints every rename.
CHILD = """
import json, os, resource, signal, sys
from pathlib import Path
from multihop.data_prep.config import DataConfig, TokenizerConfig
from multihop.data_prep.pipeline.prepare import prepare

config, out, fault, number = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
rename, renamed = os.replace, 0

def replace(old, new):
    global renamed
    renamed += 1
    if fault == "list":
        print(f"{Path(new).parent.name}/{Path(new).suffix}")
    elif fault == "kill" and renamed == number:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(old, new)
    if fault == "full" and renamed == number:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

os.replace = replace
data, tok = json.loads(config.read_text())
prepare(DataConfig.model_validate(data), TokenizerConfig.model_validate(tok), out)
"""


def in_a_child(config: Path, out: Path, fault: str, number: int = 0) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", CHILD, str(config), str(out), fault, str(number)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)


def write_config(path: Path, data: DataConfig, tok: TokenizerConfig) -> Path:
    path.write_text(json.dumps([data.model_dump(mode="json"), tok.model_dump(mode="json")]))
    return path


@pytest.fixture(scope="module")
def every_stage(tmp_path_factory, planted_in) -> tuple[Path, DataConfig, TokenizerConfig, Path, list[str]]:
    """A recipe with every stage as a file and as settings, its undisturbed result, and the target of each rename."""
    folder = tmp_path_factory.mktemp("every-stage")
    data, _ = planted_in(folder)
    tok = TokenizerConfig(vocab_size=150, threads=1)
    config = write_config(folder / "config.json", data, tok)
    listed = in_a_child(config, folder / "out", "list")
    assert listed.returncode == 0, listed.stderr
    return config, data, tok, folder / "out", listed.stdout.split()


def survives(every_stage, out: Path, fault: str, number: int) -> None:
    """Assert that a fault leaves no data set and nothing partial, and that the next start gives the expected bytes."""
    config, data, tok, undisturbed, _ = every_stage
    child = in_a_child(config, out, fault, number)
    if fault == "kill":
        assert child.returncode == -signal.SIGKILL, child.stderr
        # Shards are whole before their rename, in a folder of their own; all else has a temporary name.
        assert any(path.name.endswith(".tmp") or path.parent.name == ".beside" for path in out.rglob("*"))
    else:
        assert child.returncode == 1 and "[Errno 27]" in child.stderr.splitlines()[-1], child.stderr
        assert not [path for path in out.rglob(".*") if path.name.endswith(".tmp")]
    with pytest.raises(UserError, match="no prepared data set"):
        open_dataset(out)
    assert already_prepared(data, tok, out) is None
    standing = {path: path.stat().st_mtime_ns for path in (out / "work").glob("*/[!.]*")}
    done = {path for path in standing if path.suffix == ".json" or path.with_suffix(".json") in standing}

    prepare(data, tok, out)
    assert bytes_of(out) == bytes_of(undisturbed)
    assert all(path.stat().st_mtime_ns == standing[path] for path in done), "what was entered is not done again"
    assert not [path for path in out.rglob(".*") if path.name.endswith(".tmp")]


STAGES = ["read", "sort", "copies", "near", "decontaminate", "draw", "tokenizer", "encode", "shards"]


def test_every_stage_is_among_those_that_are_disturbed(every_stage):
    renames = every_stage[-1]
    assert {name.split("/")[0] for name in renames} == {*STAGES, "work", ".beside", "out"}
    assert renames[-1] == "out/.json"


FULL = ["read", "near", "decontaminate", "encode", "shards", ".beside", "out"]


@pytest.mark.parametrize(
    ("stage", "fault"),
    [*((stage, "kill") for stage in [*STAGES, ".beside", "out"]), *((stage, "full") for stage in FULL)],
)
def test_killed_or_without_room_in_any_stage_it_goes_on_to_the_same_bytes(tmp_path, every_stage, stage, fault):
    renames = every_stage[-1]
    of_stage = [number for number, name in enumerate(renames, start=1) if name.startswith(f"{stage}/")]
    survives(every_stage, tmp_path / "out", fault, of_stage[len(of_stage) // 2] - (fault == "full"))


@pytest.mark.long
@pytest.mark.parametrize("fault", ["kill", "full"])
def test_killed_or_without_room_at_any_file_it_goes_on_to_the_same_bytes(tmp_path, every_stage, fault):
    renames = every_stage[-1]
    for number in range(1, len(renames) + (fault == "kill")):
        survives(every_stage, tmp_path / str(number), fault, number)
        print(f"{fault} at rename {number} of {len(renames)} ({renames[number - 1]}): the same bytes")


def test_what_killed_processes_left_goes_before_anything_is_written(tmp_path, data, tok):
    left = [
        tmp_path / "out" / name for name in (".a.arrow.1-0.tmp", "work/.b.json.1-0.tmp", "work/read/.c.arrow.1-0.tmp")
    ]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100))
    with pytest.raises(UserError, match="more than the text can support"):
        prepare(data, tok.model_copy(update={"vocab_size": 50_000}), tmp_path / "out")
    assert not any(path.exists() for path in left)


def test_what_a_worker_that_was_killed_meanwhile_left_goes_at_the_end(tmp_path, data, tok):
    left = tmp_path / "out" / ".train-00000.arrow.1-0.tmp"

    def lose_a_worker(function, items):
        if function is assemble_shard:
            left.write_bytes(bytes(100))
        return map(function, items)

    prepare(data, tok, tmp_path / "out", lose_a_worker)
    assert not left.exists() and verify_dataset(tmp_path / "out") == []


def test_a_full_disk_is_reported_with_the_file_that_has_no_room(tmp_path):
    with (
        pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/a.arrow'"),
        atomic_replace(tmp_path / "a.arrow"),
    ):
        raise OSError(errno.ENOSPC, "Error writing bytes to file")
    assert not list(tmp_path.iterdir())


def test_a_data_set_that_is_remade_stands_until_the_other_takes_its_place(tmp_path, data, tok, corpus, document):
    out, config = tmp_path / "out", write_config(tmp_path / "config.json", data, tok)
    old = prepare(data, tok, out)
    files = bytes_of(out)
    (corpus / "new.txt").write_text(document(1_000))
    shutil.copytree(out, tmp_path / "copy")
    renames = in_a_child(config, tmp_path / "copy", "list").stdout.split()
    commit = renames.index("copy/.arrow") + 1
    early, late = tmp_path / "early", tmp_path / "late"
    for folder, number in ((early, 15), (late, commit)):
        shutil.copytree(out, folder)
        assert in_a_child(config, folder, "kill", number).returncode == -signal.SIGKILL
    assert bytes_of(early) == files and open_dataset(early).manifest == old
    with pytest.raises(UserError, match="no prepared data set"):
        open_dataset(late)
    assert prepare(data, tok, early) == prepare(data, tok, late) == prepare(data, tok, tmp_path / "fresh") != old
    assert bytes_of(early) == bytes_of(late) == bytes_of(tmp_path / "fresh")
    assert {path.name for path in late.iterdir()} == {*bytes_of(late), VERIFIED, "work"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, document) -> tuple[DataConfig, TokenizerConfig, Path]:
    folder = tmp_path_factory.mktemp("whole")
    for number in range(60):
        (folder / f"{number:02d}.txt").write_text(document(number))
    data = DataConfig(sources=[Source(path=str(folder / "*.txt"))], heldout_fraction=0.1)
    tok = TokenizerConfig(vocab_size=150, threads=1)
    prepare(data, tok, folder / "out")
    return data, tok, folder / "out"


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_flipped_bit_is_found_and_named(whole, draw):
    _, _, folder = whole
    manifest = read_data_manifest(folder)
    names = [*(shard.file for shard in manifest.shards), manifest.tokenizer.file, manifest.token_counts.file]
    name = draw.draw(st.sampled_from(names))
    good = (folder / name).read_bytes()
    bit = draw.draw(st.integers(0, 8 * len(good) - 1))
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << bit % 8
    try:
        (folder / name).write_bytes(bad)
        (complaint,) = verify_dataset(folder)
    finally:
        (folder / name).write_bytes(good)
    assert name in complaint and "damaged" in complaint
    assert verify_dataset(folder) == []


@pytest.mark.parametrize("damage", ["cut", "missing", "flipped"])
@pytest.mark.parametrize("name", ["train-00000.arrow", "heldout-00000.arrow", "tokenizer.model", "token_counts.npy"])
def test_a_damaged_file_is_refused_and_prepare_rebuilds_just_it(whole, name, damage):
    data, tok, folder = whole
    before = bytes_of(folder)
    if damage == "missing":
        (folder / name).unlink()
    else:
        flipped = before[name][:-1] + bytes([before[name][-1] ^ 1])
        (folder / name).write_bytes(before[name][:-9] if damage == "cut" else flipped)
    assert len(verify_dataset(folder)) == 1
    if name.endswith(".arrow") and damage != "flipped":
        with pytest.raises(UserError, match=f"{name}.*multihop prep"):
            open_dataset(folder)
    others = {path: path.stat().st_mtime_ns for path in folder.glob("*.arrow") if path.name != name}
    prepare(data, tok, folder)
    assert bytes_of(folder) == before
    assert all(path.stat().st_mtime_ns == then for path, then in others.items())


def test_a_damaged_output_of_a_stage_is_made_again(tmp_path, data, tok):
    prepare(data, tok, tmp_path / "out")
    before = bytes_of(tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    for path in (tmp_path / "out" / "work").glob("*/*"):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
    prepare(data, tok, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == before


@pytest.mark.parametrize("stage", ["read", "encode", "shards"])
def test_a_changed_digit_in_what_a_stage_found_is_noticed(tmp_path, data, tok, stage):
    prepare(data, tok, tmp_path / "out")
    before = bytes_of(tmp_path / "out")
    for entry in (tmp_path / "out" / "work" / stage).glob("*.json"):
        result = json.loads(entry.read_bytes())
        spelled = re.sub(
            r'("(?:bytes|documents|tokens)":)(\d)', lambda match: match[1] + "4" + match[2], entry.read_text()
        )
        assert json.loads(spelled) != result
        entry.write_text(spelled)
    (tmp_path / "out" / "manifest.json").unlink()
    prepare(data, tok, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == before


def test_what_a_stage_of_an_earlier_version_found_is_used(tmp_path, data, tok):
    prepare(data, tok, tmp_path / "out")
    before, entries = bytes_of(tmp_path / "out"), sorted((tmp_path / "out" / "work").glob("*/*.json"))
    for entry in entries:
        result = json.loads(entry.read_bytes())
        entry.write_bytes(canonical_json({key: result[key] for key in ("sha256", "facts")}))
    times = [entry.stat().st_mtime_ns for entry in entries]
    (tmp_path / "out" / "manifest.json").unlink()
    prepare(data, tok, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == before and [entry.stat().st_mtime_ns for entry in entries] == times


def test_bad_files_and_documents_are_set_aside_named_and_counted(tmp_path, data, tok, corpus):
    (corpus / "latin.txt").write_bytes("für".encode("latin-1"))
    (corpus / "broken.jsonl.gz").write_bytes(gzip.compress(b'{"text": "some"}\n' * 999)[:-5])
    (corpus / "empty.txt").write_text(" \n")
    good = (corpus / "a.jsonl").read_text().splitlines()
    good[2:2] = ["{cut", json.dumps({"body": "x"}), json.dumps({"text": "\ud800"})]
    (corpus / "a.jsonl").write_text("\n".join(good))
    manifest = prepare(data.model_copy(update={"max_bad_fraction": 0.1}), tok, tmp_path / "out")
    assert manifest.counts["read"] == {
        "kept": 120, "not UTF-8": 1, "broken gzip": 1, "empty": 1, "broken JSON": 1, "no field 'text'": 1,
        "not Unicode": 1,
    }  # fmt: skip
    assert {(Path(entry.path).name, entry.reason) for entry in manifest.set_aside} == {
        ("latin.txt", "not UTF-8"),
        ("broken.jsonl.gz", "broken gzip"),
        ("empty.txt", "empty"),
        ("a.jsonl:3", "broken JSON"),
        ("a.jsonl:4", "no field 'text'"),
        ("a.jsonl:5", "not Unicode"),
    }
    assert len(open_dataset(tmp_path / "out").train) + len(open_dataset(tmp_path / "out").heldout) == 120


def test_lines_are_named_by_their_number_in_the_file_and_at_most_twenty(tmp_path, data, tok, corpus, monkeypatch):
    monkeypatch.setattr("multihop.data_prep.reading.sources.group_into_splits.__defaults__", (500,))
    lines = (corpus / "b.jsonl").read_text().splitlines()
    bad = list(range(5, 65, 2))
    for line in bad:
        lines.insert(line - 1, "{")
    (corpus / "b.jsonl").write_text("\n".join(lines))
    manifest = prepare(data.model_copy(update={"max_bad_fraction": 0.5}), tok, tmp_path / "out")
    assert manifest.counts["read"] == {"kept": 120, "broken JSON": 30}
    expected = [SetAside(path=f"{corpus / 'b.jsonl'}:{line}", reason="broken JSON") for line in bad[:20]]
    assert manifest.set_aside == expected


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("x.txt", b"\xff", "1 of 43 files cannot be used.*max_bad_fraction=0.01.*x.txt: not UTF-8.*raise it"),
        ("x.jsonl", b"{\n{\n", "2 of 122 documents cannot be used.*x.jsonl:1: broken JSON.*raise it"),
    ],
)
def test_too_much_that_is_bad_is_refused(tmp_path, data, tok, corpus, name, content, sentence):
    (corpus / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        prepare(data, tok, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_file_that_may_not_be_read_is_set_aside_until_it_may(tmp_path, data, tok, corpus):
    lenient = data.model_copy(update={"max_bad_fraction": 0.1})
    (corpus / "books" / "00.txt").chmod(0)
    if os.access(corpus / "books" / "00.txt", os.R_OK):
        pytest.skip("this user may read every file")
    manifest = prepare(lenient, tok, tmp_path / "out")
    assert manifest.counts["read"] == {"kept": 119, "cannot be opened (Permission denied)": 1}
    (corpus / "books" / "00.txt").chmod(0o644)
    assert prepare(lenient, tok, tmp_path / "out").counts["read"] == {"kept": 120}


def test_a_corpus_without_documents_is_refused(tmp_path, tok):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text("")
    with pytest.raises(UserError, match="no document"):
        prepare(DataConfig(sources=[Source(path=str(tmp_path / "texts"))]), tok, tmp_path / "out")
    (tmp_path / "texts" / "b.txt").write_text(" ")
    lenient = DataConfig(sources=[Source(path=str(tmp_path / "texts"))], max_bad_fraction=1.0)
    with pytest.raises(UserError, match=r"all documents of data\.sources were dropped"):
        prepare(lenient, tok, tmp_path / "out")


def test_too_few_documents_to_hold_one_out_is_refused_with_what_would_do(tmp_path, tok, document):
    (tmp_path / "texts").mkdir()
    for number in range(5):
        (tmp_path / "texts" / f"{number}.txt").write_text(document(number))
    for fraction, sentence in (
        (0.0001, r"none of the 5 documents falls into data.heldout_fraction=0.0001; .* raise it \(to about 0.5\)$"),
        (0.9999, r"all 5 documents fall into data.heldout_fraction=0.9999.*lower it"),
    ):
        data = DataConfig(sources=[Source(path=str(tmp_path / "texts"))], heldout_fraction=fraction)
        with pytest.raises(UserError, match=sentence):
            prepare(data, tok, tmp_path / "out")


def test_a_vocabulary_larger_than_the_text_supports_is_refused_before_any_shard(tmp_path, data, tok):
    with pytest.raises(UserError, match="vocab_size=50000 is more than the text can support; set it to"):
        prepare(data, tok.model_copy(update={"vocab_size": 50_000}), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.arrow"))


def test_a_document_that_the_tokenizer_drops_whole_is_counted_and_left_out(tmp_path, data, tok, corpus):
    (corpus / "zero-width.txt").write_text("\u200b\u200b")
    manifest = prepare(data, tok, tmp_path / "out")
    assert manifest.counts["encode"] == {"kept": 120, "no tokens": 1}
    dataset = open_dataset(tmp_path / "out")
    assert len(dataset.train) + len(dataset.heldout) == 120
    assert dataset.train.lengths.min() > 0


def test_a_document_over_the_limit_is_set_aside(tmp_path, data, tok, corpus, monkeypatch):
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 2_000)
    (corpus / "long.json").write_text(json.dumps([{"text": "long " * 500}]))
    manifest = prepare(data, tok, tmp_path / "out")
    assert manifest.counts["read"] == {"kept": 120, "longer than 64 MiB": 1}
