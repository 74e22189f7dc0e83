"""Multiple choice by likelihood, and the Children's Book Test's official format."""

from pathlib import Path

import numpy as np
import pytest
from tiny_scorers import Scorer

from multihop.common.errors import UserError
from multihop.eval.tasks.cbt import read_cbt
from multihop.eval.tasks.task import Example
from multihop.eval.zero_shot.choice import evaluate_choices

EXAMPLES = [
    Example(("The captain found", "the river.", "her silver letter in the garden.", "a stone"), (1.0,)),
    Example(("In winter ", "of", " of the garden"), (0.0,)),
    Example(("", "the river", "silver of the stone"), (1.0,)),
    Example(("What? ", "", "the letter"), (0.0,)),
]


def _question(sentences: int = 20, last: str = "The XXXXX slept .\triver\t\triver|stone") -> str:
    lines = [f"{number} Sentence {number} of the garden ." for number in range(1, sentences + 1)]
    return "\n".join([*lines, f"{sentences + 1} {last}"])


@pytest.mark.parametrize("batch_tokens", [1, 8192])
def test_the_likeliest_continuation_by_the_definition(causal: Scorer, batch_tokens: int) -> None:
    result = evaluate_choices(*causal, EXAMPLES, batch_tokens)
    hits = []
    for example in EXAMPLES:
        context, *texts = (text.strip() for text in example.texts)
        spaced = [" " * bool(context) + text for text in texts]
        scores = np.array([causal.likelihood(context, each) for each in spaced])
        tokens = [len(causal.tokenizer.encode([each])[0]) for each in spaced]
        sizes = [max(1, len(text)) for text in texts]
        hits.append([(scores / by).argmax() == example.targets[0] for by in (np.ones(len(texts)), tokens, sizes)])
    wanted = np.mean(hits, axis=0)
    assert result.value == wanted[0]
    assert result.other_metrics == {
        "accuracy per token": wanted[1],
        "accuracy per character": wanted[2],
        "chance": pytest.approx((1 / 3 + 3 / 2) / 4),
    }
    assert result.statistics.tolist() == [[float(hit[0]), 1.0] for hit in hits]


def test_choices_need_labels(causal: Scorer) -> None:
    with pytest.raises(UserError, match="example 2 has no label"):
        evaluate_choices(*causal, [EXAMPLES[0], Example(("a", "b", "c"))])
    with pytest.raises(UserError, match="at least one example"):
        evaluate_choices(*causal, [])


def test_cbt_questions_are_choices_of_the_rest_of_the_sentence(causal: Scorer, tmp_path: Path) -> None:
    path = tmp_path / "cbtest_NE_test_2500ex.txt"
    second = "`` Is n't it -LRB- the XXXXX 's -RRB- , '' he said .\tstone\t\triver|stone|captain"
    path.write_text(_question() + "\n\n" + _question(last=second) + "\n\n")
    first, last = read_cbt(path)
    assert first.texts[0].startswith("Sentence 1 of the garden. Sentence 2 of") and first.texts[0].endswith(". The")
    assert first.texts[1:] == ("river slept.", "stone slept.") and first.targets == (0.0,)
    assert last.texts[0].endswith("Sentence 20 of the garden. \"Isn't it (the")
    assert last.texts[1:] == tuple(f"{word}'s),\" he said." for word in ("river", "stone", "captain"))
    assert last.targets == (1.0,)
    result = evaluate_choices(*causal, [first, last])
    assert result.statistics.shape == (2, 2) and result.other_metrics["chance"] == pytest.approx((1 / 2 + 1 / 3) / 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        (_question(19), "ends after sentence 20 of a question"),
        ("1 one\n3 three\n", "line 2: expected a line that begins with 2 and a space, got '3 three'"),
        ("1 one\n\n", "line 2: expected sentence 2 of a question"),
        ("1 one\n2 two", "ends after sentence 2 of a question"),
        (_question(last="No blank .\triver\t\triver|stone"), "line 21: expected a sentence with XXXXX"),
        (_question(last="The XXXXX .\tletter\t\triver|stone"), "line 21: expected a sentence with XXXXX"),
        (_question(last="The XXXXX .\triver"), "line 21: expected a sentence with XXXXX"),
    ],
)
def test_a_broken_cbt_file_is_named_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "cbtest_CN_test_2500ex.txt"
    path.write_text(content)
    with pytest.raises(UserError, match=message) as error:
        read_cbt(path)
    assert str(path) in str(error.value)
