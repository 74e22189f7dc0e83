"""The perplexity of a text file: each token once, words and bytes of the official text."""

from itertools import pairwise
from math import exp, log
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_scorers import Scorer

from multihop.common.errors import UserError
from multihop.eval.tasks.running_text import UNIT_WORDS, Convention, read_perplexity_text, text_of
from multihop.eval.zero_shot.perplexity import evaluate_perplexity
from multihop.eval.zero_shot.scoring import windows

WIKITEXT = """\x20
 = Silver Harbour = \n\x20
 The captain 's ship ( built in 1 @,@ 905 ) was a two @-@ master , 3 @.@ 5 metres high . \n\x20
 = = Crew = = \n\x20
 " They didn 't sail " , he wrote ; see <unk> [ 2 ] : the sailors ' song cost $ 4 . \n\x20
"""


@given(st.integers(1, 400), st.integers(1, 70), st.integers(1, 70))
def test_windows_predict_each_token_once_from_enough_before_it(length: int, seq_len: int, stride: int) -> None:
    stride = min(stride, seq_len)
    predicted = []
    for query in windows(np.arange(length), seq_len, stride):
        assert 1 <= len(query.ids) <= seq_len and 0 <= query.at.min() <= query.at.max() < len(query.ids)
        for at, target in zip(query.at, query.targets, strict=True):
            assert query.ids[at] == target - 1  # the hidden state of the token before it predicts it
            assert at + 1 >= min(target, seq_len - stride + 1)  # tokens seen
            predicted.append(int(target))
    assert predicted == list(range(1, length))


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "wiki.test.raw"
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("seq_len", [8, 64])
def test_a_masked_models_is_that_of_each_token_with_the_rest_of_its_word_masked(
    masked: Scorer, tmp_path: Path, seq_len: int
) -> None:
    content = "The captain of the river\n\n\nfound her letterhead. \n"
    text = read_perplexity_text(_write(tmp_path, content), "text", False)
    result = evaluate_perplexity(*masked, text, seq_len)
    tokens, special = masked.tokenizer.encode([content])[0].tolist(), masked.special_ids
    starts = [masked.tokenizer.begins_word(i) for i in tokens]
    assert not all(starts) and len(tokens) > 6
    total = 0.0
    for at, token in enumerate(tokens):
        end = next((i for i in range(at + 1, len(tokens)) if starts[i]), len(tokens))
        hidden = [special["mask"] if at <= i < end else each for i, each in enumerate(tokens)]
        width = seq_len - 2
        first = max(0, min(at - width // 2, len(tokens) - width))
        ids = [special["cls"], *hidden[first : first + width], special["sep"]]
        total -= float(masked.log_probabilities(ids)[at - first + 1, token])
    other = result.other_metrics
    assert result.value == pytest.approx(exp(total / 8), rel=1e-4)
    assert other["pseudo-bits per byte"] == pytest.approx(total / len(content) / log(2), rel=1e-4)
    assert other["pseudo-perplexity per token"] == pytest.approx(exp(total / len(tokens)), rel=1e-4)
    assert (other["words"], other["tokens"], other["bytes"]) == (8, len(tokens), len(content))


def test_a_text_within_one_window_by_the_definition(causal: Scorer, tmp_path: Path) -> None:
    content = "The captain of the river\n\n\nfound her letter. \n"
    for convention, words, counted, read in (
        ("text", 8, "words", ""),
        ("ptb", 12, "words and line ends", "official text, "),
    ):
        text = read_perplexity_text(_write(tmp_path, content), convention, False)
        result = evaluate_perplexity(*causal, text, 160)
        loss, tokens = -causal.likelihood("", content), len(causal.tokenizer.encode([content])[0])
        other = result.other_metrics
        assert result.value == pytest.approx(exp(loss / words), rel=1e-4)
        assert other[f"{read}perplexity per token"] == pytest.approx(exp(loss / tokens), rel=1e-4)
        assert other["perplexity per byte"] == pytest.approx(exp(loss / len(content)), rel=1e-4)
        assert other["bits per byte"] == pytest.approx(loss / len(content) / log(2), rel=1e-4)
        assert (other[counted], other["tokens"], other["bytes"]) == (words, tokens, len(content))
        total = result.statistics.sum(0)
        assert result.statistics.shape == (1, 2) and exp(total[0] / total[1]) == pytest.approx(result.value)


@pytest.mark.parametrize("batch_tokens", [1, 100, 8192])
def test_a_long_text_is_read_in_windows_whatever_the_batches(causal: Scorer, tmp_path: Path, batch_tokens: int) -> None:
    content = "\n".join(f"The letter {number} of the captain is silver." for number in range(20))
    text = read_perplexity_text(_write(tmp_path, content), "text", False)
    result = evaluate_perplexity(*causal, text, 50, 20, batch_tokens)
    ids = [causal.special_ids["end"], *causal.tokenizer.encode([content])[0].tolist()]
    loss = 0.0
    for target in range(1, len(ids)):
        first = 0 if target <= 50 else -(-(target - 50) // 20) * 20
        loss -= float(causal.log_probabilities(ids[first:target])[-1, ids[target]])
    assert result.other_metrics["tokens"] == len(ids) - 1
    assert result.statistics[:, 0].sum() == pytest.approx(loss, rel=1e-4)
    assert result.statistics[:, 1].tolist() == [UNIT_WORDS, 20 * 8 - UNIT_WORDS]


def test_each_document_follows_an_end_token(causal: Scorer) -> None:
    documents = ["The captain\nof the river", "found her letter.", " The letter of the captain is silver.\n" * 9]
    together = evaluate_perplexity(*causal, text_of(documents, "text", False), 50, 20)
    alone = [evaluate_perplexity(*causal, text_of([each], "text", False), 50, 20) for each in documents]
    assert together.statistics == pytest.approx(np.concatenate([each.statistics for each in alone]), rel=1e-4)
    for name in ("words", "tokens", "bytes"):
        assert together.other_metrics[name] == sum(each.other_metrics[name] for each in alone)
    total, words = together.statistics.sum(0)
    assert together.value == pytest.approx(exp(total / words)) and words == sum(len(each.split()) for each in documents)


def test_wikitext_counts_official_words_and_reads_natural_text(causal: Scorer, tmp_path: Path) -> None:
    path = _write(tmp_path, WIKITEXT)
    official, natural = (read_perplexity_text(path, "wikitext", detokenized) for detokenized in (False, True))
    assert "".join(official.blocks) == WIKITEXT
    assert sum(official.words) == sum(natural.words) == len(WIKITEXT.split()) + WIKITEXT.count("\n")
    assert official.bytes == natural.bytes == len(WIKITEXT.encode())
    assert [line for line in "".join(natural.blocks).split("\n") if line] == [
        "= Silver Harbour =",
        "The captain's ship (built in 1,905) was a two-master, 3.5 metres high.",
        "== Crew ==",
        "\"They didn't sail\", he wrote; see <unk> [2]: the sailors' song cost $4.",
    ]
    results = [evaluate_perplexity(*causal, text, 64) for text in (official, natural)]
    counts = [result.other_metrics["words and line ends"] for result in results]
    assert counts[0] == counts[1] and results[0].value != results[1].value
    assert "detokenized text, perplexity per token" in results[1].other_metrics


def test_penn_treebank(tmp_path: Path) -> None:
    content = " the <unk> did n't cost $ N N a share \n it 's the captains ' N N \\/ N garden \n"
    text = read_perplexity_text(_write(tmp_path, content), "ptb", True)
    assert "".join(text.blocks) == "the ? didn't cost $1 1 a share\nit's the captains' 1 1 / 1 garden\n"
    assert text.words == (10, 10 + 2)


@given(st.text(alphabet="ab.,' \n\t\r-", max_size=60).filter(str.strip), st.sampled_from(["wikitext", "ptb", "text"]))
def test_blocks_are_the_text_cut_before_whitespace(
    tmp_path_factory: pytest.TempPathFactory, content: str, convention: Convention
) -> None:
    text = read_perplexity_text(_write(tmp_path_factory.mktemp("text"), content), convention, False)
    assert "".join(text.blocks) == content and text.bytes == len(content)
    for before, after in pairwise(text.blocks):
        assert after[0].isspace() and not before[-1].isspace()
    assert sum(text.words) == len(content.split()) + (content.count("\n") if convention != "text" else 0)


@pytest.mark.parametrize("spaces", [" ", "  ", "\t", "\u3000"])
def test_a_text_of_one_line_is_many_units(causal: Scorer, spaces: str) -> None:
    words = 12 * UNIT_WORDS + 5
    line = "".join(f"{spaces}{('the', 'captain', 'river')[number % 3]}" for number in range(words))
    text = text_of([line, "found her letter. " * 30], "text", False)
    assert "".join(text.blocks) == line + "found her letter. " * 30
    tokens = [causal.tokenizer.encode([document])[0].tolist() for document in (line, "found her letter. " * 30)]
    assert causal.tokenizer.encode(text.blocks)[0].tolist() == tokens[0] + tokens[1]
    result = evaluate_perplexity(*causal, text, 160)
    assert result.statistics[:, 1].tolist() == [*[UNIT_WORDS] * 12, 5, 90]
    broken = evaluate_perplexity(*causal, text_of([line.replace(spaces, "\n")], "text", False), 160)
    assert broken.statistics[:, 1].tolist() == [*[UNIT_WORDS] * 12, 5]


def test_the_tokens_of_the_blocks_are_the_tokens_of_the_text(causal: Scorer, tmp_path: Path) -> None:
    content = " = the river = \n \n the  captain \t\n\n\n of the stone"
    text = read_perplexity_text(_write(tmp_path, content), "wikitext", False)
    assert causal.tokenizer.encode(text.blocks)[0].tolist() == causal.tokenizer.encode([content])[0].tolist()


def test_broken_files_and_settings_are_refused(causal: Scorer, tmp_path: Path) -> None:
    path = tmp_path / "ptb.test.txt"
    with pytest.raises(UserError, match=r"ptb\.test\.txt cannot be read \(No such file"):
        read_perplexity_text(path, "ptb", False)
    path.write_bytes(b" \n\n")
    with pytest.raises(UserError, match=r"ptb\.test\.txt is empty"):
        read_perplexity_text(path, "ptb", False)
    path.write_bytes(b"one\ntwo\xff\n")
    with pytest.raises(UserError, match=r"ptb\.test\.txt, line 2: expected UTF-8"):
        read_perplexity_text(path, "ptb", False)
    path.write_text("river" * 1000)
    text = read_perplexity_text(path, "text", False)
    with pytest.raises(UserError, match="a stride of 65 leaves out tokens of windows of 64; give 1 to 64"):
        evaluate_perplexity(*causal, text, 64, 65)
    with pytest.raises(UserError, match="1 words in 5,000 bytes, too few"):
        evaluate_perplexity(*causal, text, 64)


def test_what_a_masked_model_cannot_read_is_refused(masked: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(["The captain of the river found her letter."], "text", False)
    with pytest.raises(UserError, match=r"windows of 2 tokens have no room .* raise eval\.seq_len"):
        evaluate_perplexity(*masked, text, 2)
    monkeypatch.setattr("multihop.eval.zero_shot.perplexity.MOST_MASKED", 3)
    with pytest.raises(UserError, match="a masked model takes a forward pass for each; give a text of at most 3 tok"):
        evaluate_perplexity(*masked, text, 16)
