"""Signatures: what they estimate, how accurately, and that they depend on a document's shingles alone."""

import math
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from multihop.data_prep.duplicates import minhash, shingles
from multihop.data_prep.duplicates.minhash import (
    accepted_probability,
    band_hashes,
    candidate_probability,
    choose_bands,
    low_bytes,
    signatures,
    similarity,
)

PERMUTATIONS = 128
PAGE = Path(__file__).parents[3] / "docs" / "near-duplicates.md"


def random_pairs(pairs: int, shared: int, own: int, seed: int) -> tuple[pa.Array, pa.Array]:
    """Return pairs of texts of random words, with `shared` words in both and `own` words in each alone."""
    rng = random.Random(seed)
    one, other = [], []
    for _ in range(pairs):
        words = [f"w{rng.getrandbits(60):x}" for _ in range(shared + 2 * own)]
        one.append(" ".join(words[: shared + own]))
        other.append(" ".join(words[:shared] + words[shared + own :]))
    return pa.array(one), pa.array(other)


@pytest.mark.parametrize("shared,own", [(1, 1), (3, 1), (8, 1), (20, 10), (60, 7), (150, 20), (100, 100), (800, 50)])
def test_the_estimate_is_unbiased_and_as_concentrated_as_that_of_minhash(shared: int, own: int) -> None:
    pairs = 300
    jaccard = shared / (shared + 2 * own)
    one, other = (signatures(texts, 1, PERMUTATIONS)[0] for texts in random_pairs(pairs, shared, own, seed=shared))
    variance = jaccard * (1 - jaccard) / PERMUTATIONS
    exact = (one == other).mean(axis=1)
    assert abs(exact.mean() - jaccard) < 4 * math.sqrt(variance / pairs)
    assert exact.var() < variance * (1 + 4 * math.sqrt(2 / pairs))
    # Of the low bytes, 1 in 256 agrees by chance: the correction keeps the mean, and adds little variance.
    from_bytes = similarity(low_bytes(one), low_bytes(other))
    chance = (jaccard + (1 - jaccard) / 256) * (1 - jaccard) * (255 / 256) / PERMUTATIONS / (255 / 256) ** 2
    assert abs(from_bytes.mean() - jaccard) < 4 * math.sqrt(chance / pairs)
    assert from_bytes.var() < chance * (1 + 4 * math.sqrt(2 / pairs))


@pytest.mark.parametrize("shared,own", [(40, 5), (60, 10), (30, 10)])
def test_candidates_are_found_as_often_as_the_curve_says(shared: int, own: int) -> None:
    pairs, bands = 1500, 17
    one, other = (signatures(texts, 1, PERMUTATIONS)[0] for texts in random_pairs(pairs, shared, own, seed=own))
    result = (band_hashes(one, bands) == band_hashes(other, bands)).any(axis=0).mean()
    expected = candidate_probability(shared / (shared + 2 * own), bands, PERMUTATIONS // bands)
    assert abs(result - expected) < 4 * math.sqrt(expected * (1 - expected) / pairs) + 0.02  # bins are not quite apart


def test_a_signature_is_that_of_the_set() -> None:
    rng = random.Random(5)
    words = [f"word{number}" for number in range(40)]
    shuffled = rng.sample(words, 40) + rng.choices(words, k=200)
    values, _ = signatures(pa.array([" ".join(words), " ".join(shuffled)]), 1, PERMUTATIONS)
    assert (values[0] == values[1]).all()


def test_a_signature_does_not_depend_on_what_is_signed_beside_it(
    document: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [document(number) for number in range(50)] + ["one", "two words", "", " - "]
    texts += [" ".join(document(number) for number in range(start, start + 60)) for start in (0, 60)]
    texts.append("again and again " * 800)
    values, filled = signatures(pa.array(texts), 5, PERMUTATIONS)
    assert np.flatnonzero(~filled).tolist() == [52, 53]
    alone = np.concatenate([signatures(pa.array([text]), 5, PERMUTATIONS)[0] for text in texts])
    assert (alone[filled] == values[filled]).all()
    monkeypatch.setattr(shingles, "CHUNK_BYTES", 1300)  # long documents come in parts
    assert (signatures(pa.array(texts), 5, PERMUTATIONS)[0][filled] == values[filled]).all()


@pytest.mark.parametrize("permutations", [16, 64, 200, 256])
def test_the_number_of_permutations_is_free(permutations: int) -> None:
    one, other = (signatures(texts, 1, permutations)[0] for texts in random_pairs(200, 60, 10, seed=1))
    spread = math.sqrt(0.75 * 0.25 / permutations / 200)
    assert abs(similarity(low_bytes(one), low_bytes(other)).mean() - 0.75) < 5 * spread
    assert similarity(low_bytes(one), low_bytes(one)).tolist() == [1.0] * 200


def test_a_band_is_equal_where_all_its_rows_are() -> None:
    values, _ = signatures(random_pairs(2, 50, 3, seed=3)[0], 1, PERMUTATIONS)
    hashes = band_hashes(values, 17)
    assert hashes.shape == (17, 2)
    for row in range(PERMUTATIONS):
        changed = values.copy()
        changed[:, row] += 1
        differ = np.flatnonzero((band_hashes(changed, 17) != hashes).all(axis=1))
        assert differ.tolist() == ([row // 7] if row < 17 * 7 else [])


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.8, 0.9, 0.95])
def test_no_fewer_bands_would_find_enough(threshold: float) -> None:
    bands = choose_bands(threshold, PERMUTATIONS)
    assert candidate_probability(threshold, bands, PERMUTATIONS // bands) >= minhash.RECALL
    fewer = [candidate_probability(threshold, each, PERMUTATIONS // each) for each in range(1, bands)]
    assert all(probability < minhash.RECALL for probability in fewer)


def test_signatures_stay_what_they_are() -> None:
    """A data set that grows is compared with documents that were signed before."""
    values, _ = signatures(pa.array(["The quick brown fox jumps over the lazy dog, and runs."]), 5, 16)
    assert values.astype("<u4").tobytes().hex() == (
        "d02cdbb1a081cd1a4047d18a9033ad6646eff3ba0490965b705fe60004efc16c"
        "b899182674b88dc258118503d043c608c0f44de4f420970930bbf08beeb6ed17"
    )


def test_the_tables_of_the_documentation_are_those_of_the_formulas() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if re.match(r"\| 0\.\d", line)]
    curve, checks = ([row for row in rows if len(row) == length] for length in (10, 3))
    assert curve and checks
    for threshold, bands, values, *probabilities in curve:
        assert choose_bands(float(threshold), PERMUTATIONS) == int(bands)
        assert PERMUTATIONS // int(bands) == int(values)
        expected = [candidate_probability(tenth / 10, int(bands), int(values)) for tenth in range(3, 10)]
        assert probabilities == [f"{probability:.3f}" for probability in expected]
    for jaccard, candidate, accepted in checks:
        assert candidate == f"{candidate_probability(float(jaccard), 17, 7):.3f}"
        assert accepted == f"{accepted_probability(float(jaccard), 0.8, PERMUTATIONS):.3f}"
