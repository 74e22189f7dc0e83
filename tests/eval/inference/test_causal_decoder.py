"""Beam search of a causal model: the hypotheses that transformers finds, and a batch is its sentences alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface import save

from multihop.eval.inference.beam_search import Search, beam_search
from multihop.eval.inference.causal_decoder import CausalDecoder
from multihop.pretrain.checkpoint.huggingface_export import export_model
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.models.families import parse_model_config

VOCABULARY, END = 40, 0
SPECIALS = {"end": END}
FAMILIES = ["gpt", "gpt2", "modernbert-decoder"]


def model_of(family: str, seed: int) -> Any:
    """Return a model that is sure of some tokens, so that hypotheses differ by more than rounding."""
    sizes = {"layers": 2, "hidden": 32, "heads": 2, "max_positions": 64, "dropout": 0.0}
    model = build_model(parse_model_config({"family": family, **sizes}), VOCABULARY)
    init_weights(model, seed)
    with torch.no_grad():
        model.word.weight.mul_(25.0)
        model.word.weight[END] *= 1.5
    return model.eval()


def prompts_of(lengths: list[int], seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[END, *rng.integers(2, VOCABULARY, length).tolist(), END] for length in lengths]


@pytest.mark.parametrize("search", [Search(4, 0.6), Search(3, 0.0), Search(1)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_hypotheses_are_those_of_transformers(seed: int, search: Search, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    ours = model_of("gpt2", seed)
    (tmp_path / "hf").mkdir()
    export_model(save(ours, tmp_path / "ours"), ours.config, VOCABULARY, SPECIALS, tmp_path / "hf")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    prompts = prompts_of([5, 1, 9], seed)
    found = beam_search(CausalDecoder(ours, VOCABULARY), prompts, [12] * 3, SPECIALS, search)
    for prompt, hypotheses in zip(prompts, found, strict=True):
        result = theirs.generate(
            input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=search.beams, num_return_sequences=search.beams, length_penalty=search.length_penalty,
            max_new_tokens=12, do_sample=False, early_stopping=False, eos_token_id=END, pad_token_id=END,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        made = [row[len(prompt) :] for row in result.sequences.tolist()]
        expected = [row[: row.index(END) + 1] if END in row else row for row in made]
        assert [each.tokens for each in hypotheses] == expected
        if search.beams > 1:
            assert [each.score for each in hypotheses] == pytest.approx(result.sequences_scores.tolist(), abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_its_sentences_alone(family: str) -> None:
    decoder = CausalDecoder(model_of(family, 3), VOCABULARY)
    prompts, limits = prompts_of([9, 2, 14, 1, 9, 30], seed=4), [12, 3, 20, 1, 12, 24]
    together = beam_search(decoder, prompts, limits, SPECIALS, Search())
    for prompt, limit, hypotheses in zip(prompts, limits, together, strict=True):
        (alone,) = beam_search(decoder, [prompt], [limit], SPECIALS, Search())
        assert [each.tokens for each in alone] == [each.tokens for each in hypotheses]
        assert [each.score for each in alone] == pytest.approx([each.score for each in hypotheses], abs=1e-4)
