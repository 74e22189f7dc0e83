"""Exact match and F1 of answers by the official evaluate-v1.1.py and evaluate-v2.0.py (Rajpurkar et al. 2016, 2018)."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from multihop.eval.tasks.squad import Name
from multihop.eval.tasks.task import Example

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Scores:
    """The scores of N predictions."""

    exact_match: NDArray[np.float64]
    """(N,), 0 or 1."""
    f1: NDArray[np.float64]
    """(N,), from 0 to 1."""
    has_answer: NDArray[np.bool_]
    """(N,): whether the question has an answer."""

    def means(self) -> dict[str, float]:
        """Return the mean of each metric from 0 to 1; if some questions have no answer, also of those with and
        without."""
        named = {"SQuAD F1": self.f1, "exact match": self.exact_match}
        means = {name: float(values.mean()) for name, values in named.items()}
        if not self.has_answer.all():
            for part, chosen in (("HasAns", self.has_answer), ("NoAns", ~self.has_answer)):
                if chosen.any():
                    means |= {f"{part} {name}": float(values[chosen].mean()) for name, values in named.items()}
        return means


def score_texts(name: Name, examples: Sequence[Example], predicted: Sequence[str]) -> Scores:
    """Return the scores of predicted texts, empty for no answer: of each the largest over the accepted answers.

    The two versions differ on answers of which nothing is left once they are normalized: 2.0 does not accept them, 1.1
    does, with an F1 of 0.
    """
    exact_match, f1 = np.zeros(len(examples)), np.zeros(len(examples))
    for index, (example, text) in enumerate(zip(examples, predicted, strict=True)):
        prediction = normalize(text)
        accepted = [normalize(answer) for answer in accepted_texts(example)]
        if name == "squad2":
            accepted = [answer for answer in accepted if answer] or [""]
        exact_match[index] = prediction in accepted
        f1[index] = max(_f1(prediction, answer, 1.0 if name == "squad2" else 0.0) for answer in accepted)
    return Scores(exact_match, f1, np.array([bool(example.targets) for example in examples]))


def accepted_texts(example: Example) -> list[str]:
    """Return the accepted answers; none if the question has no answer."""
    spans = zip(example.targets[::2], example.targets[1::2], strict=True)
    return [example.texts[1][int(start) : int(end)] for start, end in spans]


def normalize(text: str) -> str:
    """Return the text in lowercase, without ASCII punctuation and articles, its words separated by one space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _f1(prediction: str, answer: str, both_empty: float) -> float:
    """Return F1 of the bags of words of normalized texts."""
    if not prediction and not answer:
        return both_empty
    words, wanted = prediction.split(), answer.split()
    common = (Counter(words) & Counter(wanted)).total()
    # 2PR / (P + R) with P = common / words and R = common / wanted.
    return 2 * common / (len(words) + len(wanted))
