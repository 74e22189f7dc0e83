"""Whole tokens, such as the relations of triples: texts match them exactly, and no other id changes its meaning."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import published_tokenizers as published
import pytest
from made_up_pairs import COMPLETED, pair, recipe, write_jsonl
from pydantic import ValidationError

from multihop.common.errors import UserError
from multihop.data_prep.config import TokenizerConfig
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.tokenizers.added_tokens import add_tokens
from multihop.data_prep.tokenizers.tokenizer import describe, load, parse
from multihop.data_prep.tokenizers.training import train

ADDED = ["<is_a>", "<part_of>", "☃"]
TEXTS = ["the wheel <part_of> a car", "wheel<is_a>thing", "a☃b <is_a", "no relation at all is_a >"]
KINDS = ["bert", "gpt2", "roberta", "unigram", "bpe", "char"]


@pytest.fixture(scope="module")
def content_of(document: Callable[[int], str]) -> Callable[[str], bytes]:
    texts = [*(document(number) for number in range(100)), *["abcdefghijklmnopqrstuvwxyz_<>"] * 20]

    @cache
    def of(kind: str) -> bytes:
        if kind == "bert":
            return published.bert()
        if kind in ("unigram", "bpe", "char"):
            size = 1000 if kind == "char" else 150
            return train(texts, TokenizerConfig.model_validate({"kind": kind, "vocab_size": size, "threads": 1}))
        return getattr(published, kind)(texts, 600)

    return of


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_found_wherever_it_is_and_other_ids_keep_their_meaning(
    kind: str, content_of: Callable[[str], bytes]
) -> None:
    content = content_of(kind)
    extended, added = add_tokens(content, ADDED, "the tokenizer")
    before, after = parse(content), parse(extended)
    size = before.vocab_size
    assert after.vocab_size == size + 3 and [after.id_to_token(size + i) for i in range(3)] == ADDED
    assert [after.id_to_token(i) for i in range(size)] == [before.id_to_token(i) for i in range(size)]
    ids, lengths = after.encode(TEXTS)
    found = [part for part in _split(ids.tolist(), lengths.tolist())]
    assert [[i for i in each if i >= size] for each in found] == [[size + 1], [size], [size + 2], []]
    assert found[3] == before.encode(TEXTS[3:])[0].tolist()
    assert added.parts == [before.encode_continuation(token) for token in ADDED]
    assert describe(extended, "").special_ids == describe(content, "").special_ids


@pytest.mark.parametrize("kind", ["unigram", "bpe", "char"])
def test_a_trained_tokenizer_has_them_among_its_tokens(kind: str, document: Callable[[int], str]) -> None:
    texts = [document(number) for number in range(100)]
    size = 1000 if kind == "char" else 150
    config = TokenizerConfig.model_validate({"kind": kind, "vocab_size": size, "threads": 1, "added_tokens": ADDED})
    tokenizer = parse(train(texts, config))
    assert tokenizer.kind == kind and (tokenizer.vocab_size == size) == (kind != "char")
    tokens = [tokenizer.id_to_token(i) for i in tokenizer.encode(["a <is_a>b"])[0].tolist()]
    assert tokens.count("<is_a>") == 1
    if kind == "char":
        assert all(len(token) == 1 for token in tokens if token != "<is_a>")


def _split(ids: list[int], lengths: list[int]) -> list[list[int]]:
    found, at = [], 0
    for length in lengths:
        found.append(ids[at : at + length])
        at += length
    return found


def test_a_data_set_has_them_and_says_what_they_were_before(tmp_path: Path) -> None:
    triples = [(f"{source} <is_a>", target) for source, target in map(pair, range(120))]
    data = recipe(write_jsonl(tmp_path / "triples.jsonl", triples))
    prepare(
        recipe(write_jsonl(tmp_path / "pairs.jsonl", [*map(pair, range(120)), ("<_>", "is a")])),
        COMPLETED,
        tmp_path / "a",
    )
    given = TokenizerConfig(path=str(tmp_path / "a" / "tokenizer.model"), added_tokens=["<is_a>"])
    manifest = prepare(data, given, tmp_path / "b")
    info = manifest.tokenizer
    assert info.added is not None and info.vocab_size == info.base_vocab_size + 1
    tokenizer, documents = load(tmp_path / "b" / info.file), open_dataset(tmp_path / "b").train
    for number in range(10):
        source = documents.tokens(number)[: documents.source_lengths[number]]
        assert tokenizer.id_to_token(int(source[-1])) == "<is_a>"
    assert prepare(data, given, tmp_path / "b").fingerprint == manifest.fingerprint
    other = given.model_copy(update={"added_tokens": ["<is_a>", "<other>"]})
    assert prepare(data, other, tmp_path / "c").fingerprint != manifest.fingerprint


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"added_tokens": ["<a b>"]}, "has '<a b>', which no text has after cleaning; give tokens without spaces"),
        ({"added_tokens": [""]}, "has '', which no text has"),
        ({"added_tokens": ["e\u0301"]}, "in Unicode's form NFC"),
        ({"added_tokens": ["<a>", "<b>", "<a>"]}, "has '<a>' twice; remove one"),
        ({"path": "a.model", "add_words": 3, "added_tokens": ["<a>"]}, "both add tokens; remove one of them"),
    ],
)
def test_tokens_that_cannot_be_matched_are_refused(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        TokenizerConfig.model_validate(settings)


def test_tokens_that_are_in_the_vocabulary_already_are_refused(content_of: Callable[[str], bytes]) -> None:
    with pytest.raises(UserError, match=r"has 'a', which is in the vocabulary of x\.model already; remove it"):
        add_tokens(content_of("char"), ["<a>", "a"], "x.model")
    with pytest.raises(UserError, match=r"has '\[SEP\]', which is a special token of tokenizer\.special_tokens=bert"):
        train(["some text"], TokenizerConfig(added_tokens=["[SEP]"]))
