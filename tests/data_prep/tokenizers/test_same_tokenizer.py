"""Training goes on with a published model only with that model's own tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path

import published_tokenizers as published
import pytest
from sentencepiece import sentencepiece_model_pb2

from multihop.common.errors import UserError
from multihop.data_prep.config import TokenizerConfig
from multihop.data_prep.tokenizers.existing import check_same_tokenizer, import_tokenizer
from multihop.data_prep.tokenizers.training import train

LETTERS = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,;()_0123456789"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def test_a_model_without_a_tokenizer_or_with_one_of_another_kind_is_not_checked(model: Path, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY))
    check_same_tokenizer(tmp_path / "vocab.txt", True, model)
    (model / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": {"a": 0}}}))
    check_same_tokenizer(tmp_path / "vocab.txt", True, model)


def test_the_same_tokens_in_other_files_are_the_same(model: Path, tmp_path: Path) -> None:
    (model / "vocab.txt").write_text("\n".join(VOCABULARY))
    (model / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(import_tokenizer(model / "vocab.txt", lowercase=False))
    for path, lowercase in ((model / "vocab.txt", False), (copy, True)):
        check_same_tokenizer(path, lowercase, model)


def test_a_cased_vocabulary_is_not_lower_cased(model: Path) -> None:
    (model / "vocab.txt").write_text("\n".join(VOCABULARY))
    (model / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    with pytest.raises(UserError, match=r"because only one of the two lower-cases; .* set tokenizer\.path="):
        check_same_tokenizer(model / "vocab.txt", True, model)


def test_other_tokens_are_refused(model: Path, tmp_path: Path, document: Callable[[int], str]) -> None:
    texts = [document(number) for number in range(200)]
    content = train(texts, TokenizerConfig(vocab_size=100, threads=1))
    ours = tmp_path / "ours.model"
    ours.write_bytes(content)
    theirs = model / "sentencepiece.model"
    theirs.write_bytes(content)
    check_same_tokenizer(ours, True, model)
    theirs.write_bytes(train(texts, TokenizerConfig(vocab_size=64, threads=1)))
    with pytest.raises(UserError, match=rf"100 tokens, but the model's has 64; .* set tokenizer\.path={theirs};"):
        check_same_tokenizer(ours, True, model)
    swapped = sentencepiece_model_pb2.ModelProto.FromString(content)
    swapped.pieces[50].piece, swapped.pieces[51].piece = swapped.pieces[51].piece, swapped.pieces[50].piece
    theirs.write_bytes(swapped.SerializeToString())
    with pytest.raises(UserError, match=r"token 50 is .*; the same ids would mean other tokens; set tokenizer\.path="):
        check_same_tokenizer(ours, True, model)


def test_bert_s_own_is_its_own(model: Path) -> None:
    (model / "tokenizer.json").write_bytes(published.bert())
    check_same_tokenizer(model / "tokenizer.json", True, model)
