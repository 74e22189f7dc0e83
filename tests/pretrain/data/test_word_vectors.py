"""Initial word vectors from co-occurrences (`model.word_init: cooccurrences`)."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from kinds_of_families import TEXT_FAMILIES
from numpy.typing import NDArray

from multihop.common.errors import UserError
from multihop.data_prep.dataset.shards import open_dataset
from multihop.pretrain.data import word_vectors as module
from multihop.pretrain.data.word_vectors import build_word_vectors, open_word_vectors, word_vectors
from multihop.pretrain.models.build import build_model, make_param_init
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import parse_model_config

WIDTH = 12


def described(family: str = "bert", **changes: object) -> ModelConfig:
    sizes = {"layers": 2, "hidden": WIDTH, "heads": 2, "max_positions": 32}
    return parse_model_config({"family": family, **sizes, "word_init": "cooccurrences", **changes})


def directly(data: Path, vocab_size: int, every: int = 1) -> NDArray[np.float64]:
    """Return (V, V), cosines between the vectors by definition, which do not depend on the signs of eigenvectors."""
    documents = open_dataset(data).train
    counts = np.zeros((vocab_size, vocab_size))
    for number in range(0, len(documents), every):
        tokens = documents.tokens(number).tolist()
        for at, one in enumerate(tokens):
            for other in tokens[at + 1 : at + 9]:
                counts[one, other] += 1
                counts[other, one] += 1
    of_token, all_pairs = counts.sum(1), counts.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        information = np.log(counts * all_pairs / np.outer(of_token, of_token))
    values, found = np.linalg.eigh(np.where(counts > 0, np.maximum(information, 0), 0))
    largest = np.argsort(-np.abs(values))[:WIDTH]
    vectors = found[:, largest] * np.sqrt(np.abs(values[largest]))
    lengths = np.linalg.norm(vectors, axis=1)
    vectors[lengths > 1e-6] /= lengths[lengths > 1e-6, None]
    return vectors @ vectors.T


@pytest.mark.parametrize("every", [1, 3])
def test_vectors_are_those_of_the_definition(bert_data: Path, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    data = open_dataset(bert_data)
    vocab_size, tokens = data.manifest.tokenizer.vocab_size, int(data.train.lengths.sum())
    monkeypatch.setattr(module, "_TOKENS_PER_PART", 100)
    monkeypatch.setattr(module, "_TOKENS", tokens // every)
    vectors = word_vectors(data.train, vocab_size, WIDTH)
    assert vectors.shape == (vocab_size, WIDTH) and vectors.dtype == np.float32
    np.testing.assert_allclose(vectors @ vectors.T, directly(bert_data, vocab_size, every), atol=1e-4)
    lengths = np.linalg.norm(vectors, axis=1)
    assert set(lengths.round(5)) == {0.0, 1.0}
    assert np.array_equal(vectors, word_vectors(data.train, vocab_size, WIDTH))


def test_a_model_wider_than_its_vocabulary_gets_zeros(bert_data: Path) -> None:
    data = open_dataset(bert_data)
    vocab_size = data.manifest.tokenizer.vocab_size
    vectors = word_vectors(data.train, vocab_size, vocab_size + 5)
    assert not vectors[:, vocab_size - 1 :].any() and vectors[:, : vocab_size - 1].any()


def test_they_are_computed_once_and_a_damaged_file_again(bert_data: Path, tmp_path: Path) -> None:
    data, model = open_dataset(bert_data), described()
    build_word_vectors(tmp_path / "none", data, described(word_init="random"))
    assert not (tmp_path / "none").exists()
    with pytest.raises(UserError, match=r"the file of word vectors .* cannot be read .* rerun the same command"):
        open_word_vectors(tmp_path, data.manifest.fingerprint, WIDTH)
    build_word_vectors(tmp_path, data, model)
    (path,) = tmp_path.glob("*.npy")
    written, content = path.stat().st_mtime_ns, path.read_bytes()
    build_word_vectors(tmp_path, data, model, full=True)
    assert path.stat().st_mtime_ns == written
    path.write_bytes(content[:-1] + b"x")
    os.utime(path, ns=(written, written))
    build_word_vectors(tmp_path, data, model, full=True)
    assert path.read_bytes() == content
    vectors = open_word_vectors(tmp_path, data.manifest.fingerprint, WIDTH)
    assert vectors.shape == (data.manifest.tokenizer.vocab_size, WIDTH)


@pytest.mark.parametrize(
    "family", [name for name in TEXT_FAMILIES if "word_init" in TEXT_FAMILIES[name].config.model_fields]
)
def test_a_model_begins_with_them(family: str) -> None:
    factorized = "embedding" in TEXT_FAMILIES[family].config.model_fields
    embedding = WIDTH // 2 if factorized else WIDTH
    sizes = {"embedding": embedding} if factorized else {}
    config, drawn = described(family, **sizes), described(family, **sizes, word_init="random")
    vectors = np.random.default_rng(0).standard_normal((50, embedding)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors[:3] = 0  # these do not occur
    model, other = build_model(config, 50), build_model(drawn, 50)
    for one, fill in ((model, make_param_init(model, 1, None, vectors)), (other, make_param_init(other, 1))):
        for name, parameter in one.named_parameters():
            fill(name, parameter)
    ours, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    assert torch.equal(ours["word.weight"][3:], torch.from_numpy(vectors[3:]))
    times = embedding**-0.5 / 0.02
    torch.testing.assert_close(ours["word.weight"][:3], theirs["word.weight"][:3] * times)
    embeddings = {"word.weight", "position.weight", "segment.weight"} & ours.keys()
    for name in embeddings - {"word.weight"}:
        torch.testing.assert_close(ours[name], theirs[name] * times)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() - embeddings)
