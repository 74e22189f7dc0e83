import os
import signal
from pathlib import Path

import pytest
import ray

from cluster.prep import WorkersDied, map_on_ray, prepare_on_ray
from data_prep.config import DataConfig, Source, TokenizerConfig
from data_prep.pipeline import prepare
from data_prep.shards import verify_dataset

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
