"""A context and its continuations are encoded together, whatever the tokenizer."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_scorers import Scorer, causal_scorer, scorer_of

from multihop.eval.zero_shot.scoring import encode_continuations, log_likelihoods
from multihop.pretrain.models.families import parse_model_config

_CONFIG = parse_model_config({"family": "gpt2", "layers": 1, "hidden": 32, "heads": 2, "max_positions": 160})
_TEXT = st.text(alphabet="theraind s.\u00e9", max_size=20)


@pytest.fixture(scope="module", params=["byte-bpe", "unigram"])
def scorer(request: pytest.FixtureRequest, gpt2_data: Path) -> Scorer:
    return causal_scorer(_CONFIG) if request.param == "byte-bpe" else scorer_of(_CONFIG, gpt2_data)


@given(_TEXT, st.lists(_TEXT, min_size=1, max_size=4))
def test_context_and_continuation_are_the_tokens_of_the_whole(
    scorer: Scorer, context: str, continuations: list[str]
) -> None:
    encoded = encode_continuations(scorer.tokenizer, scorer.special_ids, context, continuations)
    assert len({tuple(each.context) for each in encoded}) == 1
    assert encoded[0].context[0] == scorer.special_ids["end"]
    for text, each in zip(continuations, encoded, strict=True):
        whole = [scorer.special_ids["end"], *scorer.tokenizer.encode([context + text])[0].tolist()]
        assert each.ids
        if len(whole) > len(each.context):
            assert [*each.context, *each.ids] == whole


def test_a_word_that_stands_apart_leaves_the_context_as_it_is(scorer: Scorer) -> None:
    [word, sentence] = encode_continuations(
        scorer.tokenizer, scorer.special_ids, "The captain found", [" stone", " the river."]
    )
    alone = scorer.tokenizer.encode(["The captain found"])[0].tolist()
    assert word.context == sentence.context == [scorer.special_ids["end"], *alone]
    assert "".join(scorer.tokenizer.token_text(i) for i in word.ids) == " stone"


def test_a_continuation_without_tokens_is_not_certain(scorer: Scorer) -> None:
    """Otherwise its log-likelihood would be 0, and no other could be more likely."""
    given = encode_continuations(scorer.tokenizer, scorer.special_ids, "The captain", ["", " river"])
    nothing, _ = log_likelihoods(scorer.model, given)
    assert nothing.tokens == 1 and nothing.value < 0
