"""LAMBADA: the last word by greedy decoding, with and without stop words."""

import json
import random
from math import exp
from pathlib import Path

import pytest
from tiny_scorers import WORDS, Scorer

from multihop.common.errors import UserError
from multihop.eval.tasks.zero_shot_sets import read_lambada
from multihop.eval.zero_shot.lambada import LambadaVariant, evaluate_lambada

_STOP_WORDS = ("the", "her", "of")


def _predicted(causal: Scorer, context: str, allowed: tuple[str, ...] | None) -> str:
    """Return the most likely next token as text, among the `allowed` words if given."""
    ids = [causal.special_ids["end"], *causal.tokenizer.encode([context])[0].tolist()]
    row = causal.log_probabilities(ids)[-1]
    for word in _STOP_WORDS if allowed is None else ():
        row[int(causal.tokenizer.encode([f" {word}"])[0][0])] = -1e9
    return causal.tokenizer.decode([int(row.argmax())])


def _contexts(count: int) -> list[str]:
    rng = random.Random(4)
    return [" ".join(rng.choices(WORDS, k=rng.randint(2, 9))) for _ in range(count)]


@pytest.mark.parametrize("batch_tokens", [1, 8192])
def test_the_last_word_is_right_if_it_is_the_likeliest(causal: Scorer, batch_tokens: int) -> None:
    passages, plain, filtered = [], [], []
    for context in _contexts(40):
        likeliest, without_stop_words = _predicted(causal, context, WORDS), _predicted(causal, context, None)
        for word in {likeliest, without_stop_words, " winter"}:
            if word.startswith(" ") and word[1:] in WORDS:
                passages.append(context + word)
                plain.append(float(word == likeliest))
                filtered.append(float(word == without_stop_words))
    assert 0 < sum(plain) < len(plain) and plain != filtered
    variants: dict[LambadaVariant, list[float]] = {"plain": plain, "no stop words": filtered}
    for variant, hits in variants.items():
        result = evaluate_lambada(*causal, passages, variant, batch_tokens)
        assert result.statistics.tolist() == [[hit, 1.0] for hit in hits]
        assert result.value == result.other_metrics[f"accuracy, {variant} variant"] == sum(hits) / len(hits)
        scores = [causal.likelihood(passage.rsplit(" ", 1)[0], " " + passage.rsplit(" ", 1)[1]) for passage in passages]
        perplexity = exp(-sum(scores) / len(scores))
        assert result.other_metrics["perplexity per last word"] == pytest.approx(perplexity, rel=1e-4)


def test_a_word_of_several_tokens_is_scored_whole(causal: Scorer) -> None:
    result = evaluate_lambada(*causal, ["The captain found the rivers"])
    perplexity = exp(-causal.likelihood("The captain found the", " rivers"))
    assert result.other_metrics["perplexity per last word"] == pytest.approx(perplexity, rel=1e-4)


def test_gpt2s_protocol_reads_natural_text(causal: Scorer) -> None:
    official, natural = "`` Do n't , '' said the captain", '"Don\'t," said the captain'
    results = [
        evaluate_lambada(*causal, [passage], variant).other_metrics["perplexity per last word"]
        for passage, variant in (
            (official, "no stop words"),
            (natural, "plain"),
            ("“Don\u2019t,” said the captain", "no stop words"),
        )
    ]
    assert results == pytest.approx([results[0]] * 3, rel=1e-5)
    assert evaluate_lambada(*causal, [official]).other_metrics["perplexity per last word"] != pytest.approx(results[0])


def test_both_official_formats_are_read(tmp_path: Path) -> None:
    passages = ("her captain 's “ letter ”\nof the river", "the stone")
    lines, plain = tmp_path / "lambada_test.jsonl", tmp_path / "lambada_test_plain_text.txt"
    lines.write_text("\n".join(json.dumps({"text": text}) for text in passages) + "\n")
    plain.write_text("\n".join(text.replace("\n", " ") for text in passages) + "\n")
    assert read_lambada(lines) == passages
    assert read_lambada(plain) == tuple(text.replace("\n", " ") for text in passages)
    for path in (lines, plain):  # as editors of Windows save a file
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_lambada(lines) == passages
    assert read_lambada(plain) == tuple(text.replace("\n", " ") for text in passages)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", '{"text": "two words"}\n{"text": 3}', r"line 2: expected a JSON object with the texts text, got"),
        ("a.jsonl", '{"text": "two words"}\n\n["a b"]', "line 3: expected a JSON object"),
        ("a.jsonl", '{"text": "two words"', "line 1: expected a JSON object"),
        ("a.jsonl", '{"text": "word"}', "line 1: expected a passage of several words, got 'word'"),
        ("a.txt", "two words\n\nword\n", "line 3: expected a passage of several words, got 'word'"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=message) as error:
        read_lambada(path)
    assert str(path) in str(error.value)
