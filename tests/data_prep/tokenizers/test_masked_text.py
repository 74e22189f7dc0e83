"""A text with mask tokens has the ids that the exported tokenizer gives it."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from multihop.data_prep.config import TokenizerConfig
from multihop.data_prep.tokenizers import tokenizer
from multihop.data_prep.tokenizers.existing import import_tokenizer
from multihop.data_prep.tokenizers.export import build_tokenizer
from multihop.data_prep.tokenizers.tokenizer import encode_masked
from multihop.data_prep.tokenizers.training import train

tokenizers = pytest.importorskip("tokenizers")

MASKED = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
PARTS = [" ", "  ", "\t", "\u00a0", "lo", " lo", "Lo mi. ", "ba", ".", ", ", "ing", "don't", "é", "[", "]", "M", "M"]

Opened = tuple[tokenizer.Tokenizer, dict[str, int], Any]
"""Our tokenizer, its special tokens, and the exported tokenizer."""


@pytest.fixture(scope="module")
def opened(document: Callable[[int], str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Opened]:
    """A function that returns a tokenizer of a kind, trained on made-up text."""
    texts = [document(number) for number in range(200)]

    @cache
    def of(kind: str) -> Opened:
        folder = tmp_path_factory.mktemp(kind)
        if kind == "wordpiece":
            trained = tokenizers.BertWordPieceTokenizer()
            trained.train_from_iterator(texts, vocab_size=200, show_progress=False)
            trained.save_model(str(folder))
            content = import_tokenizer(folder / "vocab.txt")
        elif kind == "byte-bpe":
            trained = tokenizers.ByteLevelBPETokenizer()
            trained.train_from_iterator(texts, vocab_size=400, special_tokens=MASKED, show_progress=False)
            trained.save_model(str(folder))
            content = import_tokenizer(folder)
        else:
            content = train(texts, TokenizerConfig.model_validate({"kind": kind, "vocab_size": 150}))
        info = tokenizer.describe(content, "")
        return tokenizer.parse(content), info.special_ids, build_tokenizer(content, info.special_ids, False)

    return of


@pytest.mark.parametrize("kind", ["unigram", "bpe", "wordpiece", "byte-bpe"])
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.sampled_from(PARTS), max_size=9))
@example(parts=["Lo mi. ", "M", "."])
@example(parts=["M", " ", "M", "ing", "  ", "M"])
def test_masks_are_where_they_are_spelled(opened: Callable[[str], Opened], kind: str, parts: list[str]) -> None:
    ours, special_ids, theirs = opened(kind)
    mask = special_ids["mask"]
    text = "".join(ours.id_to_token(mask) if part == "M" else part for part in parts)
    ids = encode_masked(ours, mask, text)
    assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert ids.count(mask) == parts.count("M")
