"""BLiMP: pairs of sentences in the official files, under causal and masked models."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_scorers import Scorer

from multihop.common.errors import UserError
from multihop.eval.tasks import zero_shot_sets
from multihop.eval.tasks.zero_shot_sets import Pair
from multihop.eval.zero_shot.minimal_pairs import evaluate_pairs
from multihop.eval.zero_shot.scoring import pseudo_log_likelihoods

PAIRS = (
    Pair("The captain found her letter.", "The captain found her letters.", "morphology", "agreement", "a_one"),
    Pair("A stone of silver.", "A silver of stone.", "syntax", "order", "b_two"),
    Pair("The captain was in the garden.", "In the garden the was captain.", "syntax", "order", "b_two"),
    Pair("the river", "river the", "syntax", "agreement", "c_three"),
    Pair("winter", "winter", "syntax", "agreement", "c_three"),
)


def _write(folder: Path) -> None:
    for pair in PAIRS:
        row = {
            "sentence_good": pair.good, "sentence_bad": pair.bad, "field": pair.field, "linguistics_term": pair.term,
            "UID": pair.paradigm, "simple_LM_method": True, "one_prefix_method": False, "two_prefix_method": False,
            "lexically_identical": False, "pairID": "0",
        }  # fmt: skip
        with (folder / f"{pair.paradigm}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The directory of BLiMP's files."""
    (tmp_path / "blimp").mkdir()
    return tmp_path / "blimp"


def test_the_official_files_are_read(folder: Path) -> None:
    _write(folder)
    assert zero_shot_sets.read("blimp", str(folder.parent)) == PAIRS


@pytest.mark.parametrize("content", ['{"sentence_good": "a", "sentence_bad": "b", "UID": "d"}', "a b", ""])
def test_a_broken_file_is_named_with_its_line(folder: Path, content: str) -> None:
    with pytest.raises(UserError, match=r"task blimp reads \S+/blimp/\*\.jsonl, which is missing"):
        zero_shot_sets.read("blimp", str(folder.parent))
    _write(folder)
    path = folder / "b_two.jsonl"
    path.write_text(path.read_text() + content if content else "")
    with pytest.raises(UserError, match=r"b_two\.jsonl, line 3: expected a JSON object" if content else "is empty"):
        zero_shot_sets.read("blimp", str(folder.parent))


def _groups(hits: list[bool]) -> dict[str, float]:
    return {
        "field morphology": hits[0],
        "field syntax": float(np.mean(hits[1:])),
        "paradigm a_one": hits[0],
        "paradigm b_two": float(np.mean(hits[1:3])),
        "paradigm c_three": float(np.mean(hits[3:])),
        "term agreement": float(np.mean([hits[0], *hits[3:]])),
        "term order": float(np.mean(hits[1:3])),
    }


@pytest.mark.parametrize("batch_tokens", [1, 8192])
def test_a_causal_model_prefers_the_sentence_of_higher_likelihood(causal: Scorer, batch_tokens: int) -> None:
    result = evaluate_pairs(*causal, PAIRS, batch_tokens=batch_tokens)
    hits = [causal.likelihood("", pair.good) > causal.likelihood("", pair.bad) for pair in PAIRS]
    assert result.statistics.tolist() == [[float(hit), 1.0] for hit in hits] and not hits[-1]
    assert result.value == np.mean(hits) and result.other_metrics == _groups(hits)


def test_a_masked_model_prefers_the_sentence_of_higher_pseudo_likelihood(masked: Scorer) -> None:
    result = evaluate_pairs(*masked, PAIRS)

    def score(sentence: str) -> float:
        ids = masked.tokenizer.encode([sentence])[0].tolist()
        return float(pseudo_log_likelihoods(masked.model, [ids], masked.special_ids)[0])

    hits = [score(pair.good) > score(pair.bad) for pair in PAIRS[:-1]]
    assert result.statistics[:-1].tolist() == [[float(hit), 1.0] for hit in hits]
    assert result.statistics[-1].tolist() == [0.0, 1.0]  # neither of two equal sentences is preferred


def test_reading_the_files_imports_no_torch() -> None:
    code = (
        "import sys; from multihop.eval.tasks import cbt, known_tasks, running_text, zero_shot_sets; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
