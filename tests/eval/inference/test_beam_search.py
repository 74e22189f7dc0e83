"""Beam search finds what transformers' `generate` finds on the same weights, hypothesis for hypothesis."""

from typing import Any

import numpy as np
import pytest
import torch
from huggingface import save

from multihop.eval.inference.beam_search import Search, beam_search
from multihop.pretrain.checkpoint.huggingface_export import export_model
from multihop.pretrain.models.build import build_model
from multihop.pretrain.models.families import parse_model_config
from multihop.pretrain.models.layers.encoder_decoder import EncoderDecoder

VOCABULARY = 61
SPECIALS = {"pad": 0, "end": 1, "unk": 2}


def peaked_model(family: str, seed: int, **changes: Any) -> EncoderDecoder:
    """Return a model with random weights under which some tokens are likely, including the end token."""
    heads = {} if family == "seq2seq" else {"heads": 2}
    sizes = {"layers": 2, "hidden": 32, "max_positions": 64, "dropout": 0.0, **heads}
    model = build_model(parse_model_config({"family": family, **sizes, **changes}), VOCABULARY)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.05 if "bias" in name else 0.25))
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
        model.get_parameter("word_bias")[SPECIALS["end"]] = 2.0
    assert isinstance(model, EncoderDecoder)
    return model.eval()


def sources_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[*rng.integers(3, VOCABULARY, length - 1).tolist(), SPECIALS["end"]] for length in lengths]


@pytest.fixture(scope="module", params=[0, 1, 2])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[EncoderDecoder, Any]:
    transformers = pytest.importorskip("transformers")
    ours = peaked_model("transformer", request.param)
    folder = tmp_path_factory.mktemp("marian")
    out = folder / "hf"
    out.mkdir()
    export_model(save(ours, folder / "ours"), ours.config, VOCABULARY, SPECIALS, out)
    return ours, transformers.MarianMTModel.from_pretrained(out).eval()


def theirs(model: Any, sources: list[list[int]], limit: int, search: Search) -> tuple[list[list[int]], list[float]]:
    """Return all hypotheses of all sentences, without padding and start token, and their scores."""
    longest = max(map(len, sources))
    ids = torch.tensor([[*each, *[SPECIALS["pad"]] * (longest - len(each))] for each in sources])
    real = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in sources])
    result = model.generate(
        input_ids=ids, attention_mask=real, num_beams=search.beams, num_return_sequences=search.beams,
        length_penalty=search.length_penalty, max_length=None, max_new_tokens=limit, do_sample=False,
        early_stopping=False, decoder_start_token_id=SPECIALS["pad"], pad_token_id=SPECIALS["pad"],
        eos_token_id=SPECIALS["end"], bad_words_ids=[[SPECIALS["pad"]]], forced_eos_token_id=None,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    tokens = []
    for row in result.sequences[:, 1:].tolist():  # filled up with end tokens, where the padding is 0
        tokens.append(row[: row.index(SPECIALS["end"]) + 1] if SPECIALS["end"] in row else row)
    scores = result.sequences_scores.tolist() if search.beams > 1 else [0.0] * len(tokens)
    return tokens, scores


@pytest.mark.parametrize("search", [Search(4, 0.6), Search(4, 0.0), Search(2, 1.5), Search(7, 0.6), Search(1)])
@pytest.mark.parametrize("limit", [1, 3, 24])
def test_the_hypotheses_are_those_of_transformers(both: tuple[EncoderDecoder, Any], search: Search, limit: int) -> None:
    model, marian = both
    sources = sources_of([9, 2, 14, 1, 9, 30])
    result = beam_search(model, sources, [limit] * len(sources), SPECIALS, search)
    tokens, scores = theirs(marian, sources, limit, search)
    assert [hypothesis.tokens for each in result for hypothesis in each] == tokens
    if search.beams > 1:
        assert [hypothesis.score for each in result for hypothesis in each] == pytest.approx(scores, abs=1e-4)


def test_ends_and_limits_both_occur() -> None:
    models = [peaked_model("transformer", seed) for seed in (0, 1, 2)]
    result = [
        hypothesis.tokens
        for model in models
        for each in beam_search(model, sources_of([9] * 40), [24] * 40, SPECIALS, Search())
        for hypothesis in each
    ]
    assert 0.1 < np.mean([tokens[-1] == SPECIALS["end"] for tokens in result]) < 0.9
    assert not any(SPECIALS["pad"] in tokens or SPECIALS["end"] in tokens[:-1] for tokens in result)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("transformer", {"norm": "pre", "positions": "learned"}),
        ("seq2seq", {"cell": "lstm", "attention": "general", "input_feeding": True}),
        ("seq2seq", {"cell": "gru", "attention": "additive"}),
        ("seq2seq", {"cell": "lstm", "attention": "none"}),
    ],
)
def test_a_batch_is_its_sentences_alone(family: str, changes: dict[str, Any]) -> None:
    model = peaked_model(family, 3, **changes)
    sources, limits = sources_of([9, 2, 14, 1, 9, 30], seed=4), [12, 3, 20, 1, 12, 24]
    together = beam_search(model, sources, limits, SPECIALS, Search())
    for source, limit, hypotheses in zip(sources, limits, together, strict=True):
        (alone,) = beam_search(model, [source], [limit], SPECIALS, Search())
        assert [each.tokens for each in alone] == [each.tokens for each in hypotheses]
        assert [each.score for each in alone] == pytest.approx([each.score for each in hypotheses], abs=1e-4)
        assert all(len(each.tokens) <= limit for each in hypotheses)
