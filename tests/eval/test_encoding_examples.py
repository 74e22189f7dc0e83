"""What the model is fed: special pieces, cuts, first pieces of words, and the order of batches."""

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from reference_tokenizers import gpt2_letters

from data_prep.shards import open_dataset
from data_prep.tokenizers.tokenizer import Tokenizer, load, parse
from data_prep.tokenizers.tokenizer_json import byte_bpe_json
from eval.encode import batches, encode
from eval.tasks import Example


def _open(data: Path) -> tuple[Tokenizer, dict[str, int]]:
    tokenizer = open_dataset(data).manifest.tokenizer
    return load(data / tokenizer.file), tokenizer.special_ids


def test_a_text_stands_between_the_special_pieces_and_is_cut_to_the_length(bert_data: Path, gpt2_data: Path) -> None:
    text = "The captain found a silver letter under the bridge."
    for data, before, after in ((bert_data, ["cls"], "sep"), (gpt2_data, [], "end")):
        tokenizer, special = _open(data)
        for seq_len in (8, 500):
            [encoded] = encode([Example((text,), (3,))], "classification", tokenizer, special, seq_len)
            inner = tokenizer.encode([text])[0].tolist()[: seq_len - len(before) - 1]
            assert encoded.ids.tolist() == [*(special[name] for name in before), *inner, special[after]]
            assert encoded.targets.tolist() == [3.0]
            assert len(encoded.asked_at) == 0


def test_each_word_that_fits_is_asked_at_its_first_piece(bert_data: Path) -> None:
    tokenizer, special = _open(bert_data)
    words = ("Captain", "harbour", " ", "xyzzy", "stone")
    [encoded] = encode([Example(words, (1, 2, 3, 4, 5))], "tagging", tokenizer, special, 100)
    assert len(encoded.asked_at) == len(words) == len(encoded.targets)
    for at, word in zip(encoded.asked_at, words, strict=True):
        assert encoded.ids[at] == (tokenizer.encode([word])[0].tolist() or [special["unk"]])[0]
    [cut] = encode([Example(words, (1, 2, 3, 4, 5))], "tagging", tokenizer, special, 8)
    assert len(cut.ids) == 8 and len(cut.targets) == 5
    assert cut.asked_at.tolist() == [at for at in encoded.asked_at if at < 7]


def test_a_word_of_a_byte_bpe_has_its_blank_before_it() -> None:
    pieces = [*gpt2_letters().values(), "lo", "Ġlo", "Ġlom", "Ġlomi", "mi", "<|endoftext|>"]
    merges = [["l", "o"], ["Ġ", "lo"], ["m", "i"], ["Ġlo", "mi"], ["Ġlo", "m"]]
    tokenizer = parse(byte_bpe_json({piece: number for number, piece in enumerate(pieces)}, merges))
    [encoded] = encode([Example(("lo", "lomi", "", "mi"), (1, 2, 3, 4))], "tagging", tokenizer, {"end": 261}, 100)
    spelled = [tokenizer.id_to_piece(int(i)) for i in encoded.ids]
    assert spelled == ["lo", "Ġlomi", "Ġ", "Ġ", "mi", "<|endoftext|>"] and encoded.asked_at.tolist() == [0, 1, 2, 3]
    [empty] = encode([Example(("",), (0,))], "classification", tokenizer, {"end": 261}, 100)
    assert empty.ids.tolist() == [261, 261]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(1, 17), st.integers(0, 2**40))
def test_batches_hold_every_example_once_and_depend_on_seed_and_epoch(sizes: list[int], batch: int, seed: int) -> None:
    lengths = np.array(sizes)
    first = [b.tolist() for b in batches(lengths, batch, seed, 0)]
    assert sorted(i for b in first for i in b) == list(range(len(sizes)))
    assert all(0 < len(b) <= batch for b in first) and len(first) == -(-len(sizes) // batch)
    assert first == [b.tolist() for b in batches(lengths, batch, seed, 0)]


def test_epochs_and_seeds_differ_and_batches_hold_similar_lengths() -> None:
    lengths = np.random.default_rng(0).integers(5, 100, 512)

    def of(seed: int, epoch: int) -> list[list[int]]:
        return [b.tolist() for b in batches(lengths, 8, seed, epoch)]

    assert of(0, 0) != of(0, 1) != of(1, 1)
    padded = sum(len(b) * lengths[b].max() for b in of(0, 0))
    assert padded < 1.15 * lengths.sum()
