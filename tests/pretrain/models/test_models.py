"""The model families and their layers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds_of_families import STACKED, TEXT_FAMILIES, model_section
from packed_texts import packed, sequences_of
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F

from multihop.pretrain.models.build import build_model, init_weights, make_param_init
from multihop.pretrain.models.cpu.dropout import Dropout, keep_mask, keep_probability
from multihop.pretrain.models.families import FAMILIES, parse_model_config
from multihop.pretrain.models.layers.attention import Sequences, attend
from multihop.pretrain.models.layers.fused_linear_cross_entropy import fused_linear_cross_entropy
from multihop.pretrain.packed_tokens import PackedTokens

SIZES = {"layers": 2, "hidden": 32, "heads": 4, "max_positions": 40, "dropout": 0.0}
CPU = torch.device("cpu")
Lengths = st.lists(st.integers(1, 40), min_size=1, max_size=9)


def described(family: str) -> dict[str, Any]:
    return model_section(family, **SIZES, embedding=16)


def model_of(family: str, seed: int = 1) -> Any:
    model = build_model(parse_model_config(described(family)), 100)
    init_weights(model, seed)
    return model.eval()


def rough(family: str) -> Any:
    """Return a model with weights under which tokens influence one another."""
    model = model_of(family)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@pytest.mark.parametrize("family", STACKED)
def test_initial_weights_depend_on_seed_and_name_alone(family: str) -> None:
    one, same, other = model_of(family), model_of(family), model_of(family, seed=2)
    deeper = build_model(parse_model_config({**described(family), "layers": 3}), 100)
    init_weights(deeper, 1)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name))
        if parameter.ndim > 1:
            assert not torch.equal(parameter, other.get_parameter(name))
            if family not in ("awd-lstm", "awd-lstm-backward", "gpt2", "modernbert", "modernbert-decoder"):
                # The last layer's width or the projections into the residual stream of the others depend on the depth.
                assert torch.equal(parameter, deeper.get_parameter(name))
    # Cut at two deviations, a normal distribution has 0.88 of its deviation.
    small = dict.fromkeys(("gpt", "gpt2", "roberta", "xlnet"), 0.02)
    uniform = dict.fromkeys(("awd-lstm", "awd-lstm-backward"), 0.1 / 3**0.5)
    expected = {**small, **uniform, "bilm": 16**-0.5}.get(family, 0.0176)
    assert abs(one.get_parameter("word.weight").std().item() / expected - 1) < 0.06


@pytest.mark.parametrize("family", STACKED)
def test_with_a_unigram_bias_a_model_begins_as_a_unigram_model(family: str) -> None:
    sizes = {**described(family), "output_bias": "unigram"}
    if "output_bias" not in STACKED[family].config.model_fields:
        with pytest.raises(ValidationError, match=f"output_bias=unigram: family={family} has no output_bias"):
            parse_model_config(sizes)
        return
    config = parse_model_config(sizes)
    frequencies = np.random.default_rng(0).dirichlet(np.full(100, 0.5)) + 1e-6
    unigram = np.log(frequencies / frequencies.sum())
    model: Any = build_model(config, 100)
    fill = make_param_init(model, 1, unigram)
    for name, parameter in model.named_parameters():
        fill(name, parameter)
    asked = torch.arange(0, 40, 3)
    hidden = model.encode_masked(packed(torch.arange(40), [40]), asked, asked)
    predicted = model.lm_head(hidden).log_softmax(-1)
    assert (predicted - torch.from_numpy(unigram)).abs().max() < 0.5
    zeros = parse_model_config({**sizes, "output_bias": "zeros"})
    bias = model.get_parameter("word_bias").clone()
    make_param_init(build_model(zeros, 100), 1, unigram)("word_bias", bias)
    assert not bias.any()


@pytest.mark.parametrize("family", STACKED)
@settings(max_examples=15)
@given(lengths=Lengths, data=st.data())
def test_what_stands_beside_a_sequence_changes_nothing(family: str, lengths: list[int], data: st.DataObject) -> None:
    model = rough(family)
    if data.draw(st.booleans(), label="equal lengths"):
        lengths = [lengths[0]] * len(lengths)
    order = data.draw(st.permutations(range(len(lengths))), label="order")
    generator = torch.Generator().manual_seed(sum(lengths))
    texts = [torch.randint(0, 100, (length,), generator=generator) for length in lengths]
    with torch.no_grad():
        together = model.encode(packed(torch.cat([texts[i] for i in order]), [lengths[i] for i in order]))
        for text, place in zip(together.split([lengths[i] for i in order]), order, strict=True):
            alone = model.encode(packed(texts[place], [lengths[place]]))
            assert text.isfinite().all()
            torch.testing.assert_close(text, alone, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", STACKED)
@settings(max_examples=15)
@given(lengths=Lengths, data=st.data())
def test_states_that_are_asked_for_are_those_of_all(family: str, lengths: list[int], data: st.DataObject) -> None:
    model, total = rough(family).double(), sum(lengths)
    asked = torch.tensor(data.draw(st.lists(st.integers(0, total - 1), max_size=9), label="asked"), dtype=torch.int64)
    ids = torch.randint(0, 100, (total,), generator=torch.Generator().manual_seed(total))
    together = model.encode(packed(ids, lengths)).index_select(0, asked)
    alone = model.encode(packed(ids, lengths), token_indices=asked)
    torch.testing.assert_close(alone, together)
    weights = [parameter for name, parameter in model.named_parameters() if name.startswith(("word.", "layers."))]
    expected, found = (torch.autograd.grad((each**3).sum(), weights, allow_unused=True) for each in (together, alone))
    for one, other in zip(found, expected, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("family", [name for name, family in TEXT_FAMILIES.items() if family.causal])
@settings(max_examples=15)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6), more=st.integers(1, 9))
def test_states_with_a_key_value_cache_are_those_without(family: str, lengths: list[int], more: int) -> None:
    model = rough(family).double()
    generator = torch.Generator().manual_seed(sum(lengths))
    texts = [torch.randint(0, 100, (length + more,), generator=generator) for length in lengths]
    with torch.no_grad():
        whole = [model.encode(packed(text, [len(text)])) for text in texts]
        cache = model.new_cache(lengths, more, CPU, torch.float64)
        prompts = [text[:length] for text, length in zip(texts, lengths, strict=True)]
        for text, states in zip(
            model.encode(packed(torch.cat(prompts), lengths), cache=cache).split(lengths), whole, strict=True
        ):
            torch.testing.assert_close(text, states[: len(text)])
        for step in range(more):
            cache.advance()
            at = torch.tensor(lengths) + step
            ids = torch.stack([text[place] for text, place in zip(texts, at, strict=True)])
            states = model.encode(PackedTokens(ids, at, torch.arange(len(texts) + 1), 1), cache=cache)
            torch.testing.assert_close(states, torch.stack([each[i] for each, i in zip(whole, at, strict=True)]))


@pytest.mark.parametrize("family", STACKED)
def test_who_sees_what(family: str) -> None:
    model, ids = rough(family), torch.randint(0, 100, (20,), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[10:] = (changed[10:] + 1) % 100
    one, other = (model.encode(packed(text, [20])) for text in (ids, changed))
    assert not torch.allclose(one[10:], other[10:])
    if STACKED[family].causal:
        torch.testing.assert_close(one[:10], other[:10])
    else:
        assert not torch.allclose(one[:10], other[:10], atol=1e-3)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_the_losses_are_those_of_all_logits(family: str) -> None:
    model, lengths = rough(family), [16, 1, 16, 10]
    generator = torch.Generator().manual_seed(2)
    tokens = sum(lengths)
    ids = torch.randint(5, 100, (tokens,), generator=generator)
    text = packed(ids, lengths, torch.arange(tokens) % 2 if TEXT_FAMILIES[family].has_token_types else None)
    hidden = model.encode(text)
    logits = model.lm_head(hidden)
    if TEXT_FAMILIES[family].causal:
        wanted = torch.randint(5, 100, (tokens,), generator=generator)
        sums = model(text, labels=wanted)
    else:
        at, wanted = torch.tensor([2, 16, 20, 40]), torch.tensor([7, 8, 9, 7])
        labels = torch.tensor([0, 1, 1, 0])
        pair = {"bert": {"is_random_next": labels}, "albert": {"is_swapped": labels}}.get(family, {})
        sums = model(text, masked_positions=at, labels=wanted, **pair)
        logits = model.lm_head(model.encode_masked(text, at, at))
        if pair:
            task, head = ("nsp", model.next_sentence) if family == "bert" else ("sop", model.sentence_order)
            pairs = head(model.pool(hidden[[0, 16, 17, 33]]))
            torch.testing.assert_close(sums[task], F.cross_entropy(pairs, labels, reduction="sum"))
            assert sums[f"{task}_hits"] == (pairs.argmax(1) == labels).sum()
    of_words = sums[next(name for name in ("clm", "mlm", "plm") if name in sums)]
    torch.testing.assert_close(of_words, F.cross_entropy(logits, wanted, reduction="sum"))
    of_words.backward()
    assert all(part.grad.isfinite().all() for part in model.parameters() if part.grad is not None)


def attention_inputs(lengths: list[int], dtype: torch.dtype, width: int = 8) -> tuple[list[Tensor], Sequences]:
    generator = torch.Generator().manual_seed(len(lengths))
    parts = [torch.randn(sum(lengths), 2, width, generator=generator, dtype=dtype) for _ in range(3)]
    return [part.requires_grad_() for part in parts], sequences_of(lengths)


def dense(parts: list[Tensor], lengths: list[int], causal: bool, masks: list[Tensor] | None, scale: float) -> Tensor:
    """Return attention by the formula, sequence by sequence; `masks` has (heads, T, T) for each sequence."""
    out = []
    for number, (q, k, v) in enumerate(zip(*(part.split(lengths) for part in parts), strict=True)):
        scores = torch.einsum("qhw,khw->hqk", q, k) / q.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        weights = scores.softmax(-1)
        if masks is not None:
            weights = weights * masks[number] * scale
        out.append(torch.einsum("hqk,khw->qhw", weights, v))
    return torch.cat(out)


@settings(max_examples=40)
@given(lengths=Lengths, causal=st.booleans())
def test_attention_stays_within_each_sequence(lengths: list[int], causal: bool) -> None:
    parts, sequences = attention_inputs(lengths, torch.float64)
    expected = dense(parts, lengths, causal, None, 1.0)
    torch.testing.assert_close(attend(*parts, sequences, causal, 0.0), expected)
    # At this rate no element is dropped: the blocks of the way with dropout are seen alone.
    blocked = attend(*parts, sequences, causal, 1e-9)
    torch.testing.assert_close(blocked, expected)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(blocked, parts, upstream), torch.autograd.grad(expected, parts, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[5, 5, 5], [9], [1, 1], [200, 200], [16, 16, 15]])
def test_dropped_attention_is_that_of_the_same_masks(lengths: list[int], causal: bool) -> None:
    parts, sequences = attention_inputs(lengths, torch.float64)
    rate, heads, max_seqlen = 0.3, 2, max(lengths)
    torch.manual_seed(11)
    out = attend(*parts, sequences, causal, rate)
    torch.manual_seed(11)
    # All these heads fit into a block, whose rows are cut at every 128 under a causal mask.
    masks = torch.zeros(len(lengths) * heads, max_seqlen, max_seqlen, dtype=torch.bool)
    for row in range(0, max_seqlen, 128 if causal else max_seqlen):
        stop = min(max_seqlen, row + 128) if causal else max_seqlen
        masks[:, row:stop, :stop] = keep_mask(masks[:, row:stop, :stop].shape, rate)
    per_sequence = [
        mask[:, :length, :length]
        for mask, length in zip(masks.view(len(lengths), heads, max_seqlen, max_seqlen), lengths, strict=True)
    ]
    expected = dense(parts, lengths, causal, per_sequence, 1 / keep_probability(rate))
    torch.testing.assert_close(out, expected)
    upstream = torch.randn(out.shape, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(out, parts, upstream), torch.autograd.grad(expected, parts, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[4, 4], [5, 3, 1]])
def test_the_gradient_of_attention_with_dropout(lengths: list[int], causal: bool) -> None:
    parts, sequences = attention_inputs(lengths, torch.float64, width=3)

    def drop(*given: Tensor) -> Tensor:
        torch.manual_seed(5)
        return attend(*given, sequences, causal, 0.25)

    assert torch.autograd.gradcheck(drop, parts)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_masks_keep_what_their_rate_says_in_every_lane(rate: float) -> None:
    torch.manual_seed(3)
    count = 400_000
    kept = keep_mask(torch.Size([count, 4]), rate).numpy()
    share = keep_probability(rate)
    assert abs(share - (1 - rate)) <= 0.5 / 2**16
    sigma = np.sqrt(share * (1 - share) / count)
    assert abs(kept.mean() - share) < 4 * sigma / 2
    assert (np.abs(kept.mean(0) - share) < 4 * sigma).all()
    # Four elements come of one number of 64 bits, and none of them tells anything about another.
    correlations = np.corrcoef(kept.T)[np.triu_indices(4, 1)]
    neighbors = np.corrcoef(kept[:-1].ravel(), kept[1:].ravel())[0, 1]
    assert (np.abs([*correlations, neighbors]) < 4.5 / np.sqrt(count)).all()


@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (0,)])
def test_masks_of_any_shape(shape: tuple[int, ...]) -> None:
    assert keep_mask(torch.Size(shape), 0.5).shape == shape


def test_dropout_scales_what_it_keeps_and_is_off_in_evaluation() -> None:
    x = torch.randn(1000, 33, requires_grad=True)
    layer = Dropout(0.1)
    out = layer(x)
    kept = out != 0
    torch.testing.assert_close(out[kept], x[kept] / keep_probability(0.1))
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient != 0, kept)
    torch.testing.assert_close(gradient[kept], torch.full_like(gradient[kept], 1 / keep_probability(0.1)))
    assert torch.equal(layer.eval()(x), x)


# The last two are of several chunks; in the last one the rows do not fill them.
@pytest.mark.parametrize(
    ("rows", "vocabulary"),
    [(1, 7), (50, 100), (0, 7), pytest.param(400, 100_000, marks=pytest.mark.long), (437, 100_001)],
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_of_the_vocabulary(rows: int, vocabulary: int, with_bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    random: Callable[..., Tensor] = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    given = [random(rows, 16), random(vocabulary, 16), random(vocabulary)][: 3 if with_bias else 2]
    ours = [part.to(dtype).requires_grad_() for part in given]
    theirs = [part.detach().float().requires_grad_() for part in ours]
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    loss = fused_linear_cross_entropy(ours[0], ours[1], ours[2] if with_bias else None, targets)
    expected = F.cross_entropy(F.linear(*theirs), targets, reduction="sum")
    assert loss.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    (3 * loss).backward()
    (3 * expected).backward()
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None and other.grad is not None and one.grad.dtype == dtype
        scale = float(other.grad.abs().max()) if other.grad.numel() else 1.0
        torch.testing.assert_close(one.grad.float(), other.grad, rtol=tolerance, atol=tolerance * scale)
    with torch.no_grad():
        again = fused_linear_cross_entropy(ours[0], ours[1], ours[2] if with_bias else None, targets)
    torch.testing.assert_close(again, loss.detach(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 7), (50, 100)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_loss_with_smoothed_labels(rows: int, vocabulary: int, with_bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    shapes = [(rows, 16), (vocabulary, 16), (vocabulary,)][: 3 if with_bias else 2]
    ours = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    theirs = [part.detach().float().requires_grad_() for part in ours]
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    loss = fused_linear_cross_entropy(ours[0], ours[1], ours[2] if with_bias else None, targets, 0.1)
    expected = F.cross_entropy(F.linear(*theirs), targets, reduction="sum", label_smoothing=0.1)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    (3 * loss).backward()
    (3 * expected).backward()
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None and other.grad is not None
        scale = float(other.grad.abs().max())
        torch.testing.assert_close(one.grad.float(), other.grad, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"preset": "bert-huge"}, "unknown preset 'bert-huge'; known are albert-base, "),
        (
            {"preset": "bert-tiny", "family": "bart"},
            f"unknown family 'bart'; known are {', '.join(FAMILIES)}",
        ),
        ({"preset": "bert-tiny", "family": ["bert"]}, "unknown family"),
        ({"preset": ["bert-tiny"]}, "unknown preset"),
        ({"preset": "bert-tiny", "heads": 3}, "not a multiple of heads=3"),
        ({"preset": "bert-tiny", "hidden": "wide"}, "valid integer"),
        ({"preset": "bert-tiny", "embedding": 64}, "embedding=64: family=bert has no embedding; .* family=albert"),
    ],
)
def test_impossible_models_are_refused(given: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        parse_model_config(given)


def test_null_unsets_a_key_of_another_family() -> None:
    """An override of a recipe with another family does this."""
    content = {"preset": "gpt2", "output_bias": None, "attention_init": None}
    assert parse_model_config(content) == parse_model_config({"preset": "gpt2"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_for_many_lengths_are_the_fallback_on_a_cpu(causal: bool, dtype: torch.dtype) -> None:
    cu_seqlens, tokens = torch.tensor([0, 5, 6, 70, 103]), 103
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(tokens, 4, 64, generator=generator, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(tokens, 4, 64, generator=generator)
    here = attend(*parts, Sequences(cu_seqlens, 64, tokens), causal, 0.0)
    wanted = torch.autograd.grad(here, parts, upstream)
    there = [part.detach().to("cuda", dtype).requires_grad_() for part in parts]
    out = attend(*there, Sequences(cu_seqlens.cuda(), 64, tokens), causal, 0.0)
    found = torch.autograd.grad(out, there, upstream.to("cuda", dtype))
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    torch.testing.assert_close(out.float().cpu(), here.detach(), **close)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.float().cpu(), theirs, **close)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("lengths", [[5, 1, 64, 33], [64, 64]])
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu_a_window_is_that_of_a_cpu(causal: bool, lengths: list[int]) -> None:
    cu_seqlens, tokens = torch.tensor([0, *lengths]).cumsum(0), sum(lengths)
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(tokens, 4, 64, generator=generator, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(tokens, 4, 64, generator=generator)
    here = attend(*parts, Sequences(cu_seqlens, max(lengths), tokens), causal, 0.0, window=7)
    wanted = torch.autograd.grad(here, parts, upstream)
    for dtype, close in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        there = [part.detach().to("cuda", dtype).requires_grad_() for part in parts]
        out = attend(*there, Sequences(cu_seqlens.cuda(), max(lengths), tokens), causal, 0.0, window=7)
        found = torch.autograd.grad(out, there, upstream.to("cuda", dtype))
        for ours, theirs in zip((out, *found), (here, *wanted), strict=True):
            torch.testing.assert_close(ours.float().cpu(), theirs, rtol=close, atol=close)
