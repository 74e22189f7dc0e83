"""A tokenizer.json gives the ids of its own library for a whole text, although words are cached and texts are cut."""

import json
import os
import random
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from functools import cache
from itertools import chain

import numpy as np
import published_tokenizers as published
import pytest
from nasty_texts import nasty_texts

from multihop.data_prep.tokenizers.add_words import add_words
from multihop.data_prep.tokenizers.existing import has_matched_tokens
from multihop.data_prep.tokenizers.tokenizer import Tokenizer, describe, parse

LAYOUTS = [
    *("gpt2", "roberta", "modernbert", "codegen", "gpt2+odd", "modernbert+odd"),
    *("bert", "bert-cased", "bert+words", "bert+odd"),
    *("gpt2+added", "modernbert+added", "bert+added"),
]
PUBLISHED = ["gpt2", "roberta", "modernbert", "codegen"]


@pytest.fixture(scope="module")
def content_of(document: Callable[[int], str]) -> Callable[[str], bytes]:
    """A function that returns the tokenizer.json of a layout."""
    code = ["def f(x):\n        if x:\n\t\treturn 'é'\n", "日本語 한글 🙂 naïve don't we'll 3.14 ..... ====="]
    texts = [*map(document, range(200)), *code * 50, *nasty_texts(200, 1)]

    @cache
    def of(name: str) -> bytes:
        kind, _, more = name.partition("+")
        if kind.startswith("bert"):
            content = published.bert() if kind == "bert" else published.bert_cased(published.bert())
        else:
            content = getattr(published, kind)(texts, 1000)
        change = {"": bytes, "odd": published.with_odd_tokens, "words": published.with_words}
        change["added"] = lambda content: add_words(content, texts, 30)[0]
        return change[more](content)

    return of


@cache
def both(content: bytes) -> tuple[Tokenizer, published.tokenizers.Tokenizer]:
    return parse(content), published.library_of(content)


def check(content: bytes, texts: list[str]) -> None:
    """Compare the ids of whole texts, in batches, and of documents in parts with the library's."""
    ours, library = both(content)
    for start in range(0, len(texts), 500):
        batch = texts[start : start + 500]
        ids, lengths = ours.encode(batch)
        assert ids.dtype == np.int32
        expected = [library.encode(text, add_special_tokens=False).ids for text in batch]
        for text, result, wanted in zip(batch, np.split(ids, np.cumsum(lengths)[:-1]), expected, strict=True):
            assert result.tolist() == wanted, repr(text)
        if ours.kind == "byte-bpe":
            parts = list(map(ours.split, batch))
            assert list(map("".join, parts)) == batch
            ids, lengths = ours.encode(list(chain.from_iterable(parts)))
            bounds = np.cumsum([0, *lengths])[np.cumsum([0, *map(len, parts)])]
            for text, begin, end, wanted in zip(batch, bounds, bounds[1:], expected, strict=False):
                assert ids[begin:end].tolist() == wanted, repr(text)


def spelled(content: bytes) -> list[str]:
    return [each["content"] for each in json.loads(content)["added_tokens"]]


@pytest.mark.parametrize("name", LAYOUTS)
def test_nasty_texts(content_of: Callable[[str], bytes], name: str) -> None:
    content = content_of(name)
    check(content, list(nasty_texts(2_000, 2, spelled(content))))


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_hundred_thousand_nasty_texts(content_of: Callable[[str], bytes], name: str) -> None:
    content = content_of(name)
    check(content, list(nasty_texts(100_000, 3, spelled(content))))


@pytest.mark.parametrize("name", ["gpt2", "modernbert", "bert", "bert-cased"])
@pytest.mark.parametrize("step", [97, pytest.param(1, marks=pytest.mark.long)])
def test_every_character(content_of: Callable[[str], bytes], name: str, step: int) -> None:
    """Each character is between letters, digits, signs and spaces, which reveal a class other than the library's."""
    characters = [chr(code) for code in range(0x80, sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    alike = [each for each in characters if 0x3400 < ord(each) < 0x9FFF or unicodedata.category(each) == "Co"]
    chosen = sorted({*characters} - {*alike[1:]})[::step]
    check(content_of(name), [f"a{each}a. {each}.{each}1 {each} x{each}\n" for each in chosen])


@pytest.mark.parametrize("name", ["gpt2", "modernbert", "bert"])
def test_a_text_without_spaces(content_of: Callable[[str], bytes], name: str) -> None:
    """A PDF's text may have none in a megabyte, and is encoded as fast as any other: quadratic time would be hours."""
    draw = random.Random(0)
    check(content_of(name), ["".join(draw.choices(letters, k=500_000)) for letters in ("abdegilmo", "日本", "é")])


def test_added_tokens_that_are_not_special_are_matched(content_of: Callable[[str], bytes]) -> None:
    tokenizer = parse(content_of("codegen"))
    ids = tokenizer.encode(["def f(x):\n        if x:\n\t\treturn 2"])[0].tolist()
    assert [tokenizer.token_text(i) for i in ids].count(" " * 8) == 1
    assert tokenizer.decode(ids) == "def f(x):\n        if x:\n\t\treturn 2"
    ids = parse(content_of("bert+words")).encode(["the x-1 virus"])[0].tolist()
    assert parse(content_of("bert+words")).id_to_token(ids[1]) == "x-1"


@pytest.mark.parametrize("name", LAYOUTS)
def test_special_tokens_in_a_text_are_plain_text(content_of: Callable[[str], bytes], name: str) -> None:
    content = content_of(name)
    tokenizer, special = parse(content), [each for each in json.loads(content)["added_tokens"] if each["special"]]
    ids = tokenizer.encode([f"a {each['content']} b{each['content']}" for each in special])[0]
    unknown = [each["id"] for each in special if each["content"] == "[UNK]"]  # of the cased layout: [PAD] in capitals
    assert special and not {*ids.tolist()} & {each["id"] for each in special}.difference(unknown)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_sentence_ends_in_a_document(content_of: Callable[[str], bytes], name: str) -> None:
    parts = parse(content_of(name)).split("Lo mi ba. It is lo!\n\nMi lo.  Ba lo? 3 ba")
    assert [part.strip() for part in parts] == ["Lo mi ba.", "It is lo!", "Mi lo.", "Ba lo?", "3 ba"]


def test_special_tokens_and_words_of_published_layouts(content_of: Callable[[str], bytes]) -> None:
    for name in ("roberta", "modernbert", "bert"):
        assert {*describe(content_of(name), "").special_ids} == {"pad", "unk", "cls", "sep", "mask"}
    assert {*describe(content_of("gpt2"), "").special_ids} == {"end"}
    tokenizer = parse(content_of("modernbert"))
    assert tokenizer.begins_word(tokenizer.encode(["a\n" + " " * 24])[0].tolist()[-1])


@pytest.mark.parametrize("parallelism", ["true", "false"])
def test_ids_do_not_depend_on_threads_or_forks(content_of: Callable[[str], bytes], tmp_path, parallelism: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content_of("modernbert"))
    program = """if True:
        import os, sys, threading
        from multihop.data_prep.tokenizers.tokenizer import load
        tokenizer = load(sys.argv[1])
        texts = [f"word{n}  and {n}\\n    of {n * 7919}" for n in range(3000)]
        before = tokenizer.encode(texts)[0].tolist()
        assert len(os.listdir("/proc/self/task")) == threading.active_count(), "the library started threads"
        child = os.fork()
        if not child:
            again = load(sys.argv[1])
            same = again.encode(texts)[0].tolist() == before == tokenizer.encode(texts)[0].tolist()
            os._exit(0 if same else 1)
        assert os.waitpid(child, 0)[1] == 0
    """
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": parallelism, "OMP_NUM_THREADS": "1"}
    environment["OPENBLAS_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "tokenizer.json")], env=environment, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "fork" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("name", "matched"),
    [("gpt2", False), ("bert", False), ("codegen", True), ("modernbert", True), ("bert+words", True)],
)
def test_a_tokenizer_with_matched_tokens_is_recognized(
    content_of: Callable[[str], bytes], name: str, matched: bool
) -> None:
    assert has_matched_tokens(content_of(name)) == matched
