"""A data set that is prepared, and then replaced by another one, on a disk."""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up_pairs import TOKENS, pair, recipe, write_jsonl
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

_TOKENIZER = TokenizerConfig(vocab_size=80, threads=1)
_Settings = tuple[DataConfig, TokenizerConfig]


def documents(folder: Path) -> list[_Settings]:
    """Two recipes of documents without rules; as the others below, they differ in the held-out share."""
    path = _write_texts(folder / "texts.jsonl", _texts())
    sources = [Source(path=str(path))]
    return [(DataConfig(sources=sources, heldout_fraction=fraction), _TOKENIZER) for fraction in (0.2, 0.4)]


def filtered_documents(folder: Path) -> list[_Settings]:
    """Documents of which a filter drops one, and near duplicates another, and an evaluation text is cut out of two,
    which leaves pieces of one. The second recipe has another threshold of near duplicates."""
    texts = _texts()
    exam = " ".join(texts[0].split()[:13])
    texts += [f"lorem ipsum {texts[1]}", f"{texts[2]} more.", " ".join([*texts[4:12], exam, *texts[12:20]])]
    (folder / "exam.txt").write_text(f"{exam}\n")
    rules = {
        "sources": [{"path": str(_write_texts(folder / "texts.jsonl", texts))}],
        "filters": {"c4": {"min_sentences": 1}},
        "decontaminate": {"against": [str(folder / "exam.txt")], "action": "cut"},
    }
    more = [
        {"heldout_fraction": fraction, "near_duplicates": {"threshold": threshold}}
        for fraction, threshold in ((0.2, 0.7), (0.4, 0.6))
    ]
    return [(DataConfig.model_validate(rules | each), _TOKENIZER) for each in more]


def pairs(folder: Path) -> list[_Settings]:
    """Pairs, of which filters remove one and near duplicates one."""
    near = " ".join(pair(number)[0] for number in range(5)), " ".join(pair(number)[1] for number in range(5))
    rows = [*(pair(number) for number in range(40)), ("same", "same"), near, (f"{near[0]} bamo", near[1])]
    path = write_jsonl(folder / "pairs.jsonl", rows)
    rules = {"filters": {"pairs": {}}, "near_duplicates": {"threshold": 0.7, "shingle_words": 2}}
    return [(recipe(path, heldout_fraction=fraction, **rules), TOKENS) for fraction in (0.2, 0.4)]


def _texts() -> list[str]:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 5))) for _ in range(200)]
    return [" ".join(rng.choices(words, k=30)) + "." for _ in range(40)]


def _write_texts(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


_REMOVED = {
    documents: {},
    filtered_documents: {
        "filter": {"holds lorem ipsum": 1},
        "near duplicates": {"near duplicate of another": 1},
        "decontaminate": {"contaminated": 2, "pieces of contaminated ones, kept": 2},
    },
    pairs: {"filter": {"equal sides": 1}, "near duplicates": {"near duplicate of another": 1}},
}


@pytest.fixture
def two_data_sets(request: pytest.FixtureRequest, tmp_path: Path) -> Scenario:
    """One process prepares a data set, the next one another in its place, and one more repeats that.

    Promised: a data set that was reported as done is whole until the next one begins to replace it; whatever has a
    manifest is one of the two; and in the end it has the bytes of a preparation without a fault.
    """
    settings: Callable[[Path], list[_Settings]] = request.param
    sets = settings(tmp_path)
    expected = []
    for number, (data, tokenizer) in enumerate(sets):
        counts = prepare(data, tokenizer, tmp_path / f"expected-{number}").counts
        for rule, removed in _REMOVED[settings].items():
            assert removed.items() <= counts[rule].items(), counts
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


@pytest.mark.parametrize("two_data_sets", [documents, pairs], indirect=True)
@pytest.mark.parametrize(("every", "seed"), every_and_seed(197))
def test_a_preparation_that_fails_anywhere(two_data_sets: Scenario, every: int, seed: int, table: Table) -> None:
    check_every_failure(two_data_sets, every, table, seed=seed)


@pytest.mark.parametrize("two_data_sets", [filtered_documents], indirect=True)
@pytest.mark.parametrize(("every", "seed"), every_and_seed(597, long=3))
def test_a_preparation_with_rules_that_fails_anywhere(
    two_data_sets: Scenario, every: int, seed: int, table: Table
) -> None:
    """A third of the faults: there are twice as many as without rules, and each takes three times as long."""
    check_every_failure(two_data_sets, every, table, seed=seed)


@pytest.mark.long
@pytest.mark.parametrize("two_data_sets", [documents, filtered_documents, pairs], indirect=True)
def test_a_data_set_is_lost_if_nothing_is_synced(
    two_data_sets: Scenario, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "sync", lambda path: None)
    with pytest.raises(AssertionError, match=r"kind='cut'\)"):
        check_every_failure(two_data_sets, 5, table, kinds=("cut",))
