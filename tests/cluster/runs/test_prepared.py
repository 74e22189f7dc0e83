import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from provided import provided

from multihop.cluster import locks
from multihop.cluster.locks import lock_folder
from multihop.cluster.runs.prepared import link_dataset
from multihop.common.errors import UserError
from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.dataset.verify import VERIFIED, verify_dataset
from multihop.data_prep.pipeline.prepare import prepare

pytestmark = pytest.mark.usefixtures("two_cpus")


@pytest.fixture
def data(texts: Path) -> DataConfig:
    return DataConfig(sources=[Source(path=str(texts))], heldout_fraction=0.1)


TOKENIZER = TokenizerConfig(vocab_size=100, threads=1)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != VERIFIED}


@pytest.mark.long
def test_ray_prepares_the_same_bytes_as_one_process(tmp_path, data, monkeypatch):
    monkeypatch.setattr("multihop.data_prep.reading.sources.group_into_splits.__defaults__", (5_000,))
    told = []
    folder, manifest = provided(data, TOKENIZER, tmp_path / "ray", report=lambda *step: told.append(step))
    assert prepare(data, TOKENIZER, tmp_path / "here") == manifest
    assert bytes_of(folder) == bytes_of(tmp_path / "here")
    assert verify_dataset(folder) == []
    assert max(total for stage, _, total in told if stage == "read") > 5


def test_a_vocabulary_too_large_is_one_sentence_also_from_a_task(tmp_path, data):
    with pytest.raises(UserError, match=r"^tokenizer.vocab_size=90000 is more than the text can support"):
        provided(data, TokenizerConfig(vocab_size=90_000, threads=1), tmp_path / "out")


@pytest.fixture
def own_texts(texts: Path, tmp_path: Path) -> DataConfig:
    """Sources that a test may change."""
    shutil.copytree(texts, tmp_path / "texts")
    return DataConfig(sources=[Source(path=str(tmp_path / "texts"))], heldout_fraction=0.1)


def test_a_run_has_a_link_to_the_data_that_it_shares_whatever_link_was_there(tmp_path, own_texts):
    store, place = tmp_path / "runs" / ".prepared" / "key", tmp_path / "runs" / "a" / "data"
    place.parent.mkdir(parents=True)
    for target in (None, "nowhere", str(tmp_path)):
        if target is not None:
            place.unlink()
            place.symlink_to(target)
        folder, manifest = provided(own_texts, TOKENIZER, store, place)
        link_dataset(place, folder)
        assert place.is_symlink() and place.resolve() == folder.resolve()
        assert open_dataset(place).manifest == manifest


def test_a_run_whose_data_was_copied_as_a_folder_reads_that_or_is_refused(tmp_path, own_texts):
    store, place = tmp_path / "store", tmp_path / "run" / "data"
    folder, manifest = provided(own_texts, TOKENIZER, store, place)
    shutil.copytree(folder, place)
    shutil.rmtree(store)
    for _ in range(2):
        assert provided(own_texts, TOKENIZER, store, place) == (place, manifest)
        link_dataset(place, place)
    assert not place.is_symlink() and [path.name for path in store.glob("[!.]*")] == ["work"]

    (tmp_path / "texts" / "new.txt").write_text("A text that was not there. It is now.")
    refused = rf"^{place} is a directory instead of a link .* not made from the present texts .* set name="
    with pytest.raises(UserError, match=refused):
        provided(own_texts, TOKENIZER, store, place)
    (tmp_path / "texts" / "new.txt").unlink()
    provided(own_texts, TOKENIZER, store, place)
    os.truncate(place / "token_counts.npy", 5)
    with pytest.raises(UserError, match=refused):
        provided(own_texts, TOKENIZER, store, place)
    shutil.rmtree(place)
    place.write_text("no folder")
    with pytest.raises(UserError, match=refused):
        provided(own_texts, TOKENIZER, store, place)


def test_runs_that_share_data_start_together_and_who_writes_is_waited_for(tmp_path, own_texts, monkeypatch, capsys):
    monkeypatch.setattr(locks, "_POLL_S", 0.01)
    store, place = tmp_path / "store", tmp_path / "run" / "data"
    actual = provided(own_texts, TOKENIZER, store, place)
    with lock_folder(store):
        assert provided(own_texts, TOKENIZER, store, place) == actual
    (actual[0] / "tokenizer.model").unlink()
    with ThreadPoolExecutor(1) as other:
        with lock_folder(store):
            repaired, told = other.submit(provided, own_texts, TOKENIZER, store, place), ""
            while "waiting" not in told and not repaired.done():
                told += capsys.readouterr().err
                time.sleep(0.01)
            assert f"{store} is in use by process {os.getpid()} on " in told and not repaired.done()
        assert repaired.result() == actual
    assert verify_dataset(actual[0]) == []
