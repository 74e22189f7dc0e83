"""Health metrics agree with their definitions on any number of ranks, and do not change the training."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kinds_of_families import TEXT_FAMILIES, model_section
from packed_texts import packed, sequences_of
from rank_jobs import evaluate_rough_model
from rank_pool import RankPool
from torch import Tensor

from multihop.data_prep.dataset.shards import open_dataset
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.data.index import build_indexes
from multihop.pretrain.engine.capture import capture_activations
from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.models.build import build_model, make_param_init
from multihop.pretrain.models.families import parse_model_config
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.run.health import attention_entropies, effective_rank, mean_cosine

Pool = Callable[[int], RankPool]
Seeds = st.integers(0, 2**32)
CPU = torch.device("cpu")


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_entropies(
    query: Tensor, key: Tensor, causal: bool, embeddings: Tensor | None = None, window: int | None = None
) -> Tensor:
    """Return (heads, T), the entropies of one sequence by the definition, query by query; NaN where there is one key.

    Args:
        embeddings: embeddings of distances from -2 on; farther ones count as these.
    """
    length, heads, width = query.shape
    found = torch.full((heads, length), math.nan, dtype=torch.float64)
    for head in range(heads):
        for row in range(length):
            columns = [each for each in range(length) if window is None or abs(each - row) <= window]
            columns = [each for each in columns if each <= row or not causal]
            seen = len(columns)
            keys = key[:, head]
            if embeddings is not None:
                keys = keys + embeddings[(torch.arange(length) - row + 2).clamp(0, len(embeddings) - 1)]
            scores = [float(query[row, head] @ keys[column]) / math.sqrt(width) for column in columns]
            largest = max(scores)
            weights = np.exp(np.array(scores) - largest)
            weights /= weights.sum()
            if seen > 1:
                weights = weights[weights > 0]
                found[head, row] = -float(np.sum(weights * np.log(weights))) / math.log(seen)
    return found


def looked_at(length: int) -> list[int]:
    return [(2 * number + 1) * length // 32 for number in range(16)]


@given(Seeds, st.integers(2, 12), st.integers(1, 6), st.floats(0, 5))
def test_the_mean_cosine_is_that_over_all_pairs(seed: int, count: int, width: int, common: float) -> None:
    vectors = drawn(seed, count, width) + common
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    pairs = [float(unit[i] @ unit[j]) for i in range(count) for j in range(count) if i != j]
    assert mean_cosine(unit.sum(0), count) == pytest.approx(sum(pairs) / len(pairs), abs=1e-9)


@given(Seeds, st.integers(1, 12), st.integers(1, 6), st.floats(0, 5))
def test_the_effective_rank_is_that_of_the_singular_values(seed: int, count: int, width: int, common: float) -> None:
    matrix = drawn(seed, count, width) + common
    singular = np.linalg.svd(matrix.numpy(), compute_uv=False)
    share = singular[singular > 0] / singular.sum()
    expected = math.exp(-float(np.sum(share * np.log(share))))
    assert effective_rank(matrix.T @ matrix) == pytest.approx(expected, rel=1e-5)
    assert 1 <= effective_rank(3 * matrix.T @ matrix) <= min(count, width) * (1 + 1e-6)


def test_the_effective_rank_of_what_is_not_finite_is_not_a_number() -> None:
    assert math.isnan(effective_rank(torch.full((3, 3), math.nan, dtype=torch.float64)))


@given(
    Seeds,
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
    st.floats(0, 30),
    st.none() | st.integers(0, 20),
)
def test_attention_entropies_are_those_of_each_query(
    seed: int, lengths: list[int], causal: bool, distances: bool, sharp: float, window: int | None
) -> None:
    sequences = sequences_of(lengths)
    query, key = sharp * drawn(seed, sum(lengths), 2, 4), drawn(seed + 1, sum(lengths), 2, 4)
    embeddings = drawn(seed + 2, 3 if causal else 5, 4) if distances else None
    relative = None if embeddings is None else query @ embeddings.T
    entropies, counted = attention_entropies(query, key, relative, sequences, causal, window)
    start = 0
    for number, length in enumerate(lengths):
        part = slice(start, start + length)
        expected = slow_entropies(query[part], key[part], causal, embeddings, window)[:, looked_at(length)]
        assert torch.equal(counted[number], ~expected.isnan())
        np.testing.assert_allclose(entropies[number], expected.nan_to_num(0.0), atol=2e-5)
        start += length


@pytest.mark.parametrize("causal", [False, True])
def test_uniform_attention_has_entropy_one_and_attention_to_one_key_zero(causal: bool) -> None:
    sequences = Sequences(torch.tensor([0, 7, 30]), 23, 30)
    uniform, counted = attention_entropies(torch.zeros(30, 2, 4), drawn(1, 30, 2, 4), None, sequences, causal)
    assert torch.allclose(uniform[counted], torch.tensor(1.0)) and counted.any()
    first_key = torch.zeros(30, 2, 4)
    first_key[[0, 7]] = 1000.0
    single, counted = attention_entropies(torch.ones(30, 2, 4), first_key, None, sequences, causal)
    assert torch.allclose(single[counted], torch.tensor(0.0))


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_every_family_is_observed_and_left_as_it_was(family: str) -> None:
    sizes = {"layers": 3, "hidden": 16, "heads": 2, "max_positions": 20, "dropout": 0.0}
    config = parse_model_config(model_section(family, **sizes))
    model: Any = build_model(config, 50)
    fill = make_param_init(model, 3)
    for name, parameter in model.named_parameters():
        fill(name, parameter)
    model.eval()
    ids, lengths = torch.arange(24) % 50, [9, 15]
    text = packed(ids, lengths)
    masked = {"masked_positions": torch.tensor([3, 17]), "labels": torch.tensor([1, 2])}
    targets = {"labels": ids} if TEXT_FAMILIES[family].causal else masked
    states: list[Tensor] = []
    shapes: list[tuple[Any, ...]] = []

    def on_attention(
        query: Tensor, key: Tensor, relative: Tensor | None, sequences: Sequences, causal: bool, window: int | None
    ) -> None:
        assert relative is None
        shapes.append((tuple(query.shape), tuple(key.shape), sequences.cu_seqlens.tolist(), causal))

    with torch.no_grad():
        before = model(text, **targets)
        with capture_activations(model, states.append, on_attention):
            during = model(text, **targets)
        after = model(text, **targets)
        every = torch.arange(24)
        of_masked = model.encode_masked(text, masked["masked_positions"], every)
        assert torch.equal(states[0], of_masked) and len(states) == 1
    # Two streams attend by terms of two positions, which are not captured.
    attends = hasattr(config, "heads") and TEXT_FAMILIES[family].default_objective != "plm"
    attentions = 3 if attends else 0
    assert shapes == [((24, 2, 8), (24, 2, 8), [0, 9, 24], TEXT_FAMILIES[family].causal)] * attentions
    assert before.keys() == during.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name])
        torch.testing.assert_close(during[name], value)
    assert not {"encode"} & vars(model).keys()


@pytest.fixture(scope="module")
def run_dir(bert_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("health")
    (folder / "data").symlink_to(bert_data)
    build_indexes(folder / "index", open_dataset(bert_data), TrainingConfig.model_validate(settings()))
    return folder


def settings(stage: int = 1, **engine: Any) -> dict[str, Any]:
    return {
        "seed": 3,
        "model": {"family": "bert", "layers": 2, "hidden": 16, "heads": 2, "max_positions": 48, "dropout": 0.1},
        "phases": [{"seq_len": 48, "global_batch_size": 4, "steps": 4}],
        "engine": {"deepspeed": {}, "micro_batch_size": 2, "zero_stage": stage, **engine},
    }


@pytest.fixture(scope="module")
def alone(run_dir: Path, pool: Pool) -> dict[str, Any]:
    """The evaluation on one rank, with which the others are compared."""
    (result,) = pool(1).run(evaluate_rough_model, run_dir, settings())
    assert result["unchanged"]
    row: dict[str, Any] = result["row"]
    return row


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_it_is_what_the_plain_model_computes_on_the_first_held_out_samples(
    alone: dict[str, Any], run_dir: Path
) -> None:
    config = TrainingConfig.model_validate(settings())
    batches = BatchBuilder.open(config, run_dir / "data", run_dir / "index", 0, 1, [2])
    model: Any = build_model(config.model, batches.data.manifest.tokenizer.vocab_size)
    fill = make_param_init(model, config.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(name, parameter)
            parameter.mul_(20.0 if parameter.ndim > 1 else 1.0)
    model.eval()
    samples = min(config.engine.heldout_samples, batches.heldout_index.size)
    part = batches.heldout(parts=16)
    assert part.samples == -(-samples // 16) > 1
    states, entropies = [], []
    for batch in part.micro_batches:
        text = to_device(batch.inputs, CPU)["packed"]
        with torch.no_grad():
            hidden = model.hidden_states(text)
        states.append(hidden[-1].double())
        for layer, x in zip(model.layers, hidden, strict=False):
            query, key = (
                project(x).detach().view(len(x), 2, 8) for project in (layer.attention.query, layer.attention.key)
            )
            for start, stop in pairwise(text.cu_seqlens.tolist()):
                slow = slow_entropies(query[start:stop], key[start:stop], causal=False)
                entropies.append(slow[:, looked_at(stop - start)].flatten())
    each = torch.cat(states)
    unit = each / each.norm(dim=1, keepdim=True)
    off_diagonal = (unit @ unit.T).sum() - len(each)
    assert alone["hidden_cosine"] == pytest.approx(float(off_diagonal) / (len(each) * (len(each) - 1)), abs=1e-6)
    singular = torch.linalg.svdvals(each)
    rank = float(torch.distributions.Categorical(singular / singular.sum()).entropy().exp())
    assert alone["hidden_rank"] == pytest.approx(rank / 16, rel=1e-5)
    assert alone["attention_entropy"] == pytest.approx(float(torch.cat(entropies).mean()), abs=1e-5)
    assert 0.05 < alone["attention_entropy"] < 0.95, "attention that is trivial would agree with anything"
    assert alone["unigram_gain"] == pytest.approx(1 - alone["heldout_mlm_loss"] / alone["unigram_loss"])


@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_say_the_same_in_every_zero_stage(
    alone: dict[str, Any], run_dir: Path, pool: Pool, stage: int
) -> None:
    results = pool(2).run(evaluate_rough_model, run_dir, settings(stage))
    for result in results:
        assert result["unchanged"]
        assert result["row"] == pytest.approx(alone, rel=2e-5)


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_compiled_layers_are_observed_without_being_compiled_again(
    alone: dict[str, Any], run_dir: Path, pool: Pool
) -> None:
    (result,) = pool(1).run(evaluate_rough_model, run_dir, settings(compile=True))
    assert result["graphs"] > 0 and result["more_graphs"] == 0
    assert result["unchanged"]
    assert result["row"] == pytest.approx(alone, rel=1e-4)
