"""Near duplicates over several splits, compared with brute force; the result does not depend on the order."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain, combinations, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from read_splits import write_read_split

from multihop.data_prep.config import NearDuplicatesConfig
from multihop.data_prep.duplicates import near as near_duplicates
from multihop.data_prep.duplicates import signature_files
from multihop.data_prep.duplicates.minhash import accepted_probability, candidate_probability
from multihop.data_prep.duplicates.near import (
    CandidatePairs,
    FindClusters,
    candidate_pairs,
    dropped_rows,
    find_clusters,
    plan_comparisons,
)
from multihop.data_prep.duplicates.signature_files import SignSplit, band_count, kept_rows, sign_split
from multihop.data_prep.stages.documents import content_hash
from multihop.data_prep.stages.outputs import Output

NO_ROWS = np.empty(0, np.int64)
CONFIG = NearDuplicatesConfig()


def run_stage(
    folder: Path,
    splits: list[list[str]],
    dropped: list[np.ndarray] | None = None,
    config: NearDuplicatesConfig = CONFIG,
    ranges: int | None = None,
    backwards: bool = False,
) -> tuple[list[Output], Output]:
    """Run the stage; returns all outputs but the last, and the clusters."""
    paths = [write_read_split(folder / f"read-{number}.arrow", texts) for number, texts in enumerate(splits)]
    items = [
        SignSplit(f"sign-{number}", str(folder / "signed"), path, dropped[number] if dropped else NO_ROWS, config)
        for number, path in enumerate(paths)
    ]
    signed = [sign_split(item) for item in items]
    signed_paths = [output.path for output in signed]
    work = (
        plan_comparisons(sum(output.metadata["documents"] for output in signed), band_count(config))
        if ranges is None
        else [((band,), part, ranges) for band in range(band_count(config)) for part in range(ranges)]
    )
    to_compare = [
        CandidatePairs(f"pairs-{number}", str(folder / "pairs"), signed_paths, *which, config.threshold)
        for number, which in enumerate(work)
    ]
    pairs = [candidate_pairs(item) for item in (reversed(to_compare) if backwards else to_compare)]
    found = FindClusters("clusters", str(folder / "clusters"), signed_paths, [output.path for output in pairs])
    return [*signed, *pairs], find_clusters(found)


def kept_texts(splits: list[list[str]], clusters: Output) -> list[str]:
    return sorted(
        text
        for texts, rows in zip(splits, dropped_rows(clusters.path, len(splits)), strict=True)
        for row, text in enumerate(texts)
        if row not in rows
    )


def words_of(rng: random.Random, number: int) -> list[str]:
    return [f"w{rng.getrandbits(40):x}" for _ in range(number)]


def edited(rng: random.Random, words: list[str], edits: int) -> list[str]:
    """Return `words` with so many of them replaced by others."""
    words = words.copy()
    for index in rng.sample(range(len(words)), edits):
        (words[index],) = words_of(rng, 1)
    return words


def shingles_of(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[start : start + 5]) for start in range(len(words) - 4)}


def similarities(shingles: dict[str, set[tuple[str, ...]]]) -> dict[tuple[str, str], float]:
    """Return the Jaccard similarity of all pairs that share a shingle, each pair in the order of the texts."""
    have: dict[tuple[str, ...], list[str]] = {}
    for text, its_shingles in shingles.items():
        for shingle in its_shingles:
            have.setdefault(shingle, []).append(text)
    shared = Counter(pair for texts in have.values() for pair in combinations(texts, 2))
    sizes = {text: len(its_shingles) for text, its_shingles in shingles.items()}
    return {(one, other): both / (sizes[one] + sizes[other] - both) for (one, other), both in shared.items()}


def planted(seed: int, families: int = 60) -> list[str]:
    """Return documents of 150 to 600 words and, for each, five more with 0 to 6 % of the words replaced."""
    rng = random.Random(seed)
    texts = []
    for _ in range(families):
        words = words_of(rng, rng.randint(150, 600))
        texts.append(" ".join(words))
        for share in (0.0, 0.005, 0.01, 0.025, 0.06):
            texts.append(" ".join([*edited(rng, words, int(share * len(words))), f"end{len(texts)}"]))
    rng.shuffle(texts)
    return texts


def into(texts: list[str], splits: int) -> list[list[str]]:
    bounds = [len(texts) * number // splits for number in range(splits + 1)]
    return [texts[start:stop] for start, stop in pairwise(bounds)]


def test_recall_and_precision_against_brute_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found pairs by similarity are compared with theory, over all pairs of 360 documents."""
    texts = planted(seed=1)
    splits = into(texts, 3)
    _, clusters = run_stage(tmp_path, splits)
    rows = pa.ipc.open_file(pa.memory_map(clusters.path)).read_all().to_pylist()
    text_of = {(split, row): text for split, part in enumerate(splits) for row, text in enumerate(part)}
    kept_by = {text: text for text in texts}
    for row in rows:
        kept_by[text_of[row["split"], row["row"]]] = text_of[row["kept_split"], row["kept_row"]]
    shingles = {text: shingles_of(text) for text in texts}
    true = similarities(shingles)
    together = {pair for pair in combinations(texts, 2) if kept_by[pair[0]] == kept_by[pair[1]]}

    bins: dict[int, list[bool]] = {}
    expected: dict[int, list[float]] = {}
    for pair, similarity in true.items():
        if similarity >= 0.4:
            which = int(similarity * 20)
            bins.setdefault(which, []).append(pair in together)
            expected.setdefault(which, []).append(
                candidate_probability(similarity, band_count(CONFIG), 128 // band_count(CONFIG))
                * accepted_probability(similarity, CONFIG.threshold, 128)
            )
    with capsys.disabled():
        print("\nsimilarity    pairs  together  by the pair alone")
        for which in sorted(bins):
            shares = np.mean(bins[which]), np.mean(expected[which])
            print(
                f"{which / 20:.2f} to {which / 20 + 0.05:.2f}  {len(bins[which]):4}  {shares[0]:.3f}  {shares[1]:.3f}"
            )
    near = [pair for pair, similarity in true.items() if similarity >= CONFIG.threshold]
    assert len(near) > 200
    recall = sum(pair in together for pair in near) / len(near)
    precision = sum(true[pair] >= CONFIG.threshold for pair in together) / len(together)
    with capsys.disabled():
        print(f"recall {recall:.3f}, precision {precision:.3f} of {len(near)} pairs at {CONFIG.threshold} or more")
    assert recall > 0.95
    assert precision > 0.75  # a chain of pairs joins what is below the threshold
    assert all(pair in together for pair in near if true[pair] > 0.9)
    assert all(true[pair] > 0.4 for pair in together)
    # What is dropped is like a document of its cluster, up to the estimate's error: four standard deviations.
    for row in rows:
        text = text_of[row["split"], row["row"]]
        pair = (text, kept_by[text]) if (text, kept_by[text]) in true else (kept_by[text], text)
        assert abs(true[pair] - row["similarity"]) < 4 * 0.5 / math.sqrt(128)
        nearest = max(similarity for pair, similarity in true.items() if text in pair)
        assert nearest > CONFIG.threshold - 4 * math.sqrt(0.8 * 0.2 / 128)


def test_the_longest_document_of_a_cluster_is_kept_and_of_those_the_smallest_id(tmp_path: Path) -> None:
    texts = planted(seed=2, families=30)
    splits = into(texts, 4)
    _, clusters = run_stage(tmp_path, splits)
    text_of = {(split, row): text for split, part in enumerate(splits) for row, text in enumerate(part)}
    rows = pa.ipc.open_file(pa.memory_map(clusters.path)).read_all().to_pylist()
    members: dict[str, list[str]] = {}
    for row in rows:
        text, kept = text_of[row["split"], row["row"]], text_of[row["kept_split"], row["kept_row"]]
        assert row["document"] == content_hash(text)[0]
        assert row["kept_document"] == content_hash(kept)[0]
        members.setdefault(kept, [kept]).append(text)
    assert not set(members) & {text for kept, all_of in members.items() for text in all_of if text != kept}
    for kept, all_of in members.items():
        assert kept == min(all_of, key=lambda text: (-len(text.encode()), content_hash(text)[0]))
    metadata = {"clusters": len(members), "dropped": len(rows), "largest": max(map(len, members.values()))}
    dropped_bytes = sum(len(text) for kept, all_of in members.items() for text in all_of if text != kept)
    assert clusters.metadata == metadata | {"dropped_bytes": dropped_bytes}
    assert len(members) == 30


def test_the_same_documents_are_kept_in_any_order_and_by_any_division(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = planted(seed=3, families=25)
    _, clusters = run_stage(tmp_path / "one", [texts])
    kept = kept_texts([texts], clusters)
    assert 25 <= len(kept) < 100
    splits = into(random.Random(1).sample(texts, len(texts)), 5)
    _, clusters = run_stage(tmp_path / "five", splits, ranges=7, backwards=True)
    assert kept_texts(splits, clusters) == kept
    splits = [splits[number] for number in (3, 0, 4, 2, 1)]
    _, clusters = run_stage(tmp_path / "permuted", splits, ranges=3)
    assert kept_texts(splits, clusters) == kept
    monkeypatch.setattr(signature_files, "RUN_DOCUMENTS", 8)  # splits of several runs, and groups cut into many chunks
    monkeypatch.setattr(near_duplicates, "RUN_DOCUMENTS", 8)
    monkeypatch.setattr(signature_files, "_SIGNED_AT_ONCE", 3)
    monkeypatch.setattr(near_duplicates, "_CHUNK", 5)
    _, clusters = run_stage(tmp_path / "runs", splits)
    assert kept_texts(splits, clusters) == kept


def test_outputs_have_the_same_bytes_whoever_makes_them_and_stay(tmp_path: Path) -> None:
    splits = into(planted(seed=4, families=10), 3)
    outputs, clusters = run_stage(tmp_path / "a", splits, ranges=2)
    again, clusters_again = run_stage(tmp_path / "b", splits, ranges=2, backwards=True)

    def told(outputs: Iterable[Output]) -> list[tuple[str, str, Any]]:
        return sorted((output.key, output.sha256, output.metadata) for output in outputs)

    assert told([*outputs, clusters]) == told([*again, clusters_again])
    before = {output.path: Path(output.path).stat().st_ino for output in [*outputs, clusters]}
    Path(outputs[1].path).unlink()
    with open(outputs[-1].path, "r+b") as file:
        file.truncate(100)
    standing, _ = run_stage(tmp_path / "a", splits, ranges=2)
    assert told(standing) == told(outputs)
    changed = {path for path, inode in before.items() if Path(path).stat().st_ino != inode}
    assert changed <= {outputs[1].path, outputs[-1].path}


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 39), st.integers(0, 39)), max_size=25), min_size=1, max_size=4),
    st.permutations(range(40)),
)
@settings(max_examples=60)
def test_what_pairs_join_is_a_cluster(
    signed_forty: tuple[list[str], list[str]], files: list[list[tuple[int, int]]], names: list[int]
) -> None:
    """Graphs with edges in any order and in any files are compared with components from a simple algorithm."""
    texts, paths = signed_forty
    group = list(range(40))
    for one, other in chain(*files):
        one, other = names[one], names[other]
        old, new = group[one], group[other]
        group = [new if each == old else each for each in group]
    clusters = [[number for number in range(40) if group[number] == which] for which in set(group)]
    expected = {
        member: best
        for members in clusters
        for best in [min(members, key=lambda number: (-len(texts[number]), content_hash(texts[number])[0]))]
        for member in members
        if member != best
    }
    with TemporaryDirectory() as folder:
        for number, pairs in enumerate(files):
            codes = [
                [(names[end] // 20) << 32 | names[end] % 20 for end in pair] for pair in pairs if pair[0] != pair[1]
            ]
            np.save(f"{folder}/{number}.npy", np.array(codes, np.uint64).reshape(-1, 2))
        made = find_clusters(
            FindClusters("c", folder, paths, [f"{folder}/{number}.npy" for number in range(len(files))])
        )
        rows = pa.ipc.open_file(made.path).read_all().to_pylist()
    found = {row["split"] * 20 + row["row"]: row["kept_split"] * 20 + row["kept_row"] for row in rows}
    assert found == expected
    sizes = [len(members) for members in clusters if len(members) > 1]
    assert (made.metadata["clusters"], made.metadata["largest"]) == (len(sizes), max(sizes, default=0))


@pytest.fixture(scope="module")
def signed_forty(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """Forty texts of a few lengths, and the paths of two signed splits with twenty each."""
    folder = tmp_path_factory.mktemp("forty")
    rng = random.Random(11)
    texts = [" ".join(f"{rng.getrandbits(32):08x}" for _ in range(rng.randint(10, 13))) for _ in range(40)]
    outputs, _ = run_stage(folder, into(texts, 2))
    return texts, [output.path for output in outputs[:2]]


def test_rows_are_those_of_the_split_as_it_was_read(tmp_path: Path) -> None:
    rng = random.Random(6)
    splits = into([" ".join(words_of(rng, 80)) for _ in range(240)], 2)
    splits[1][100] = splits[0][57] + " more"
    splits[1][110] = splits[0][57]
    dropped = [np.array([0, 1, 5, 56, 58, 119]), np.array([3, 99, 110])]
    _, clusters = run_stage(tmp_path, splits, dropped)
    assert [rows.tolist() for rows in dropped_rows(clusters.path, 2)] == [[57], []]


@pytest.mark.parametrize("dropped", [[], [0], [0, 1, 2], [2, 5, 6, 9], [9]])
def test_rows_that_are_left(dropped: list[int]) -> None:
    left = [row for row in range(10) if row not in dropped]
    assert kept_rows(np.array(dropped, np.int64), 0, len(left)).tolist() == left
    assert kept_rows(np.array(dropped, np.int64), 3, 6).tolist() == left[3:6]


def test_exact_copies_empty_splits_and_documents_without_words(tmp_path: Path, document: Callable[[int], str]) -> None:
    same = document(1)
    splits = [[same, "* * *", same, "...", "word"], [], ["* * *", document(2), "Word!", "", same]]
    _, clusters = run_stage(tmp_path, splits)
    kept = Counter(kept_texts(splits, clusters))
    assert kept == Counter({"* * *": 2, "...": 1, "": 1, same: 1, document(2): 1, "Word!": 1})
    assert dropped_rows(clusters.path, 3)[0].tolist() == [2, 4]


def test_nothing_to_drop_and_nothing_at_all(tmp_path: Path) -> None:
    rng = random.Random(7)
    different = [" ".join(words_of(rng, 60)) for _ in range(20)]
    nothing = {"clusters": 0, "dropped": 0, "dropped_bytes": 0, "largest": 0}
    for name, splits in {"different": [different], "empty": [[], []], "no words": [["-"] * 5]}.items():
        _, clusters = run_stage(tmp_path / name, splits)
        assert clusters.metadata == nothing
        assert [rows.tolist() for rows in dropped_rows(clusters.path, len(splits))] == [[] for _ in splits]


def test_a_large_group_is_compared_with_leaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(8)
    template = words_of(rng, 400)
    texts = [" ".join([*edited(rng, template, 3), f"page{number}"]) for number in range(300)]
    splits = into(texts, 3)
    _, clusters = run_stage(tmp_path / "leaders", splits)
    assert clusters.metadata["largest"] == 300
    kept = kept_texts(splits, clusters)
    monkeypatch.setattr(near_duplicates, "_CHUNK", 32)  # leaders are carried from chunk to chunk
    _, clusters = run_stage(tmp_path / "chunks", splits)
    assert kept_texts(splits, clusters) == kept
    monkeypatch.setattr(near_duplicates, "ALL_PAIRS_DOCUMENTS", 1000)
    _, clusters = run_stage(tmp_path / "pairs", splits)
    assert kept_texts(splits, clusters) == kept


def test_a_group_of_documents_that_are_not_alike_is_not_compared_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one row per band, documents that share little become candidates."""
    monkeypatch.setattr(near_duplicates, "ALL_PAIRS_DOCUMENTS", 4)
    monkeypatch.setattr(near_duplicates, "MAX_LEADERS", 3)
    rng = random.Random(9)
    shared = words_of(rng, 60)
    texts = [" ".join(shared + words_of(rng, 40)) for _ in range(60)]
    texts += [text + " copy" for text in texts[:10]]
    config = NearDuplicatesConfig(bands=128)
    _, clusters = run_stage(tmp_path, [texts], config=config)
    assert clusters.metadata["largest"] == 2
    assert 1 <= clusters.metadata["dropped"] <= 10


def test_the_threshold_decides(tmp_path: Path) -> None:
    rng = random.Random(10)
    words = words_of(rng, 1000)
    texts = [" ".join(edited(rng, words, 30)), " ".join(words)]  # similarity about 0.75
    for threshold, largest in ((0.5, 2), (0.9, 0)):
        config = NearDuplicatesConfig(threshold=threshold)
        _, clusters = run_stage(tmp_path / str(threshold), [texts], config=config)
        assert clusters.metadata["largest"] == largest


@pytest.mark.parametrize("documents", [0, 1, 60_000, 70_000, 2**20, 2**24 + 1])
def test_the_work_is_divided_by_its_size(documents: int) -> None:
    work = plan_comparisons(documents, 17)
    (ranges,) = {ranges for _, _, ranges in work}
    done = [(band, part) for bands, part, _ in work for band in bands]
    assert sorted(done) == [(band, part) for band in range(17) for part in range(ranges)]
    assert documents / ranges <= near_duplicates.RANGE_DOCUMENTS
    assert len(work) == {0: 1, 1: 1, 60_000: 1, 70_000: 2, 2**20: 17, 2**24 + 1: 51}[documents]


def test_more_bands_than_permutations_are_refused() -> None:
    with pytest.raises(ValidationError, match="bands=65 is more than permutations=64"):
        NearDuplicatesConfig(permutations=64, bands=65)
