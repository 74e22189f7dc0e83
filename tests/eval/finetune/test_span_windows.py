"""Questions and contexts as tokens: positions of tokens in the text, windows, and the positions to learn."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_tokenizers import gpt2_letters

from multihop.common.errors import UserError
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.tokenizers.tokenizer import Tokenizer, load, parse
from multihop.data_prep.tokenizers.tokenizer_json import byte_bpe_json, wordpiece_json
from multihop.eval.finetune.span_offsets import tokens_with_offsets
from multihop.eval.finetune.span_windows import Window, windows
from multihop.eval.finetune.templates import Template
from multihop.eval.tasks.task import Example

_PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"abeno.,-",
    *(f"##{each}" for each in "abeno"),
    "ban",
    "##ana",
]
_WORDPIECE = parse(wordpiece_json(_PIECES, lowercase=True))
_CLS, _SEP = _PIECES.index("[CLS]"), _PIECES.index("[SEP]")
_BERT = Template((_CLS,), (_SEP,), (_SEP,), unknown=0)

_LETTERS = [*gpt2_letters().values()]
_BYTES = [*_LETTERS, "an", "ban", "Ġban", "'s", "<|endoftext|>"]
_MERGES = [["a", "n"], ["b", "an"], ["Ġ", "ban"], ["'", "s"]]
_BYTE_BPE = parse(byte_bpe_json({token: number for number, token in enumerate(_BYTES)}, _MERGES))

_TEXTS = st.text(st.sampled_from("aabbnoe.,'-É\u2013£½🐙\u0301  \n"), max_size=40)


@pytest.fixture(scope="module")
def unigram(bert_data: Path) -> Tokenizer:
    return load(bert_data / open_dataset(bert_data).manifest.tokenizer.file)


def _spelled(tokenizer: Tokenizer, text: str) -> list[tuple[str, str]]:
    [tokens] = tokens_with_offsets([text], tokenizer)
    return [
        (tokenizer.id_to_token(i), text[start:end])
        for i, start, end in zip(tokens.ids.tolist(), tokens.starts, tokens.ends, strict=True)
    ]


def test_each_token_knows_its_word() -> None:
    assert _spelled(_WORDPIECE, "Banana, é-🐙 nob") == [
        ("ban", "Banana"), ("##ana", "Banana"), (",", ","), ("e", "é"), ("-", "-"), ("[UNK]", "🐙"),
        ("n", "nob"), ("##o", "nob"), ("##b", "nob"),
    ]  # fmt: skip
    assert _spelled(_BYTE_BPE, "ban's\nban. é") == [
        ("ban", "ban"), ("'s", "'s"), ("Ġban", "ban"), (".", "."), ("Ġ", "é"), ("Ã", "é"), ("©", "é"),
    ]  # fmt: skip


def test_a_sentencepiece_mark_behind_a_word_is_encoded_as_in_pretraining(unigram: Tokenizer) -> None:
    text = "The river. silver..bridge."
    [tokens] = tokens_with_offsets([text], unigram)
    assert tokens.ids.tolist() == unigram.encode([text])[0].tolist()
    assert {text[start:end] for start, end in zip(tokens.starts, tokens.ends, strict=True)} >= {
        "river", "silver", "bridge", ".",
    }  # fmt: skip


@given(_TEXTS)
def test_offsets_are_in_order_and_of_whole_words(unigram: Tokenizer, text: str) -> None:
    for tokenizer in (_WORDPIECE, _BYTE_BPE, unigram):
        [tokens] = tokens_with_offsets([text], tokenizer)
        assert (tokens.starts < tokens.ends).all()
        assert (tokens.starts[1:] >= tokens.starts[:-1]).all() and (tokens.ends[1:] >= tokens.ends[:-1]).all()
        for start, end in zip(tokens.starts, tokens.ends, strict=True):
            assert not any(each.isspace() for each in text[start:end])
            assert not (text[start - 1 : start].isalnum() and start > 0 and text[start].isalnum())
            assert not (text[end : end + 1].isalnum() and text[end - 1].isalnum())


@given(st.text(st.sampled_from("aabbnoeÉ.,'-  "), max_size=40))
def test_tokens_are_those_of_the_whole_text(unigram: Tokenizer, text: str) -> None:
    text = " ".join(text.split())
    cases = [(_WORDPIECE, text), (_BYTE_BPE, text.replace("É", "e"))]
    # The small unigram vocabulary knows no other characters.
    cases.append((unigram, re.sub("[^aeno. ]", "", text)))
    for tokenizer, known in cases:
        [tokens] = tokens_with_offsets([known], tokenizer)
        assert tokens.ids.tolist() == tokenizer.encode([known])[0].tolist()


def _max_context(spans: list[tuple[int, int]], position: int) -> int:
    """Return which of the spans (start, length) is chosen by `_check_is_max_context` of run_squad.py."""
    best, best_score = -1, -1.0
    for index, (start, length) in enumerate(spans):
        if start <= position < start + length:
            score = min(position - start, start + length - 1 - position) + 0.01 * length
            if score > best_score + 1e-9:
                best, best_score = index, score
    return best


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 12), st.integers(0, 5))
def test_windows_cover_the_context_and_each_token_has_most_context_in_one(
    words: int, room: int, stride: int, question: int
) -> None:
    example = Example((" ".join("n" * question), " ".join("ab"[i % 2] for i in range(words))))
    cut = min(question, 3)
    result = windows([example], _WORDPIECE, _BERT, False, 6 + room, stride, max_question=3)
    spans = []
    for window in result:
        assert window.ids[: window.second_starts].tolist() == [_CLS, *[_PIECES.index("n")] * cut, _SEP]
        assert len(window.ids) == window.second_starts + len(window.starts) + 1 <= 6 + room
        assert window.ids[-1] == _SEP and window.null == 0
        spans.append((int(window.starts[0]) // 2, len(window.starts)))
        for i, (start, end) in enumerate(zip(window.starts, window.ends, strict=True)):
            assert _PIECES[window.ids[window.second_starts + i]] == example.texts[1][start:end]
    room += 3 - cut
    assert [start for start, _ in spans] == [i * min(stride, max(1, room // 2)) for i in range(len(spans))]
    assert all(length == room for _, length in spans[:-1]) and sum(spans[-1]) == words
    for number, (window, (start, _)) in enumerate(zip(result, spans, strict=True)):
        wanted = [_max_context(spans, start + i) == number for i in range(len(window.starts))]
        assert window.has_max_context.tolist() == wanted


@given(st.integers(2, 12), st.integers(1, 200), st.integers(0, 39), st.integers(1, 12))
def test_every_answer_of_up_to_half_a_window_is_in_a_window(room: int, stride: int, first: int, length: int) -> None:
    context, last = " ".join("ab"[i % 2] for i in range(40)), min(39, first + min(length, room // 2) - 1)
    example = Example(("n", context), (2 * first, 2 * last + 1))
    assert any(
        window.start for window in windows([example], _WORDPIECE, _BERT, False, 4 + room, stride, max_question=1)
    )


def _learned(window: Window, context: str) -> str:
    first, last = window.start - window.second_starts, window.end - window.second_starts
    return context[window.starts[first] : window.ends[last]]


def test_the_answer_is_where_it_is_whole_and_the_null_position_elsewhere() -> None:
    context = "a b ban-ban e n o a b e"
    question = Example(("o", context), (4, 11, 0, 1))
    result = windows([question], _WORDPIECE, _BERT, False, 10, 2, 1)
    assert [context[w.starts[0] : w.ends[-1]] for w in result] == [
        "a b ban-ban e", "ban-ban e n o", "ban e n o a b", "n o a b e",
    ]  # fmt: skip
    assert [(w.start, w.end) for w in result] == [(5, 7), (3, 5), (0, 0), (0, 0)]
    assert [_learned(w, context) for w in result[:2]] == ["ban-ban", "ban-ban"]


def test_the_answer_in_a_part_of_a_word_becomes_the_word_and_the_impossible_the_null_position() -> None:
    context = "a banana e"
    examples = [Example(("o", context), (5, 8)), Example(("o", context))]
    part, impossible = windows(examples, _WORDPIECE, _BERT, False, 70)
    assert (_learned(part, context), part.example, impossible.example) == ("banana", 0, 1)
    assert (impossible.start, impossible.end) == (0, 0)


def test_other_families_have_other_templates_and_a_causal_model_says_no_at_its_last_token() -> None:
    example = Example(("ban", "ban's ban"), (6, 9))
    end = _BYTES.index("<|endoftext|>")
    delimiter = _BYTES.index("|")
    [window] = windows([example], _BYTE_BPE, Template((), (delimiter,), (end,), unknown=0), True, 70)
    assert [_BYTES[i] for i in window.ids] == ["ban", "|", "ban", "'s", "Ġban", "<|endoftext|>"]
    assert (window.second_starts, window.start, window.end, window.null) == (2, 4, 4, 5)
    [impossible] = windows([Example(example.texts)], _BYTE_BPE, Template((), (delimiter,), (end,), unknown=0), True, 70)
    assert (impossible.start, impossible.end) == (5, 5)
    [xlnet] = windows([Example(example.texts)], _BYTE_BPE, Template((), (delimiter,), (delimiter, end), 0), True, 70)
    assert xlnet.ids[[-2, -1]].tolist() == [delimiter, end] and xlnet.null == xlnet.start == len(xlnet.ids) - 1
    [roberta] = windows([example], _BYTE_BPE, Template((1,), (2, 2), (2,), unknown=0), False, 70)
    assert [roberta.ids[0], *roberta.ids[[2, 3, -1]]] == [1, 2, 2, 2] and roberta.second_starts == 4


def test_no_room_and_no_token_are_errors(unigram: Tokenizer) -> None:
    example = Example(("a", "b"), (0, 1), "56be")
    with pytest.raises(UserError, match=r"eval\.seq_len=67 .* question of up to 64 tokens and 3 .* at least 68"):
        windows([example], _WORDPIECE, _BERT, False, 67)
    assert len(windows([example], _WORDPIECE, _BERT, False, 68)) == 1
    with pytest.raises(UserError, match=r"context of question 56be has no token"):
        windows([Example(("a", "\x00"), (), "56be")], _WORDPIECE, _BERT, False, 70)
