"""XLNet: both streams against transformers, what each token sees, and models that differ."""

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from huggingface import VOCABULARY, config_of, largest_error, model_with, rough_model, theirs_of
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_texts import packed
from pydantic import ValidationError
from small_shards import documents_of, tokenizer_of
from tables_of_tests import Table
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from multihop.common.counter_rng import random_bits
from multihop.common.errors import UserError
from multihop.pretrain.checkpoint.huggingface_import import import_model
from multihop.pretrain.engine.activation_checkpointing import checkpoint_activations
from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.models.build import build_model_on_meta, uses_weight_decay
from multihop.pretrain.models.families import parse_model_config
from multihop.pretrain.models.huggingface_weights import to_huggingface
from multihop.pretrain.objectives import plm
from multihop.pretrain.objectives.config import ObjectiveConfig

os.environ["HF_HUB_OFFLINE"] = "1"

BOUND = 1e-6
CPU = torch.device("cpu")


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Return |ours - theirs| / |theirs|, by the Euclidean norm."""
    return float((ours.detach() - theirs.detach()).norm() / theirs.detach().norm())


def plm_inputs(folder: Path, seed: int, seq_len: int, isolate: bool, mem_len: int = 0) -> dict[str, Any]:
    """Return a batch of the objective: documents of random lengths, with ids below the vocabulary's size."""
    rng = np.random.default_rng(seed)
    sentences = [rng.integers(1, 12, rng.integers(1, 4)).tolist() for _ in range(int(rng.integers(2, 7)))]
    documents, objective = documents_of(folder / "x.arrow", sentences), ObjectiveConfig.model_validate(
        {"name": "plm", "isolate_documents": isolate, "mask_rate": 0.3, "mem_len": mem_len}
    )  # fmt: skip
    rows = plm.build_index(documents, seq_len, 0, objective)
    keys = random_bits(seed, np.arange(len(rows), dtype=np.uint64))
    batch = plm.collate(documents, rows, keys, seq_len, tokenizer_of(np.ones(VOCABULARY, bool)), objective)
    assert batch.inputs["packed"].input_ids.max() < VOCABULARY  # type: ignore[union-attr]
    return to_device(batch.inputs, CPU)


def as_theirs(inputs: dict[str, Any], dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return a batch as transformers takes it: inputs with perm_mask and target_mapping, labels (B, P) with -100 where
    there is none, and which tokens are real, bool (B, T)."""
    text, order, at = inputs["packed"], inputs["factorization_order"], inputs["masked_positions"]
    real = torch.arange(text.max_seqlen) < text.cu_seqlens.diff()[:, None]
    rows = [torch.full(real.shape, filling).masked_scatter(real, flat)
            for filling, flat in ((0, text.input_ids), (0, text.token_type_ids), (-1, order))]  # fmt: skip
    sees = (rows[2][:, None] < rows[2][:, :, None]) | (rows[2][:, None] < 0)
    owners = torch.searchsorted(text.cu_seqlens, at, right=True) - 1
    counts = torch.bincount(owners, minlength=len(real))
    column = torch.arange(len(at)) - (counts.cumsum(0) - counts)[owners]
    mapping = torch.zeros(len(real), int(counts.max()), real.shape[1], dtype=dtype)
    mapping[owners, column, at - text.cu_seqlens[owners]] = 1.0
    labels = torch.full(mapping.shape[:2], -100)
    labels[owners, column] = inputs["labels"]
    given = {"input_ids": rows[0], "token_type_ids": rows[1], "attention_mask": real.to(dtype)}
    return {**given, "perm_mask": 1.0 - sees.to(dtype), "target_mapping": mapping}, labels, real


def both_models(
    seed: int, layers: int, heads: int, width: int, intermediate: int, dtype: torch.dtype
) -> tuple[Any, Any]:
    """Return a model, and that of transformers with the same weights."""
    config = config_of("xlnet", layers, heads * width, heads, 64, intermediate=intermediate)
    ours: Any = rough_model(config, seed).to(dtype)
    theirs = theirs_of(config).to(dtype)
    weights = dict(to_huggingface(config, 0, dict(ours.named_parameters())))
    theirs.load_state_dict({**weights, "lm_loss.weight": ours.word.weight})
    encodings = theirs.transformer.relative_positional_encoding  # in fp32 there, whatever the model's dtype
    theirs.transformer.relative_positional_encoding = lambda *sizes, **rest: encodings(*sizes, **rest).to(dtype)
    return ours, theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("seed", "layers", "heads", "width", "intermediate", "isolate"),
    [(1, 1, 1, 6, 3, False), (2, 2, 3, 14, 17, True), (3, 3, 5, 6, 50, False), (4, 2, 7, 10, 33, True)],
)
def test_both_streams_are_theirs(
    seed: int,
    layers: int,
    heads: int,
    width: int,
    intermediate: int,
    isolate: bool,
    dtype: torch.dtype,
    tmp_path: Path,
    table: Table,
) -> None:
    ours, theirs = both_models(seed, layers, heads, width, intermediate, dtype)
    inputs = plm_inputs(tmp_path, seed, int(21 + 4 * seed), isolate)
    given, labels, real = as_theirs(inputs, dtype)
    out = theirs(**given, labels=labels)
    states = ours.encode(
        inputs["packed"], token_indices=inputs["masked_positions"], factorization_order=inputs["factorization_order"]
    )
    logits = ours.lm_head(states)
    expected, loss = out.logits[labels >= 0], ours(**inputs)["plm"] / len(inputs["labels"])
    assert expected.std() > 0.05
    assert relative(logits, expected) < BOUND
    assert relative(loss, out.loss) < BOUND
    with torch.no_grad():
        here = ours.encode(inputs["packed"])
        bare = {name: given[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
        assert relative(here, theirs.transformer(**bare).last_hidden_state[real]) < BOUND

    out.loss.backward()
    F.cross_entropy(logits, inputs["labels"]).backward()
    there = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    mine = dict(to_huggingface(ours.config, 0, {name: each.grad for name, each in ours.named_parameters()}))
    assert mine.keys() == there.keys()
    whole = relative(*(torch.cat([grads[name].flatten() for name in mine]) for grads in (mine, there)))
    each = {name: relative(mine[name], there[name]) for name in mine}
    worst = max(each, key=lambda name: each[name])
    table(
        f"{str(dtype)[6:]}, {layers} layers of {heads} heads x {width}: logits {relative(logits, expected):.1e}, loss "
        f"{relative(loss, out.loss):.1e}, gradient {whole:.1e}, of one tensor at most {each[worst]:.1e} ({worst})"
    )
    assert whole < BOUND
    if dtype == torch.float64:  # in fp32 single tensors have tiny gradients, which are sums of large terms
        assert each[worst] < BOUND, worst


@pytest.mark.parametrize(("seed", "mem_len", "isolate"), [(1, 3, False), (2, 100, True), (3, 100, False)])
def test_a_memory_is_theirs(seed: int, mem_len: int, isolate: bool, tmp_path: Path, table: Table) -> None:
    ours, theirs = both_models(seed, 3, 2, 8, 30, torch.float64)
    theirs.transformer.mem_len = mem_len
    inputs = plm_inputs(tmp_path, seed, 12, isolate, mem_len)
    text, order, at, is_memory = (inputs[k] for k in ("packed", "factorization_order", "masked_positions", "is_memory"))
    states = ours.encode(text, token_indices=at, factorization_order=order, is_memory=is_memory)
    logits = ours.lm_head(states)
    expected, with_memory = [], 0
    for start, stop in pairwise(text.cu_seqlens.tolist()):
        memory = int(is_memory[start:stop].sum())
        first, mine = start + memory, at[(at >= start) & (at < stop)]
        if not len(mine):
            continue
        mems = None
        if memory:
            read = theirs.transformer(text.input_ids[None, start:first], use_mems=True)
            mems, with_memory = read.mems, with_memory + 1
        own = order[first:stop]
        sees = (own[None] < own[:, None]) | (own[None] < 0)
        mapping = F.one_hot(mine - first, stop - first).double()
        given = {"input_ids": text.input_ids, "token_type_ids": text.token_type_ids}
        out = theirs(
            **{name: flat[None, first:stop] for name, flat in given.items()},
            perm_mask=1.0 - sees.double()[None], target_mapping=mapping[None], mems=mems,
        )  # fmt: skip
        expected.append(out.logits[0])
    there = torch.cat(expected)
    assert with_memory > 1 and relative(logits, there) < BOUND
    for each in (there, logits):
        F.cross_entropy(each, inputs["labels"]).backward()
    gradients = dict(to_huggingface(ours.config, 0, {name: each.grad for name, each in ours.named_parameters()}))
    each_error = {name: relative(gradients[name], each.grad) for name, each in theirs.named_parameters()}
    worst = max(each_error, key=lambda name: each_error[name])
    table(f"memory of {mem_len}: logits {relative(logits, there):.1e}, a gradient {each_error[worst]:.1e} ({worst})")
    assert each_error[worst] < BOUND
    loss = ours(**inputs)["plm"] / len(inputs["labels"])
    assert relative(loss, F.cross_entropy(logits, inputs["labels"])) < BOUND


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(2, 20), min_size=1, max_size=5), data=st.data())
def test_a_prediction_depends_on_the_tokens_before_it_alone(lengths: list[int], data: st.DataObject) -> None:
    model: Any = rough_model(config_of("xlnet", 2, 16, 2, 32))
    total = sum(lengths)
    rng = np.random.default_rng(data.draw(st.integers(0, 99), label="seed"))
    ids = torch.from_numpy(rng.integers(5, VOCABULARY, total))
    # Each sequence has one token that all see, and an order of the others.
    order = torch.from_numpy(np.concatenate([rng.permutation(length) - 1 for length in lengths]))
    predicted = torch.tensor([data.draw(st.integers(0, total - 1), label="predicted")])
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    at = int(predicted)
    seen = (sequence == sequence[at]) & ((order < order[at]) | (order < 0))
    seen[at] = False
    embedded = torch.nn.Parameter(model.word.weight[ids].detach())
    model.word.weight.requires_grad_(False)
    text = packed(torch.arange(total), lengths)
    model.word = torch.nn.Embedding.from_pretrained(embedded, freeze=False)
    state = model.encode(text, token_indices=predicted, factorization_order=order)
    (gradient,) = torch.autograd.grad(state.square().sum(), model.word.weight, allow_unused=True)
    reached = gradient.abs().sum(1) > 0
    assert not (reached & ~seen).any()
    assert state.isfinite().all()


def test_masked_tokens_are_predicted_as_if_their_ids_were_others() -> None:
    model: Any = rough_model(config_of("xlnet", 2, 16, 2, 32))
    ids, at = torch.arange(5, 25), torch.tensor([3, 4, 11])
    with torch.no_grad():
        states = model.encode_masked(packed(ids, [12, 8]), at, at[:2])
        others = ids.clone()
        others[at] = 4
        assert torch.equal(states, model.encode_masked(packed(others, [12, 8]), at, at[:2]))
        others[0] = 4
        assert not torch.equal(states, model.encode_masked(packed(others, [12, 8]), at, at[:2]))


def test_nothing_to_predict_still_has_a_gradient_everywhere() -> None:
    model: Any = rough_model(config_of("xlnet", 2, 16, 2, 32))
    nothing = torch.empty(0, dtype=torch.int64)
    text = packed(torch.arange(5, 15), [6, 4], torch.tensor([0, 0, 0, 0, 0, 2, 0, 0, 0, 2]))
    model(text, nothing, nothing, torch.full((10,), -1))["plm"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_recomputed_activations_give_the_same_gradients(kind: Literal["selective", "full"], tmp_path: Path) -> None:
    inputs = plm_inputs(tmp_path, 5, 24, isolate=False)
    gradients = []
    for recomputed in (False, True):
        model: Any = rough_model(config_of("xlnet", 3, 16, 2, 32))
        if recomputed:
            checkpoint_activations(model, kind)
        model(**inputs)["plm"].backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_operations_are_those_that_torch_counts(tmp_path: Path) -> None:
    config = config_of("xlnet", 3, 16, 2, 64)
    model: Any = rough_model(config)
    inputs = plm_inputs(tmp_path, 5, 40, isolate=False)
    text, predicted = inputs["packed"], len(inputs["labels"])
    length = text.max_seqlen
    alone = packed(text.input_ids[:length], [length], text.token_type_ids[:length])
    at = torch.arange(0, length, 5)
    with FlopCounterMode(display=False) as counter:
        model.lm_head(model.encode_masked(alone, at, at)).sum().backward()
    expected = config.train_flops(VOCABULARY, np.array([length]), len(at))
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.05)
    assert config.train_flops(VOCABULARY, text.cu_seqlens.diff().numpy(), predicted) > 0


def test_an_odd_width_is_refused() -> None:
    sizes = {"family": "xlnet", "layers": 1, "hidden": 33, "heads": 3}
    with pytest.raises(ValidationError, match="hidden=33 is odd, and the encodings of relative positions are pairs"):
        parse_model_config(sizes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"attn_type": "uni"}, "attn_type='uni', and family xlnet needs 'bi'"),
        ({"bi_data": True}, "bi_data=True, and family xlnet needs False"),
        ({"clamp_len": 32}, "clamp_len=32, and family xlnet needs -1"),
        ({"mem_len": 256}, "mem_len=256, and family xlnet needs None"),
        ({"same_length": True}, "same_length=True, and family xlnet needs False"),
        ({"untie_r": False}, "untie_r=False, and family xlnet needs True"),
        ({"ff_activation": "relu"}, "ff_activation='relu', and family xlnet needs 'gelu'"),
        ({"n_head": 8}, r"of shape \[32, 4, 8\], and by config.json it is \[32, 8, 4\]"),
    ],
)
def test_models_with_other_equations_are_refused(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    theirs_of(config_of("xlnet", 1, 32, 4, 64)).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, **changes}))
    with pytest.raises(UserError, match=complaint) as refused:
        import_model(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_published_configuration_has_no_limit_of_positions(tmp_path: Path) -> None:
    config = config_of("xlnet", 1, 32, 4, 64)
    theirs = theirs_of(config)
    theirs.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["max_positions"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    found, _, weights = import_model(tmp_path)
    assert found == config.model_copy(update={"max_positions": 512})
    ids = torch.arange(5, 105)
    with torch.no_grad():  # longer than `max_positions` of the model that was saved
        ours = model_with(found, weights).encode(packed(ids, [100]))
        assert largest_error(ours, theirs.transformer(ids[None]).last_hidden_state[0]) < 1e-5


def test_weight_decay_is_for_matrices_and_the_biases_of_attention() -> None:
    config = parse_model_config({"family": "xlnet", "layers": 1, "hidden": 8, "heads": 2, "max_positions": 8})
    model = build_model_on_meta(config, VOCABULARY)
    for name, parameter in model.named_parameters():
        of_attention = name.startswith("layers.0.attention.") and name.endswith("bias")
        assert uses_weight_decay(name) == (parameter.ndim > 1 or of_attention), name
