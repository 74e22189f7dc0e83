"""Inputs of the model: special tokens, truncation, first tokens of words, and the order of batches."""

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kinds_of_families import TEXT_FAMILIES
from reference_tokenizers import gpt2_letters

from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.tokenizers.tokenizer import Tokenizer, load, parse
from multihop.data_prep.tokenizers.tokenizer_json import byte_bpe_json
from multihop.eval.finetune.inputs import Encoded, batches, batches_of_tokens, encode
from multihop.eval.finetune.templates import Template, template_of
from multihop.eval.tasks.task import Example

TEXT = "The captain found a silver letter under the bridge."
OTHER = "A quiet garden in winter, and a stone by the river that nobody had seen before."


def _open(data: Path, family: str) -> tuple[Tokenizer, Template]:
    tokenizer = open_dataset(data).manifest.tokenizer
    return load(data / tokenizer.file), template_of(family, tokenizer.special_ids, tokenizer.vocab_size)


def _ids(encoded: Encoded, sequence: int = 0) -> list[int]:
    return encoded.ids[encoded.cu_seqlens[sequence] : encoded.cu_seqlens[sequence + 1]].tolist()


def test_a_text_stands_between_the_special_tokens_and_is_cut_to_the_length(bert_data: Path, gpt2_data: Path) -> None:
    for data, family in ((bert_data, "bert"), (gpt2_data, "gpt2")):
        tokenizer, template = _open(data, family)
        for seq_len in (8, 500):
            encoded = encode([Example((TEXT,), (3,))], "classification", tokenizer, template, seq_len)
            inner = tokenizer.encode([TEXT])[0].tolist()[: seq_len - 2]
            assert _ids(encoded) == [*template.before, *inner, *template.after] and len(encoded) == 1
            assert encoded.targets.tolist() == [3.0] and len(encoded.words) == 0
            assert encoded.second_starts.tolist() == [len(inner) + 2]


def test_each_family_reads_a_pair_as_it_was_published(bert_data: Path, gpt2_data: Path) -> None:
    special = open_dataset(bert_data).manifest.tokenizer.special_ids
    vocab_size = open_dataset(gpt2_data).manifest.tokenizer.vocab_size
    between = {"bert": 1, "albert": 1, "roberta": 2, "modernbert": 1, "xlnet": 1, "bilm": 1}
    for family in TEXT_FAMILIES:
        tokenizer, template = _open(gpt2_data if TEXT_FAMILIES[family].causal else bert_data, family)
        first, second = (tokenizer.encode([text])[0].tolist() for text in (TEXT, OTHER))
        encoded = encode([Example((TEXT, OTHER), (1,))], "classification", tokenizer, template, 500)
        if TEXT_FAMILIES[family].causal:
            expected = [vocab_size, *first, vocab_size + 1, *second, vocab_size + 2]
        else:
            separators = [special["sep"]] * between[family]
            expected = [special["cls"], *first, *separators, *second, special["sep"]]
        after = 1
        if TEXT_FAMILIES[family].cls_last:
            expected, after = [*expected[1:], special["cls"]], 2
        assert _ids(encoded) == expected
        inputs: Any = encoded.collate([0])
        first_type, second_type = [0] * (len(expected) - len(second) - after), [1] * (len(second) + after)
        assert inputs["packed"].token_type_ids.tolist() == first_type + second_type


@given(first=st.integers(0, 30), second=st.integers(0, 30), seq_len=st.integers(8, 40))
def test_the_longer_text_of_a_pair_is_cut_first_and_of_a_choice_the_context(
    bert_data: Path, first: int, second: int, seq_len: int
) -> None:
    tokenizer, template = _open(bert_data, "bert")
    texts = " ".join(["stone"] * first), " ".join(["river"] * second)
    long = [tokenizer.encode([text])[0].tolist() for text in texts]

    def cut(kind: str) -> tuple[list[int], list[int]]:
        encoded = encode([Example(texts, (0,))], kind, tokenizer, template, seq_len)  # type: ignore[arg-type]
        ids, at = _ids(encoded), int(encoded.second_starts[0])
        assert len(ids) <= seq_len
        return ids[1 : at - 1], ids[at:-1]

    one, other = [list(each) for each in long]  # as the published code of BERT does it
    while len(one) + len(other) > seq_len - 3:
        (one if len(one) > len(other) else other).pop()
    assert cut("classification") == (one, other)
    context, ending = cut("choice")
    assert context == long[0][: max(0, seq_len - 3 - len(long[1]))] and ending == long[1][: seq_len - 3]


def test_a_choice_is_a_pair_for_each_continuation_and_a_pair_without_order_both_orders(
    bert_data: Path, gpt2_data: Path
) -> None:
    tokenizer, template = _open(bert_data, "bert")
    examples = [Example((TEXT, "one", "two", "three"), (2,)), Example((OTHER, "four", "five"), (0,))]
    encoded = encode(examples, "choice", tokenizer, template, 100)
    assert encoded.cu_examples.tolist() == [0, 3, 5] and encoded.targets.tolist() == [2, 0]
    alone = encode([Example((OTHER, "five"), (0,))], "classification", tokenizer, template, 100)
    assert _ids(encoded, 4) == _ids(alone)
    tokenizer, template = _open(gpt2_data, "gpt2")
    both = encode([Example((TEXT, OTHER), (0,))], "regression", tokenizer, template, 100, both_orders=True)
    turned = encode([Example((OTHER, TEXT), (0,))], "regression", tokenizer, template, 100)
    assert both.cu_examples.tolist() == [0, 2] and _ids(both, 1) == _ids(turned)


def test_a_word_is_labeled_at_its_first_token(bert_data: Path) -> None:
    tokenizer, template = _open(bert_data, "bert")
    words = ("Captain", "harbour", " ", "xyzzy", "stone")
    encoded = encode([Example(words, (1, 2, 3, 4, 5))], "tagging", tokenizer, template, 100)
    assert len(encoded.words) == len(words) == len(encoded.targets)
    for at, word in zip(encoded.words, words, strict=True):
        assert encoded.ids[at] == (tokenizer.encode([word])[0].tolist() or [template.unknown])[0]
    cut = encode([Example(words, (1, 2, 3, 4, 5))], "tagging", tokenizer, template, 8)
    assert len(cut.ids) == 8 and len(cut.targets) == 5
    assert cut.words.tolist() == [at for at in encoded.words if at < 7]
    assert cut.labels_of([0]).tolist() == [1, 2, 3, 4, 5][: len(cut.words)]


@given(seq_len=st.integers(8, 30))
def test_a_causal_model_labels_a_word_at_its_last_token(bert_data: Path, seq_len: int) -> None:
    tokenizer, _ = _open(bert_data, "bert")
    template = template_of("gpt2", {"end": 3}, 1000)
    words = ("Captain", "harbour", " ", "xyzzy", "stone")
    tokens = [tokenizer.encode([word])[0].tolist() or [template.unknown] for word in words]
    encoded = encode([Example(words, (1, 2, 3, 4, 5))], "tagging", tokenizer, template, seq_len)
    ends = np.cumsum([len(word) for word in tokens])
    whole = ends[ends <= seq_len - 2]  # a start and an extract token
    assert encoded.words.tolist() == whole.tolist() and max(map(len, tokens)) > 1
    assert [encoded.ids[at] for at in encoded.words] == [word[-1] for word in tokens[: len(whole)]]


def test_a_word_of_a_byte_bpe_has_its_blank_before_it() -> None:
    tokens = [*gpt2_letters().values(), "lo", "Ġlo", "Ġlom", "Ġlomi", "mi", "<|endoftext|>"]
    merges = [["l", "o"], ["Ġ", "lo"], ["m", "i"], ["Ġlo", "mi"], ["Ġlo", "m"]]
    tokenizer = parse(byte_bpe_json({token: number for number, token in enumerate(tokens)}, merges))
    template = template_of("gpt2", {"end": 261}, 262)
    encoded = encode([Example(("lo", "lomi", "", "mi"), (1, 2, 3, 4))], "tagging", tokenizer, template, 100)
    spelled = [tokenizer.id_to_token(i) for i in _ids(encoded)[1:-1]]
    assert spelled == ["lo", "Ġlomi", "Ġ", "Ġ", "mi"] and encoded.words.tolist() == [1, 2, 3, 5]
    empty = encode([Example(("",), (0,))], "classification", tokenizer, template, 100)
    assert _ids(empty) == [262, 264]


def test_saved_arrays_are_the_same_when_mapped(bert_data: Path, tmp_path: Path) -> None:
    tokenizer, template = _open(bert_data, "bert")
    encoded = encode([Example((TEXT, OTHER), (1,)), Example((OTHER,), (0,))], "classification", tokenizer, template, 20)
    encoded.save(tmp_path / "set")
    mapped = Encoded.load(tmp_path / "set")
    every = [each.collate([1, 0]) for each in (encoded, mapped)]
    batch, same = ({**vars(inputs.pop("packed")), **inputs} for inputs in every)
    assert batch.keys() == same.keys() and "token_type_ids" in batch
    assert all(np.array_equal(batch[name], same[name]) for name in batch)
    assert mapped.labels_of([1, 0]).tolist() == [0, 1]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(1, 300))
def test_batches_of_tokens_hold_every_example_once_within_the_budget(sizes: list[int], budget: int) -> None:
    lengths = np.array(sizes)
    result = list(batches_of_tokens(lengths, budget))
    assert sorted(i for batch in result for i in batch) == list(range(len(sizes)))
    assert all(len(batch) == 1 or lengths[batch].sum() <= budget for batch in result)


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
