"""`model.positions: relative` against the formula of Shaw et al. 2018, with a vector for each pair of tokens."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds_of_families import RELATIVE
from packed_texts import packed, sequences_of
from pydantic import ValidationError
from rank_jobs import run_worker
from rank_pool import RankPool
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from worker_runs import STEPS, checkpoint, recipe, rows

from multihop.common.errors import UserError
from multihop.pretrain.checkpoint.huggingface_config import config_json
from multihop.pretrain.checkpoint.verify import load_weights
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.models.config import ModelConfig, StackConfig
from multihop.pretrain.models.families import parse_model_config
from multihop.pretrain.models.layers.attention import Sequences, attend
from multihop.pretrain.models.layers.blocks import SelfAttention
from multihop.pretrain.models.layers.key_value_cache import KeyValueCache
from multihop.pretrain.packed_tokens import PackedTokens

SIZES: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "max_positions": 40, "dropout": 0.0}
CPU = torch.device("cpu")
Lengths = st.lists(st.integers(1, 40), min_size=1, max_size=6)
Distances = st.integers(1, 50)
"""Maximum distances below and above all lengths."""


def config_of(family: str, max_distance: int = 3, **others: Any) -> ModelConfig:
    given = {"family": family, **SIZES, "positions": "relative", "max_distance": max_distance, **others}
    return parse_model_config({**given, **({"embedding": 16} if family == "albert" else {})})


def rough(config: ModelConfig) -> Any:
    """Return a model with weights under which tokens and distances matter."""
    model = build_model(config, 100)
    init_weights(model, 1)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = 1.0 if "distance" in name else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
    return model.eval()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def directly(parts: list[Tensor], lengths: list[int], max_distance: int, causal: bool) -> Tensor:
    """Return attention by equations 3 and 4.

    Args:
        parts: queries, keys, values (N, heads, width), and embeddings of distances, the farthest back first.
    """
    *packed, embeddings = parts
    out = []
    for q, k, v in zip(*(part.split(lengths) for part in packed), strict=True):
        places = torch.arange(len(q))
        distance = (places[None] - places[:, None]).clamp(-max_distance, 0 if causal else max_distance)
        of_pairs = embeddings[distance + max_distance]  # (n, n, width)
        scores = torch.einsum("qhw,qkhw->hqk", q, k[None] + of_pairs[:, :, None]) / q.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(places[None] > places[:, None], -torch.inf)
        out.append(torch.einsum("hqk,khw->qhw", scores.softmax(-1), v))
    return torch.cat(out)


def check_attention(lengths: list[int], max_distance: int, causal: bool, dropout: float) -> None:
    count = max_distance + 1 if causal else 2 * max_distance + 1
    parts = [*(random(sum(lengths), 2, 5, seed=seed) for seed in range(3)), random(count, 5, seed=3)]
    query, key, value, embeddings = parts
    found = attend(query, key, value, sequences_of(lengths), causal, dropout, query @ embeddings.T)
    expected = directly(parts, lengths, max_distance, causal)
    torch.testing.assert_close(found, expected)
    upstream = random(*expected.shape, seed=4).detach()
    gradients = [torch.autograd.grad(each, parts, upstream) for each in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@settings(max_examples=60)
@given(lengths=Lengths, equal=st.booleans(), max_distance=Distances, causal=st.booleans())
def test_attention_and_its_gradients_are_the_formulas(
    lengths: list[int], equal: bool, max_distance: int, causal: bool
) -> None:
    lengths = lengths[:1] * len(lengths) if equal else lengths
    check_attention(lengths, max_distance, causal, 0.0)
    # At this rate no element is dropped.
    check_attention(lengths, max_distance, causal, 1e-9)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[300], [260, 260], [300, 290, 7]])
@pytest.mark.parametrize("max_distance", [2, 200])
def test_sequences_of_several_blocks(lengths: list[int], max_distance: int, causal: bool) -> None:
    check_attention(lengths, max_distance, causal, 0.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[4, 4], [5, 3, 1]])
def test_the_gradient_with_dropout(lengths: list[int], causal: bool) -> None:
    parts = [*(random(sum(lengths), 2, 3, seed=seed) for seed in range(3)), random(3 if causal else 5, 3, seed=3)]

    def drop(query: Tensor, key: Tensor, value: Tensor, embeddings: Tensor) -> Tensor:
        torch.manual_seed(5)
        return attend(query, key, value, sequences_of(lengths), causal, 0.25, query @ embeddings.T)

    assert torch.autograd.gradcheck(drop, parts)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[150, 150], [150, 9, 140]])
def test_a_gpu_computes_the_same(lengths: list[int], causal: bool) -> None:
    parts = [*(random(sum(lengths), 2, 8, seed=seed) for seed in range(3)), random(5 if causal else 9, 8, seed=3)]
    expected = directly(parts, lengths, 4, causal)
    there = [part.detach().cuda().requires_grad_() for part in parts]
    query, key, value, embeddings = there
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).cuda()
    sequences = Sequences(cu_seqlens, max(lengths), sum(lengths))
    found = attend(query, key, value, sequences, causal, 1e-9, query @ embeddings.T)
    upstream = random(*expected.shape, seed=4).detach()
    gradients = torch.autograd.grad(found, there, upstream.cuda()), torch.autograd.grad(expected, parts, upstream)
    for ours, theirs in zip((found, *gradients[0]), (expected, *gradients[1]), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


def test_dropout_drops_the_share_of_its_rate() -> None:
    """All weights are 1 / n and all values are 1, so that an output is the kept share of its row."""
    length, rate = 400, 0.3
    zeros, ones = torch.zeros(length, 2, 4), torch.ones(length, 2, 4)
    torch.manual_seed(1)
    out = attend(zeros, zeros, ones, sequences_of([length]), False, rate, torch.zeros(length, 2, 7))
    kept = out[..., 0].flatten() * (1 - rate)
    assert abs(float(kept.mean()) - (1 - rate)) < 4 * (rate * (1 - rate) / (2 * length**2)) ** 0.5
    assert float(kept.std()) == pytest.approx((rate * (1 - rate) / length) ** 0.5, rel=0.15)


@pytest.mark.parametrize("causal", [False, True])
def test_a_modules_gradients_are_the_formulas(causal: bool) -> None:
    """The gradients are those of its input and of all its weights, including the embeddings of distances."""
    torch.manual_seed(2)
    lengths = [9, 4, 1]
    config = config_of("bert")
    assert isinstance(config, StackConfig)
    attention = SelfAttention(config, causal, max_distance=config.max_distance).double().eval()
    x = random(sum(lengths), 32)
    found = attention(x, sequences_of(lengths))
    parts = [project(x).view(-1, 4, 8) for project in (attention.query, attention.key, attention.value)]
    assert attention.distance is not None
    expected = attention.output(directly([*parts, attention.distance.weight], lengths, 3, causal).flatten(1))
    torch.testing.assert_close(found, expected)
    inputs = [x, *attention.parameters()]
    gradients = [torch.autograd.grad((each**3).sum(), inputs) for each in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("family", RELATIVE)
def test_a_model_knows_distances_only(family: str) -> None:
    config = config_of(family)
    model, causal = rough(config), RELATIVE[family].causal
    names = dict(model.named_parameters())
    assert "position.weight" not in names
    of_distances = [names[name] for name in names if name.endswith("attention.distance.weight")]
    assert [tuple(each.shape) for each in of_distances] == [(4 if causal else 7, 8)] * len(model.layers)
    forwards, backwards = packed(torch.arange(20), [20]), packed(torch.arange(20).flip(0), [20])
    states = model.encode(forwards)
    assert torch.equal(model.encode(replace(forwards, positions=forwards.positions + 7)), states)
    # The order of the tokens matters through the distances alone.
    with torch.no_grad():
        turned = model.encode(backwards).flip(0)
        for each in of_distances:
            each.zero_()
        without = model.encode(forwards), model.encode(backwards).flip(0)
    assert not torch.allclose(turned, states, atol=1e-2)
    if not causal:  # a causal mask tells the order too
        torch.testing.assert_close(*without, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", RELATIVE)
@settings(max_examples=15)
@given(lengths=Lengths, equal=st.booleans(), max_distance=Distances)
def test_what_is_packed_beside_a_sequence_changes_nothing(
    family: str, lengths: list[int], equal: bool, max_distance: int
) -> None:
    model = rough(config_of(family, max_distance))
    lengths = lengths[:1] * len(lengths) if equal else lengths
    generator = torch.Generator().manual_seed(sum(lengths))
    texts = [torch.randint(0, 100, (length,), generator=generator) for length in lengths]
    with torch.no_grad():
        together = model.encode(packed(torch.cat(texts), lengths)).split(lengths)
        for text, states in zip(texts, together, strict=True):
            torch.testing.assert_close(states, model.encode(packed(text, [len(text)])), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", [name for name, family in RELATIVE.items() if family.causal])
@settings(max_examples=15)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5), more=st.integers(1, 9), max_distance=Distances)
def test_states_with_a_key_value_cache_are_those_without(
    family: str, lengths: list[int], more: int, max_distance: int
) -> None:
    model = rough(config_of(family, max_distance)).double()
    generator = torch.Generator().manual_seed(sum(lengths))
    texts = [torch.randint(0, 100, (length + more,), generator=generator) for length in lengths]
    with torch.no_grad():
        whole = [model.encode(packed(text, [len(text)])) for text in texts]
        cache = KeyValueCache(model.config, lengths, more // 2, CPU, torch.float64)  # it grows
        prompts = [text[:length] for text, length in zip(texts, lengths, strict=True)]
        states = model.encode(packed(torch.cat(prompts), lengths), cache=cache).split(lengths)
        for found, expected in zip(states, whole, strict=True):
            torch.testing.assert_close(found, expected[: len(found)])
        for step in range(more):
            cache.advance()
            at = torch.tensor(lengths) + step
            ids = torch.stack([text[place] for text, place in zip(texts, at, strict=True)])
            states = model.encode(PackedTokens(ids, at, torch.arange(len(texts) + 1), 1), cache=cache)
            torch.testing.assert_close(states, torch.stack([each[i] for each, i in zip(whole, at, strict=True)]))


@pytest.mark.parametrize("family", RELATIVE)
def test_the_products_with_the_distances_are_counted(family: str) -> None:
    config, lengths = config_of(family, layers=3), [20, 7]
    absolute = config.model_copy(update={"positions": "learned", "max_distance": None})
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        rough(config).encode(packed(torch.arange(27), lengths))
    counted = sum(
        sum(counts.values())
        for name, counts in counter.get_flop_counts().items()
        if name.endswith("attention.distance")
    )
    relative, without = (each.train_flops(100, np.array(lengths), 5) for each in (config, absolute))
    assert relative - without == 3 * counted > 0


@pytest.mark.parametrize("family", RELATIVE)
def test_the_default_is_clipped_at_16_tokens(family: str) -> None:
    relative = parse_model_config({"family": family, **SIZES, "positions": "relative"})
    assert relative.max_distance == 16
    written = relative.model_dump(mode="json")
    assert (written["positions"], written["max_distance"]) == ("relative", 16)
    assert parse_model_config(written) == relative


TEXT_NAMES = "albert or bert or gpt or gpt2 or modernbert or modernbert-decoder or roberta"


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        *(
            ({"family": family, "positions": "relative"}, complaint)
            for family, complaint in (
                ("seq2seq", f"family=seq2seq has no positions; .* family={TEXT_NAMES} or transformer"),
                ("transformer", "'sinusoidal' or 'learned'"),
            )
        ),
        ({"family": "gpt2", "positions": "sinusoidal"}, "'learned' or 'relative'"),
        ({"family": "gpt2", "max_distance": 8}, "max_distance=8 is for relative positions, and positions=learned; rem"),
        ({"family": "transformer", "max_distance": 8}, "family=transformer has no max_distance; remove it"),
        ({"family": "gpt", "positions": "relative", "max_distance": 0}, "greater than or equal to 1"),
        (
            {"family": "bert", "positions": "relative", "attention_init": "neighbors"},
            "attention_init=neighbors begins with position embeddings, and positions=relative has none; remove one",
        ),
    ],
)
def test_impossible_models_are_refused(given: dict[str, Any], complaint: str) -> None:
    lacking = {"heads": None} if given["family"] == "seq2seq" else {}
    with pytest.raises(ValidationError, match=complaint):
        parse_model_config({**SIZES, **lacking, **given})


@pytest.mark.parametrize("family", RELATIVE)
def test_an_export_is_refused(family: str) -> None:
    specials = {"pad": 0, "cls": 1, "sep": 2, "mask": 3, "unk": 4, "end": 5}
    with pytest.raises(UserError, match="with relative positions, and this model has positions=relative; it cannot"):
        config_json(config_of(family), 100, specials)


@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_two_ranks_train_alike_in_zero_stages_0_and_3(
    family: str, bert_data: Path, gpt2_data: Path, tmp_path: Path, pool: Callable[[int], RankPool]
) -> None:
    """This includes held-out evaluations with their entropies of attention, and recomputed activations in stage 3."""
    found = []
    for stage, recomputed in ((0, "none"), (3, "full")):
        run_dir = tmp_path / f"stage-{stage}"
        (run_dir / "logs").mkdir(parents=True)
        (run_dir / "data").symlink_to(gpt2_data if family == "gpt2" else bert_data)
        content = recipe(engine__zero_stage=stage, engine__activation_checkpointing=recomputed, engine__data_workers=0)
        content["model"] |= {"family": family, "positions": "relative", "max_distance": 5, "dropout": 0.0}
        content["objective"] = {}
        (run_dir / "recipe.json").write_text(json.dumps(content))
        assert TrainingConfig.model_validate(content).model.positions == "relative"
        assert pool(2).run(run_worker, run_dir) == [0, 0]
        heldout = [row["attention_entropy"] for row in rows(run_dir) if "attention_entropy" in row]
        found.append((heldout, load_weights(checkpoint(run_dir, STEPS))))
    (entropies, weights), (others, partitioned) = found
    assert entropies == pytest.approx(others, rel=1e-4) and len(entropies) == 3
    assert "layers.1.attention.distance.weight" in weights and weights.keys() == partitioned.keys()
    for name, weight in weights.items():
        if not name.endswith("attention.key.bias"):  # its gradient is rounding noise, which Adam normalizes
            torch.testing.assert_close(partitioned[name], weight, rtol=1e-4, atol=1e-5, msg=name)
