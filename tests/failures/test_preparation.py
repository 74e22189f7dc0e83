"""A data set that is prepared, and then replaced by another one, on a disk."""

import itertools
import json
import random
from pathlib import Path

import pytest
from prepared_data import bytes_of
from simulation.disk import SimulatedDisk
from simulation.every_failure import Scenario, check_every_failure, every_and_seed
from simulation.world import World
from tables_of_tests import Table

from multihop.common import files
from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.dataset.manifest import MANIFEST, read_data_manifest
from multihop.data_prep.dataset.verify import verify_dataset
from multihop.data_prep.pipeline.prepare import prepare


@pytest.fixture
def two_data_sets(tmp_path: Path) -> Scenario:
    """One process prepares a data set, the next one another in its place, and one more repeats that.

    Promised: a data set that was reported as done is whole until the next one begins to replace it; whatever has a
    manifest is one of the two; and in the end it has the bytes of a preparation without a fault.
    """
    texts = tmp_path / "texts.jsonl"
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 5))) for _ in range(200)]
    rows = [" ".join(rng.choices(words, k=30)) + "." for _ in range(40)]
    texts.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    sources, tokenizer = [Source(path=str(texts))], TokenizerConfig(vocab_size=80, threads=1)
    sets = [(DataConfig(sources=sources, heldout_fraction=fraction), tokenizer) for fraction in (0.2, 0.4)]
    expected = []
    for number, (data, tokenizer) in enumerate(sets):
        prepare(data, tokenizer, tmp_path / f"expected-{number}")
        expected.append(bytes_of(tmp_path / f"expected-{number}"))
    fingerprints = [read_data_manifest(tmp_path / f"expected-{number}").fingerprint for number in (0, 1)]
    worlds = itertools.count()

    def scenario(world: World) -> None:
        root = tmp_path / str(next(worlds))
        root.mkdir()
        out = root / "data"

        def check(wanted: int, done: bool) -> None:
            if (out / MANIFEST).exists():
                assert not verify_dataset(out)
                found = read_data_manifest(out).fingerprint
                assert found == fingerprints[wanted] if done else found in fingerprints
            else:
                assert not done, "the data set was reported as done and is gone"

        with SimulatedDisk(world, root).mounted():
            for name, number in (("first", 0), ("second", 1), ("again", 1)):
                process = world.start(name, lambda number=number: prepare(*sets[number], out))
                was_whole = (out / MANIFEST).exists()
                world.run()
                check(number, process.error is None)
                assert not was_whole or (out / MANIFEST).exists() or f"unlink data/{MANIFEST}" in process.operations
            prepare(*sets[1], out)
        assert bytes_of(out) == expected[1]

    return scenario


@pytest.mark.parametrize(("every", "seed"), every_and_seed(47))
def test_a_preparation_that_fails_anywhere(two_data_sets: Scenario, every: int, seed: int, table: Table) -> None:
    check_every_failure(two_data_sets, every, table, seed=seed)


@pytest.mark.long
def test_a_data_set_is_lost_if_nothing_is_synced(
    two_data_sets: Scenario, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "sync", lambda path: None)
    with pytest.raises(AssertionError, match=r"kind='cut'\)"):
        check_every_failure(two_data_sets, 5, table, kinds=("cut",))
