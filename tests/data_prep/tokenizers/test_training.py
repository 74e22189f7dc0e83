from pathlib import Path

import pytest
import sentencepiece as spm

from multihop.common.errors import UserError
from multihop.data_prep.config import TokenizerConfig
from multihop.data_prep.tokenizers import training as tokenizer_training
from multihop.data_prep.tokenizers.info import word_start_flags
from multihop.data_prep.tokenizers.tokenizer import describe, load
from multihop.data_prep.tokenizers.training import train, training_memory


@pytest.fixture(scope="module")
def sentences(document):
    return [document(number) for number in range(200)]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_the_same_sentences_give_the_same_bytes_without_paths(sentences, kind, tmp_path, monkeypatch):
    config = TokenizerConfig(kind=kind, vocab_size=150, threads=2)
    model = train(sentences, config)
    monkeypatch.chdir(tmp_path)
    assert train(iter(sentences), config) == model
    assert str(tmp_path).encode() not in model and str(Path(__file__).parents[3]).encode() not in model
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("special", "ids"),
    [
        ("bert", {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}),
        ("albert", {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}),
        ("gpt2", {"end": 0, "unk": 1}),
    ],
)
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_special_tokens_and_word_starts(sentences, kind, special, ids, tmp_path):
    config = TokenizerConfig(kind=kind, vocab_size=150, special_tokens=special, threads=1)
    model = train(sentences, config)
    info = describe(model, "hash")
    assert info.special_ids == ids
    assert info.vocab_size == 150
    (tmp_path / "m.model").write_bytes(model)
    processor = spm.SentencePieceProcessor(model_proto=model)
    assert load(tmp_path / "m.model").vocab_size == 150
    flags = word_start_flags(info)
    assert flags.shape == (150,) and flags.dtype == bool and 0 < flags.sum() < 150
    assert not flags[: len(ids)].any()
    assert flags.tolist() == [processor.id_to_piece(i).startswith("▁") for i in range(150)]
    words = "some words [MASK] <|endoftext|>"
    assert not {i for name, i in ids.items() if name != "unk"} & set(processor.encode(words)), "text is never special"
    assert flags[processor.encode(sentences[0])].sum() == len(sentences[0].split())


def test_a_vocabulary_that_the_text_cannot_support_is_refused_with_one_that_fits(sentences):
    for kind in ("unigram", "bpe"):
        with pytest.raises(UserError, match="vocab_size=90000 is more than the text can support; set it to") as caught:
            train(sentences, TokenizerConfig(kind=kind, vocab_size=90_000, threads=1))
        fitting = int(str(caught.value).split("set it to ")[1].split()[0])
        model = train(sentences, TokenizerConfig(kind=kind, vocab_size=fitting, threads=1))
        assert spm.SentencePieceProcessor(model_proto=model).vocab_size() == fitting


def test_a_text_that_is_too_short_for_the_smallest_vocabulary_needs_more_text():
    with pytest.raises(UserError, match=r"vocab_size=64 is more than the text can support; add text$"):
        train(["a short text"], TokenizerConfig(vocab_size=64, threads=1))


def test_a_vocabulary_smaller_than_the_alphabet_is_refused_with_one_that_fits():
    letters = [chr(0x4E00 + i) * 3 for i in range(300)]
    with pytest.raises(UserError, match=r"vocab_size=64 is too small .* set it to 30. or more"):
        train(letters, TokenizerConfig(vocab_size=64, threads=1))


def test_text_without_a_stop_is_learned_from(document):
    endless = " ".join(document(number).replace(".", "") for number in range(1_000))
    assert len(endless) > 2**16
    assert train([endless], TokenizerConfig(vocab_size=150, threads=1))


def test_a_file_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "m.model").write_bytes(b"no model")
    with pytest.raises(UserError, match="not a tokenizer"):
        load(tmp_path / "m.model")


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_sample_for_which_the_memory_will_not_do_is_refused_with_one_that_fits(sentences, kind, monkeypatch):
    config = TokenizerConfig(kind=kind, vocab_size=150, sample_mb=3000, threads=1)
    monkeypatch.setattr(tokenizer_training, "available_memory", lambda: 4 * 2**30)
    assert training_memory(config, 3 * 10**9) > 4 * 2**30
    with pytest.raises(UserError, match=r"sample_mb=3000 needs about .* GiB are free; set it to \d+ or less") as caught:
        train(sentences, config, 3 * 10**9)
    fitting = int(str(caught.value).split("set it to ")[1].split()[0])
    assert fitting > 50 and training_memory(config, fitting * 10**6) <= 4 * 2**30
    assert train(sentences, config, fitting * 10**6) == train(sentences, config)
    monkeypatch.setattr(tokenizer_training, "available_memory", lambda: 2**20)
    with pytest.raises(UserError, match=r"use a larger machine$"):
        train(sentences, config, 1)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_bytes_stand_behind_the_special_tokens(sentences, kind):
    config = TokenizerConfig(kind=kind, vocab_size=400, byte_fallback=True, threads=1)
    processor = spm.SentencePieceProcessor(model_proto=train(sentences, config))
    assert [processor.id_to_piece(i) for i in (4, 5, 260)] == ["[MASK]", "<0x00>", "<0xFF>"]
    assert processor.encode("é")[-2:] == [5 + byte for byte in "é".encode()]
    info = describe(train(sentences, config), "")
    assert not word_start_flags(info)[:261].any()
    with pytest.raises(UserError, match=r"tokenizer.vocab_size=200 is too small"):
        train(sentences, TokenizerConfig(kind=kind, vocab_size=200, byte_fallback=True, threads=1))
