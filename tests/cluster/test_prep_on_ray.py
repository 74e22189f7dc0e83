import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray

from cluster import prep
from cluster.prep import WorkersDied, link, map_on_ray, prepare_on_ray, provide
from cluster.run_folder import held
from data_prep.config import DataConfig, Source, TokenizerConfig
from data_prep.pipeline import prepare
from data_prep.shards import open_dataset, verify_dataset

ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module", autouse=True)
def two_cpus():
    """A Ray of our own whose workers can import the packages and this file."""
    path = os.pathsep.join([ROOT, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    yield
    ray.shutdown()


@pytest.fixture
def data(texts: Path) -> DataConfig:
    return DataConfig(sources=[Source(path=str(texts))], heldout_fraction=0.1)


TOKENIZER = TokenizerConfig(vocab_size=100, threads=1)


def double(number: int) -> int:
    return 2 * number


def die_once(flag: Path) -> int:
    """Kill the worker that runs this, the first time."""
    if not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def die_always(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(sentence: str) -> None:
    raise ValueError(sentence)


def fill_the_disk(path: str) -> None:
    raise OSError(28, "No space left on device", path)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_every_item_gives_its_result_once():
    assert sorted(map_on_ray(double, range(50))) == [2 * number for number in range(50)]
    assert list(map_on_ray(double, [])) == []


def test_a_task_whose_worker_is_killed_runs_again(tmp_path):
    pids = list(map_on_ray(die_once, [tmp_path / str(number) for number in range(3)]))
    assert len(pids) == 3 and os.getpid() not in pids


def test_a_task_that_nobody_survives_is_told_in_a_sentence():
    with pytest.raises(WorkersDied, match=r"died 4 times with its worker, .* goes on from here"):
        list(map_on_ray(die_always, [1]))


def test_mistakes_and_a_full_disk_are_told_as_they_are():
    with pytest.raises(ValueError) as caught:
        list(map_on_ray(refuse, ["one sentence", "another"]))
    assert str(caught.value) in {"one sentence", "another"}
    assert type(caught.value) is ValueError
    with pytest.raises(OSError, match="No space left on device") as full:
        list(map_on_ray(fill_the_disk, ["/a"]))
    assert full.value.errno == 28


def test_ray_prepares_the_same_bytes_as_one_process(tmp_path, data, monkeypatch):
    monkeypatch.setattr("data_prep.reading.sources.group_into_splits.__defaults__", (5_000,))
    told = []
    folder, manifest = prepare_on_ray(data, TOKENIZER, tmp_path / "ray", lambda *step: told.append(step))
    assert prepare(data, TOKENIZER, tmp_path / "here") == manifest
    assert bytes_of(folder) == bytes_of(tmp_path / "here")
    assert verify_dataset(folder) == []
    assert max(total for stage, _, total in told if stage == "read") > 5


def test_a_vocabulary_too_large_is_one_sentence_also_from_a_task(tmp_path, data):
    with pytest.raises(ValueError, match=r"^tokenizer.vocab_size=90000 is more than the text can support"):
        prepare_on_ray(data, TokenizerConfig(vocab_size=90_000, threads=1), tmp_path / "out", lambda *step: None)


def silent(*_: object) -> None:
    """No progress is shown."""


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
        folder, manifest = provide(own_texts, TOKENIZER, store, place, silent)
        link(place, folder)
        assert place.is_symlink() and place.resolve() == folder.resolve()
        assert open_dataset(place).manifest == manifest


def test_a_run_whose_data_was_copied_as_a_folder_reads_that_or_is_refused(tmp_path, own_texts):
    store, place = tmp_path / "store", tmp_path / "run" / "data"
    folder, manifest = provide(own_texts, TOKENIZER, store, place, silent)
    shutil.copytree(folder, place)
    shutil.rmtree(store)
    for _ in range(2):
        assert provide(own_texts, TOKENIZER, store, place, silent) == (place, manifest)
        link(place, place)
    assert not place.is_symlink() and [path.name for path in store.glob("[!.]*")] == ["work"]

    (tmp_path / "texts" / "new.txt").write_text("A text that was not there. It is now.")
    refused = rf"^{place} is not the link .* not made from the texts and settings of now; remove it, .* set name="
    with pytest.raises(ValueError, match=refused):
        provide(own_texts, TOKENIZER, store, place, silent)
    (tmp_path / "texts" / "new.txt").unlink()
    provide(own_texts, TOKENIZER, store, place, silent)
    os.truncate(place / "token_counts.npy", 5)
    with pytest.raises(ValueError, match=refused):
        provide(own_texts, TOKENIZER, store, place, silent)
    shutil.rmtree(place)
    place.write_text("no folder")
    with pytest.raises(ValueError, match=refused):
        provide(own_texts, TOKENIZER, store, place, silent)


def test_runs_that_share_data_start_together_and_who_writes_is_waited_for(tmp_path, own_texts, monkeypatch, capsys):
    monkeypatch.setattr(prep, "_LOOK_AGAIN_S", 0.01)
    store, place = tmp_path / "store", tmp_path / "run" / "data"
    found = provide(own_texts, TOKENIZER, store, place, silent)
    with held(store):
        assert provide(own_texts, TOKENIZER, store, place, silent) == found
    (found[0] / "tokenizer.model").unlink()
    with ThreadPoolExecutor(1) as other:
        with held(store):
            repaired, told = other.submit(provide, own_texts, TOKENIZER, store, place, silent), ""
            while "waiting" not in told and not repaired.done():
                told += capsys.readouterr().err
                time.sleep(0.01)
            assert f"{store} is in use by process {os.getpid()} on " in told and not repaired.done()
        assert repaired.result() == found
    assert verify_dataset(found[0]) == []


def test_data_of_the_first_format_version_is_written_anew_at_a_start(tmp_path, own_texts):
    store, place = tmp_path / "store", tmp_path / "run" / "data"
    folder, manifest = provide(own_texts, TOKENIZER, store, place, silent)
    now = (folder / "manifest.json").read_bytes()
    first = {key: value for key, value in json.loads(now).items() if key != "sha256"}
    (folder / "manifest.json").write_text(json.dumps({**first, "format_version": 1}, indent=1))
    assert provide(own_texts, TOKENIZER, store, place, silent) == (folder, manifest)
    assert (folder / "manifest.json").read_bytes() == now
