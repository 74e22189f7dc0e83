"""ModernBERT and its decoder: windows, rotary positions, the key-value cache, and the operations that are counted.

That both are the models of transformers is tested in tests/pretrain/checkpoint/test_huggingface.py.
"""

from typing import Any

import numpy as np
import pytest
import torch
from huggingface import rough_model
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packed_texts import packed, sequences_of
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from multihop.common.errors import UserError
from multihop.pretrain.checkpoint.huggingface_config import config_json
from multihop.pretrain.models.build import build_model_on_meta
from multihop.pretrain.models.cpu.dropout import keep_probability
from multihop.pretrain.models.families import PRESETS, parse_model_config
from multihop.pretrain.models.layers.attention import attend
from multihop.pretrain.models.layers.key_value_cache import KeyValueCache
from multihop.pretrain.models.layers.rotary import rotate, rotation_of
from multihop.pretrain.models.modernbert.config import ModernConfig
from multihop.pretrain.packed_tokens import PackedTokens

FAMILIES = ["modernbert", "modernbert-decoder"]
SWITCHES: list[dict[str, Any]] = [{}, {"positions": "learned"}, {"feed_forward": "gelu"}, {"norm": "post"}]
Lengths = st.lists(st.integers(1, 200), min_size=1, max_size=4)


def config_of(family: str, **changes: Any) -> ModernConfig:
    sizes = {"layers": 4, "hidden": 24, "heads": 2, "max_positions": 1000, "local_attention": 8}
    config = parse_model_config({"family": family, **sizes, **changes})
    assert isinstance(config, ModernConfig)
    return config


def directly(parts: list[Tensor], lengths: list[int], window: int, causal: bool) -> Tensor:
    """Return attention by the formula, with a mask, sequence by sequence."""
    done = []
    for query, key, value in zip(*(part.split(lengths) for part in parts), strict=True):
        distance = torch.arange(len(query))[:, None] - torch.arange(len(query))
        visible = (distance.abs() <= window) & ((distance >= 0) if causal else True)
        scores = torch.einsum("qhw,khw->hqk", query, key) * query.shape[-1] ** -0.5
        done.append(torch.einsum("hqk,khw->qhw", scores.masked_fill(~visible, -torch.inf).softmax(-1), value))
    return torch.cat(done)


def random(tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, 2, 6, generator=generator, dtype=torch.float64, requires_grad=True)


@settings(deadline=None, max_examples=60)
@given(lengths=Lengths, window=st.integers(0, 70), causal=st.booleans(), equal=st.booleans())
@example(lengths=[130, 130], window=64, causal=False, equal=True)
@example(lengths=[200, 190], window=8, causal=False, equal=False)  # a padded token that is far from all others
@example(lengths=[200, 190], window=8, causal=True, equal=False)
def test_attention_within_a_window_is_the_formula(lengths: list[int], window: int, causal: bool, equal: bool) -> None:
    lengths = [lengths[0]] * len(lengths) if equal else lengths
    parts = [random(sum(lengths), seed) for seed in range(3)]
    weights = torch.randn(sum(lengths), 2, 6, dtype=torch.float64)
    ours = attend(*parts, sequences_of(lengths), causal, 0.0, window=window)
    expected = directly(parts, lengths, window, causal)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
    found = torch.autograd.grad((ours * weights).sum(), parts)
    wanted = torch.autograd.grad((expected * weights).sum(), parts)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[5, 5], [90], [80, 75, 3]])
def test_the_gradient_with_dropout_is_that_of_the_masked_weights(lengths: list[int], causal: bool) -> None:
    parts = [random(sum(lengths), seed) for seed in range(3)]

    def dropped(*inputs: Tensor) -> Tensor:
        torch.manual_seed(5)
        return attend(*inputs, sequences_of(lengths), causal, 0.25, window=7)

    assert torch.autograd.gradcheck(dropped, parts, fast_mode=True)


def test_dropout_keeps_the_mean_within_a_window() -> None:
    parts = [random(300, seed).detach() for seed in range(2)] + [torch.ones(300, 2, 6, dtype=torch.float64)]
    torch.manual_seed(0)
    mean = torch.stack([attend(*parts, sequences_of([300]), False, 0.3, window=20) for _ in range(200)]).mean()
    assert float(mean) == pytest.approx(1.0, abs=0.01)
    assert keep_probability(0.3) == pytest.approx(0.7, abs=1e-4)


@given(shift=st.integers(0, 5000), distance=st.integers(0, 500), theta=st.sampled_from([100.0, 10_000.0, 160_000.0]))
def test_products_of_rotated_vectors_depend_on_the_distance_alone(shift: int, distance: int, theta: float) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(1, 1, 16, generator=generator) for _ in range(2))

    def product(start: int) -> float:
        at = [rotation_of(torch.tensor([position]), 16, theta) for position in (start, start + distance)]
        return float((rotate(query, at[0]) * rotate(key, at[1])).sum())

    # Angles are float32, as in transformers: at position 5,000 they are off by up to 2.4e-4 of a radian.
    assert product(shift) == pytest.approx(product(0), abs=0.01)


def test_a_rotation_keeps_norms_and_its_gradient_is_the_rotation_backwards() -> None:
    x = torch.randn(7, 3, 8, dtype=torch.float32, requires_grad=True)
    rotation = rotation_of(torch.arange(7) * 11, 8, 100.0)
    turned = rotate(x, rotation)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(torch.autograd.grad(turned, x, turned)[0], x.detach())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changes", SWITCHES)
def test_each_part_can_be_switched(family: str, changes: dict[str, Any]) -> None:
    config = config_of(family, **changes)
    model, ids = rough_model(config).double(), torch.arange(30) * 7 % 97
    causal = family == FAMILIES[1]

    def norm(x: Tensor, name: str) -> Tensor:
        weight = dict(model.named_parameters()).get(f"{name}.weight")
        return x if weight is None else F.layer_norm(x, x.shape[-1:], weight, eps=1e-5)

    x = model.word.weight[ids]
    if config.positions == "learned":
        x = x + model.get_parameter("position.weight")[: len(ids)]
    x = norm(x, "embedding_norm")
    for number, layer in enumerate(model.layers):
        part: Any = layer
        theta, window = (config.global_rope_theta, 10**6) if number % 3 == 0 else (10_000.0, config.window(causal))

        def attention(y: Tensor, part: Any = part, theta: float = theta, window: int = window) -> Tensor:
            inputs = [getattr(part.attention, name)(y).view(len(y), 2, -1) for name in ("query", "key", "value")]
            if config.positions == "rotary":
                rotation = rotation_of(torch.arange(len(y)), 12, theta)
                inputs[:2] = [rotate(each, rotation) for each in inputs[:2]]
            output: Tensor = part.attention.output(directly(inputs, [len(y)], window, causal).flatten(1))
            return output

        def feed_forward(y: Tensor, part: Any = part) -> Tensor:
            block = part.feed_forward
            up = F.gelu(block.up(y)) if config.feed_forward == "gelu" else F.gelu(block.gate(y)) * block.up(y)
            down: Tensor = block.down(up)
            return down

        for name, sublayer in (("attention_norm", attention), ("feed_forward_norm", feed_forward)):
            own = f"layers.{number}.{name}"
            x = x + sublayer(norm(x, own)) if config.norm == "pre" else norm(x + sublayer(x), own)
    norms = [name for name, _ in model.named_parameters() if "norm" in name and "transform" not in name]
    assert len(norms) == 2 * config.layers + 1  # pre: none in the first layer's attention, and one at the end
    expected = norm(x, "final_norm")
    with torch.no_grad():
        # Rotations are computed in float32.
        torch.testing.assert_close(model.encode(packed(ids, [len(ids)])), expected, rtol=1e-6, atol=1e-6)
    if changes:
        with pytest.raises(UserError, match=rf"has {next(iter(changes))}=.* it cannot be exported"):
            config_json(config, 211, {"pad": 0, "cls": 2, "sep": 3, "end": 0})


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    equal=st.booleans(),
    changes=st.sampled_from(SWITCHES),
)
def test_what_is_packed_beside_a_sequence_changes_nothing(
    family: str, lengths: list[int], equal: bool, changes: dict[str, Any]
) -> None:
    lengths = [lengths[0]] * len(lengths) if equal else lengths
    model, ids = rough_model(config_of(family, **changes)), torch.arange(sum(lengths)) % 97
    with torch.no_grad():
        together = model.encode(packed(ids, lengths)).split(lengths)
        for part, states in zip(ids.split(lengths), together, strict=True):
            torch.testing.assert_close(model.encode(packed(part, [len(part)])), states, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_local_layers_carry_a_token_one_window_each(family: str) -> None:
    config = config_of(family)
    model, window = rough_model(config), config.window(causal=family == FAMILIES[1])
    attentions: Any = [layer.attention for layer in model.layers]
    ids = torch.arange(100)
    changed = torch.cat([torch.tensor([150]), ids[1:]])
    assert [attention.window for attention in attentions] == [None, window, window, None]

    def reach() -> int:
        with torch.no_grad():
            one, other = (model.encode(packed(each, [100])) for each in (ids, changed))
        return int((one != other).any(-1).nonzero().max())

    assert reach() == 99
    for attention in attentions:
        attention.window = window
    assert reach() == 4 * window


@settings(deadline=None, max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    new=st.integers(1, 30),
    window=st.sampled_from([2, 4, 8, 64]),
    every=st.integers(1, 5),
    changes=st.sampled_from(SWITCHES),
)
def test_states_with_a_key_value_cache_are_those_without(
    lengths: list[int], new: int, window: int, every: int, changes: dict[str, Any]
) -> None:
    config = config_of("modernbert-decoder", local_attention=window, global_attn_every_n_layers=every, **changes)
    model = rough_model(config).double()
    ids = torch.arange(sum(lengths) + new * len(lengths)) * 31 % 97
    whole = ids.split([length + new for length in lengths])
    sequences = list(range(len(lengths)))
    with torch.inference_mode():
        expected = [model.encode(packed(each, [len(each)])) for each in whole]
        cache = KeyValueCache(config, lengths, 3, torch.device("cpu"), torch.float64)
        prompts = torch.cat([each[:length] for each, length in zip(whole, lengths, strict=True)])
        model.encode(packed(prompts, lengths), cache=cache)
        for step in range(new):
            if step == new // 2:
                sequences.reverse()
                cache.select(torch.arange(len(lengths)).flip(0))
            cache.advance()
            positions = torch.tensor([lengths[sequence] + step for sequence in sequences])
            tokens = torch.stack([whole[sequence][lengths[sequence] + step] for sequence in sequences])
            states = model.encode(PackedTokens(tokens, positions, torch.arange(len(lengths) + 1), 1), cache=cache)
            for state, sequence, position in zip(states, sequences, positions.tolist(), strict=True):
                torch.testing.assert_close(state, expected[sequence][position], rtol=1e-5, atol=1e-5)


def test_local_layers_keep_only_their_window() -> None:
    config = config_of("modernbert-decoder", layers=6)
    cache = KeyValueCache(config, [50, 3], 100, torch.device("cpu"))
    stored = sum(each.numel() for each in vars(cache)["_caches"].values())
    each = 2 * 2 * config.hidden  # keys and values of two sequences
    assert stored == each * (2 * 150 + 4 * 4)
    # A window wider than any text takes no more than the longest text.
    config = config_of("modernbert-decoder", layers=2, max_positions=64, local_attention=2**40)
    cache = KeyValueCache(config, [3], 10, torch.device("cpu"))
    assert sum(each.numel() for each in vars(cache)["_caches"].values()) == 2 * config.hidden * (13 + 65)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("feed_forward", ["geglu", "gelu"])
def test_operations_are_counted(family: str, every: int, feed_forward: str) -> None:
    """torch counts all products except those of attention, whose window is wider than these texts."""
    config = config_of(family, global_attn_every_n_layers=every, local_attention=1000, feed_forward=feed_forward)
    model = rough_model(config)
    ids = torch.arange(60)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.lm_head(model.encode(packed(ids, [30, 30])))
    lengths = np.array([30, 30])
    counted = config.train_flops(211, lengths, 60) / 3
    scores = 2 * 2 * config.hidden * config.layers * 2 * 30 * 30
    assert counted == counter.get_total_flops() + scores * (0.5 if family == FAMILIES[1] else 1.0)


@given(length=st.integers(1, 300), window=st.integers(1, 100), causal=st.booleans())
def test_pairs_within_windows_are_counted_one_by_one(length: int, window: int, causal: bool) -> None:
    family = FAMILIES[1] if causal else FAMILIES[0]
    every = config_of(family, local_attention=2 * window, global_attn_every_n_layers=1, layers=2)
    some = config_of(family, local_attention=2 * window, global_attn_every_n_layers=2, layers=2)
    reach = some.window(causal)
    pairs = sum(
        1 for row in range(length) for column in range(length)
        if abs(row - column) <= reach and (column <= row or not causal)
    )  # fmt: skip
    full = length**2 * (0.5 if causal else 1.0)
    lengths = np.array([length])
    saved = (every.train_flops(10, lengths, 1) - some.train_flops(10, lengths, 1)) / (6 * 2 * every.hidden)
    assert saved == pytest.approx(full - min(pairs, full))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"heads": 8}, "heads of width 3, and rotary positions need an even width"),
        ({"local_attention": 7}, "local_attention=7 is odd"),
        ({"local_attention": 0}, "local_attention"),
        ({"global_attn_every_n_layers": 0}, "global_attn_every_n_layers"),
        ({"positions": "relative"}, "'rotary' or 'learned'"),
        ({"attention_init": "neighbors"}, "family=modernbert has no attention_init"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        config_of("modernbert", **changes)


def test_presets_are_the_published_sizes() -> None:
    """Warner et al. 2024: 149 and 395 million parameters; Weller et al. 2025: the names are the parameters."""
    published = {"modernbert-base": 149, "modernbert-large": 395}
    for kind in ("encoder", "decoder"):
        published |= {f"ettin-{kind}-{size}": float(size[:-1]) for size in ("17m", "32m", "68m", "150m", "400m")}
        published[f"ettin-{kind}-1b"] = 1028
    for preset, millions in published.items():
        model = build_model_on_meta(parse_model_config(PRESETS[preset]), 50_368)
        assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.012)
