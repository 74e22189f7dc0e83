"""Words are added to an existing vocabulary: each becomes one token, and no other id changes its meaning."""

import json
import random
from collections import Counter
from collections.abc import Callable
from functools import cache

import published_tokenizers as published
import pytest
from nasty_texts import nasty_texts
from sentencepiece import sentencepiece_model_pb2

from multihop.common.errors import UserError
from multihop.data_prep.config import TokenizerConfig
from multihop.data_prep.tokenizers.add_words import add_words
from multihop.data_prep.tokenizers.existing import import_tokenizer
from multihop.data_prep.tokenizers.tokenizer import describe, parse
from multihop.data_prep.tokenizers.tokenizer_json import wordpiece_json
from multihop.data_prep.tokenizers.training import train

FIELD = [
    "The multiplexer retransmits each datagram; the datagrams of another multiplexer are acknowledged.",
    "A datagram that no multiplexer retransmits is lost, and naïvetés of Zürich's multiplexers are not.",
    "Acknowledged datagrams: datagram, DATAGRAM (see [MASK] and <mask>), retransmits/acknowledged - 2119 2119 2119.",
]
KINDS = ["bert", "gpt2", "roberta", "modernbert", "unigram", "unigram with bytes"]


@pytest.fixture(scope="module")
def content_of(document: Callable[[int], str]) -> Callable[[str], bytes]:
    texts = [document(number) for number in range(200)]

    @cache
    def of(kind: str) -> bytes:
        if kind == "bert":
            return published.bert()
        if kind.startswith("unigram"):
            byte_fallback = kind.endswith("bytes")
            config = TokenizerConfig(vocab_size=450 if byte_fallback else 150, threads=1, byte_fallback=byte_fallback)
            return train([*texts, *[FIELD[0], "abcdefghijklmnopqrstuvwxyz"] * 20], config)
        return getattr(published, kind)(texts, 600)

    return of


def words_of(extended: bytes, content: bytes) -> list[str]:
    tokenizer = parse(extended)
    return [tokenizer.token_text(i) for i in range(parse(content).vocab_size, tokenizer.vocab_size)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_word_is_one_token_and_its_parts_were_its_tokens(kind: str, content_of: Callable[[str], bytes]) -> None:
    content = content_of(kind)
    extended, added = add_words(content, FIELD * 3, 5)
    before, after = parse(content), parse(extended)
    size = before.vocab_size
    assert after.vocab_size == size + 5 and len(added.parts) == 5
    words = words_of(extended, content)
    assert any("multiplexer" in word for word in words) and not any(word.strip().isdigit() for word in words)
    for number, (word, parts) in enumerate(zip(words, added.parts, strict=True)):
        text = word if kind in ("gpt2", "roberta", "modernbert") else word.strip()
        assert after.encode([text])[0].tolist() == [size + number]
        assert before.encode([text])[0].tolist() == parts and len(parts) > 1
        assert after.decode([size + number]).strip() == word.strip()
    assert [after.id_to_token(i) for i in range(size)] == [before.id_to_token(i) for i in range(size)]
    assert describe(extended, "").special_ids == describe(content, "").special_ids
    lengths = [len(each.encode(FIELD * 3)[0]) for each in (before, after)]
    assert lengths[0] > lengths[1]
    if not kind.startswith("unigram"):  # whose words are counted without punctuation
        assert lengths == [added.tokens_before, added.tokens_after]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_without_these_letters_keep_their_ids(kind: str, content_of: Callable[[str], bytes]) -> None:
    content = content_of(kind)
    extended, _ = add_words(content, FIELD * 3, 5)
    before, after = parse(content), parse(extended)
    first = {word.strip()[0].lower() for word in words_of(extended, content)}
    for text in nasty_texts(500, 3):
        kept = "".join(" " if character.lower() in first else character for character in text)
        assert after.encode([kept])[0].tolist() == before.encode([kept])[0].tolist(), repr(kept)


@pytest.mark.parametrize("kind", KINDS)
def test_the_words_that_save_most_tokens_are_added(kind: str, content_of: Callable[[str], bytes]) -> None:
    content = content_of(kind)
    rng = random.Random(kind)
    vocabulary = ["".join(rng.choices("abcdefgh", k=rng.randint(4, 12))) for _ in range(60)]
    texts = [" ".join(rng.choices(vocabulary, range(60), k=50)) for _ in range(20)]
    counts = Counter(" ".join(["", *texts]).split(" ")[1:])
    tokenizer = parse(content)

    def saved(word: str) -> int:
        parts = tokenizer.encode([" " + word if tokenizer.kind == "byte-bpe" else word])[0]
        return counts[word] * (len(parts) - 1)

    chosen = {word.strip() for word in words_of(add_words(content, texts, 10)[0], content)}
    # The first word of a text has no space before it, so that byte-level BPE counts it apart.
    slack = 12 * 20 if tokenizer.kind == "byte-bpe" else 0
    assert min(map(saved, chosen)) >= max(saved(word) for word in counts if word not in chosen) - slack


def test_a_longer_word_is_found_though_another_added_word_begins_it(content_of: Callable[[str], bytes]) -> None:
    for kind in KINDS:
        content = content_of(kind)
        texts = ["zorbifier " * 500 + "zorbifiers zorbifierss zorbifiersss " * 2]
        extended, _ = add_words(content, texts, 4)
        tokenizer, size = parse(extended), parse(content).vocab_size
        ids = tokenizer.encode([" zorbifier zorbifiers zorbifierss zorbifiersss"])[0].tolist()
        assert sorted(ids) == [size, size + 1, size + 2, size + 3]


def test_a_word_that_is_a_token_but_less_probable_than_its_parts_is_not_added(
    content_of: Callable[[str], bytes],
) -> None:
    proto = sentencepiece_model_pb2.ModelProto.FromString(content_of("unigram"))
    proto.pieces.add(piece="▁zorbifier", score=-900.0, type=1)
    extended, _ = add_words(proto.SerializeToString(), ["zorbifier multiplexer"] * 5, 1)
    assert parse(extended).id_to_token(len(proto.pieces)) == "▁multiplexer"


def test_punctuation_beside_a_word_is_not_added(content_of: Callable[[str], bytes]) -> None:
    for kind in KINDS:
        texts = ["A zorbifier, the zorbifier. (zorbifier) zorbifier's zorbifier zorbifier " + "x" * 40] * 3
        extended, _ = add_words(content_of(kind), texts, 1)
        assert [word.strip() for word in words_of(extended, content_of(kind))] == ["zorbifier"]


def test_a_word_with_which_a_known_one_would_become_unknown_is_not_added() -> None:
    letters = [*"abcdz"]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{each}" for each in letters), "ab", "##cde"]
    content = wordpiece_json(tokens, lowercase=True)
    extended, _ = add_words(content, ["abcd abcd abcd abcd abcde bcz bcz bcz bcz"] * 3, 1)
    assert words_of(extended, content) == [" bcz"]
    with pytest.raises(UserError, match="the sample has no word that the vocabulary splits into known tokens"):
        add_words(content, ["abcd abcd abcde"] * 3, 1)


def test_the_same_texts_give_the_same_bytes(content_of: Callable[[str], bytes]) -> None:
    for kind in KINDS:
        assert add_words(content_of(kind), FIELD * 3, 5) == add_words(content_of(kind), FIELD[::-1] * 3, 5)


def test_words_can_be_added_again(content_of: Callable[[str], bytes]) -> None:
    for kind in KINDS:
        once, _ = add_words(content_of(kind), FIELD * 3, 4)
        twice, _ = add_words(once, ["The zorbifier that zorbifies a zorbifier."] * 3, 2)
        size = parse(content_of(kind)).vocab_size
        assert words_of(twice, content_of(kind))[:4] == words_of(once, content_of(kind))
        assert parse(twice).vocab_size == size + 6


def test_what_cannot_be_extended_is_refused(content_of: Callable[[str], bytes], document: Callable[[int], str]) -> None:
    with pytest.raises(UserError, match=r"add_words=1,000: the sample has \d+ words that .* set \d+ or less"):
        add_words(content_of("bert"), FIELD, 1000)
    bpe = train([document(number) for number in range(200)], TokenizerConfig(kind="bpe", vocab_size=150, threads=1))
    with pytest.raises(UserError, match="words can be added to WordPiece, byte-level BPE and"):
        add_words(bpe, FIELD, 1)
    tree = json.loads(content_of("gpt2"))
    merged = next(number for number, (one, _) in enumerate(tree["model"]["merges"]) if one.startswith("Ġ"))
    del tree["model"]["merges"][merged]
    with pytest.raises(UserError, match="is a word that its merges encode otherwise"):
        add_words(json.dumps(tree).encode(), FIELD * 3, 2)


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"add_words=5 adds words to .* give it as tokenizer\.path"):
        TokenizerConfig(add_words=5)
    with pytest.raises(ValueError, match=r"tokenizer\.sample_mb is a setting of training"):
        TokenizerConfig(path="vocab.txt", sample_mb=3)
    assert TokenizerConfig(path="vocab.txt", sample_mb=3, add_words=5).is_from_sample


def test_an_extended_tokenizer_is_imported_as_it_is(content_of: Callable[[str], bytes], tmp_path) -> None:
    for kind in KINDS:
        extended, _ = add_words(content_of(kind), FIELD * 3, 4)
        path = tmp_path / ("tokenizer.json" if extended.startswith(b"{") else "tokenizer.model")
        path.write_bytes(extended)
        assert import_tokenizer(path) == extended
