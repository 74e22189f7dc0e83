"""Connectionist temporal classification: the loss against a forward-backward of our own, and what fits."""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from made_up_pairs import CHARACTERS, recipe, write_jsonl
from packed_texts import packed
from pydantic import ValidationError
from torch import Tensor

from multihop.common.errors import UserError
from multihop.data_prep.dataset.shards import open_dataset
from multihop.eval.inference.ctc_search import collapse
from multihop.pretrain.check_effects import check_effects
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.data.index import build_indexes
from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.models.families import parse_model_config
from multihop.pretrain.objectives.ctc import min_states
from multihop.pretrain.run.throughput import step_flops

BLANK = 0
ENCODERS: list[dict[str, Any]] = [
    {"encoder": "lstm"}, {"encoder": "gru"}, {"encoder": "transformer", "heads": 2}
]  # fmt: skip
every_encoder = pytest.mark.parametrize("encoder", ENCODERS, ids=lambda each: each["encoder"])


def model_of(encoder: dict[str, Any], vocabulary: int = 9, source_vocabulary: int | None = None) -> Any:
    sizes = {"family": "ctc-encoder", "layers": 2, "hidden": 16, "max_positions": 40, "dropout": 0.0}
    model = build_model(parse_model_config({**sizes, **encoder}), vocabulary, source_vocabulary).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model.eval()


def forward_backward(log_probabilities: Tensor, target: list[int]) -> tuple[Tensor, Tensor]:
    """Return the log probability of a target, and the posterior of each emission (T, V) (Graves et al. 2006, section
    4.1, equations 6 to 11)."""
    extended = [BLANK, *itertools.chain.from_iterable((token, BLANK) for token in target)]
    steps, states = len(log_probabilities), len(extended)
    never = torch.tensor(-torch.inf, dtype=torch.float64)

    def scan(emissions: Tensor, labels: list[int]) -> Tensor:
        alpha = torch.full((steps, states), -torch.inf, dtype=torch.float64)
        alpha[0, :2] = emissions[0, labels[:2]]
        for t in range(1, steps):
            for s in range(states):
                skips = s > 1 and labels[s] not in (BLANK, labels[s - 2])
                before = [alpha[t - 1, s], alpha[t - 1, s - 1] if s else never, alpha[t - 1, s - 2] if skips else never]
                alpha[t, s] = torch.logsumexp(torch.stack(before), 0) + emissions[t, labels[s]]
        return alpha

    alpha = scan(log_probabilities, extended)
    beta = scan(log_probabilities.flip(0), extended[::-1]).flip(0, 1)
    total = torch.logsumexp(alpha[-1, -2:], 0)
    posterior = torch.zeros_like(log_probabilities)
    for s, token in enumerate(extended):
        posterior[:, token] += (alpha[:, s] + beta[:, s] - log_probabilities[:, token] - total).exp()
    return total, posterior


@settings(max_examples=20)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=4), seed=st.integers(0, 99)
)
def test_loss_and_gradient_are_those_of_forward_backward(lengths: list[tuple[int, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    pairs = [(rng.integers(1, 9, source), rng.integers(1, 4, target)) for source, target in lengths]
    pairs = [(source, target) for source, target in pairs if min_states(target) <= len(source)]
    assume(pairs)
    model = model_of(ENCODERS[0])
    sources, targets = (torch.from_numpy(np.concatenate([pair[side] for pair in pairs])) for side in (0, 1))
    source, target = (packed(ids, [len(pair[side]) for pair in pairs]) for side, ids in enumerate((sources, targets)))
    hidden = model.encode(source).detach().requires_grad_()
    model.encode = lambda _: hidden
    loss = model(source, target, BLANK)["ctc"]
    (gradient,) = torch.autograd.grad(loss, hidden)
    model.zero_grad()
    log_probabilities = model.emission_log_probabilities(hidden)
    expected, posteriors = torch.zeros((), dtype=torch.float64), []
    for part, (_, ids) in zip(log_probabilities.detach().split([len(each) for each, _ in pairs]), pairs, strict=True):
        total, posterior = forward_backward(part, ids.tolist())
        expected = expected - total
        posteriors.append(posterior)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-9, atol=1e-9)
    # The gradient with respect to the logits is the softmax minus the posterior (equation 16).
    of_logits = log_probabilities.detach().exp() - torch.cat(posteriors)
    torch.testing.assert_close(gradient, of_logits @ model.word.weight, rtol=1e-7, atol=1e-9)


def test_the_loss_is_the_sum_over_all_paths() -> None:
    model = model_of(ENCODERS[0], vocabulary=3)
    source = packed(torch.tensor([1, 2, 2, 1]), [4])
    log_probabilities = model.emission_log_probabilities(model.encode(source)).detach()
    paths = list(itertools.product(range(3), repeat=4))
    for target in ([1], [2, 2], [1, 2, 1], [1, 1]):
        found = [sum(log_probabilities[t, token] for t, token in enumerate(path)) for path in paths
                 if collapse(path, BLANK) == target]  # fmt: skip
        loss = model(source, packed(torch.tensor(target), [len(target)]), BLANK)["ctc"]
        torch.testing.assert_close(loss, -torch.logsumexp(torch.stack(found), 0))  # type: ignore[arg-type]


@every_encoder
def test_what_stands_beside_a_source_changes_nothing(encoder: dict[str, Any]) -> None:
    model, lengths = model_of(encoder), [5, 1, 9, 3]
    ids = torch.randint(1, 9, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        together = model.encode(packed(ids, lengths)).split(lengths)
        for part, state in zip(ids.split(lengths), together, strict=True):
            torch.testing.assert_close(state, model.encode(packed(part, [len(part)])))


@every_encoder
@pytest.mark.parametrize("source_vocabulary", [None, 12])
def test_every_parameter_is_trained(encoder: dict[str, Any], source_vocabulary: int | None) -> None:
    model = model_of(encoder, source_vocabulary=source_vocabulary).train()
    model(packed(torch.arange(1, 9), [5, 3]), packed(torch.tensor([1, 2, 3]), [2, 1]), BLANK)["ctc"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


@every_encoder
@pytest.mark.parametrize("source_vocabulary", [None, 12])
def test_only_an_embedding_that_is_the_output_matrix_gets_a_sparse_gradient(
    encoder: dict[str, Any], source_vocabulary: int | None
) -> None:
    model = model_of(encoder, source_vocabulary=source_vocabulary)
    model.encode(packed(torch.arange(1, 9), [5, 3]), sparse_lookup_grad=True).sum().backward()
    table = model.word if source_vocabulary is None else model.source_word
    assert table.weight.grad.is_sparse == (source_vocabulary is None)


@every_encoder
def test_the_operations_of_a_step_are_counted(encoder: dict[str, Any]) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from multihop.pretrain.objectives.batch import Batch
    from multihop.pretrain.packed_tokens import pack_sequences

    model = model_of(encoder)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model.emission_log_probabilities(model.encode(packed(torch.ones(15, dtype=torch.int64), [5] * 3)))
    sides: dict[str, Any] = {"source": pack_sequences([[1] * 5] * 3), "target": pack_sequences([[1] * 2] * 3)}
    batch = Batch(sides, np.ones(6, np.int64), {"ctc": 6}, 21)
    assert step_flops(model.config, 9, batch) / 3 == counter.get_total_flops()


def training(data: Path, indexes: Path, max_bad_fraction: float = 0.01, **phase: Any) -> BatchBuilder:
    fields = {"source": "en", "target": "es"}
    config = TrainingConfig.model_validate(
        {
            "data": {"sources": [{"path": "p", "fields": fields}], "max_bad_fraction": max_bad_fraction},
            "model": {"preset": "ctc-mini"},
            "phases": [{"seq_len": 64, "steps": 4, "global_batch_size": 8, **phase}],
        }
    )
    build_indexes(indexes, open_dataset(data), config)
    return BatchBuilder.open(config, data, indexes, 0, 1, [8])


def test_a_batch_has_sources_with_an_end_and_targets_without(ctc_data: Path, tmp_path: Path) -> None:
    builder = training(ctc_data, tmp_path)
    (batch,) = builder.step(0).micro_batches
    inputs: Any = batch.inputs
    ids = builder.data.manifest.tokenizer.special_ids
    sources = np.split(inputs["source"].input_ids, inputs["source"].cu_seqlens[1:-1])
    targets = np.split(inputs["target"].input_ids, inputs["target"].cu_seqlens[1:-1])
    pairs = {
        (*documents[:source], ids["end"], *documents[source:])
        for documents, source in (
            (builder.data.train.tokens(i).tolist(), int(builder.data.train.source_lengths[i]))
            for i in range(len(builder.data.train))
        )
    }
    assert all((*source.tolist(), *target.tolist()) in pairs for source, target in zip(sources, targets, strict=True))
    assert inputs["blank"] == ids["pad"] and batch.counts == {"ctc": sum(map(len, targets))}
    model = build_model(builder.config.model, builder.data.manifest.tokenizer.vocab_size)
    init_weights(model, 1)
    assert model(**to_device(batch.inputs, torch.device("cpu")))["ctc"].isfinite()


@pytest.fixture(scope="module")
def with_long_targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from multihop.data_prep.pipeline.prepare import prepare  # not above: a GPU's machine may lack libraries for text

    folder = tmp_path_factory.mktemp("long-targets")
    fits = [(f"a{'bc' * (number % 7 + 1)}{number}", f"a{number}") for number in range(90)]
    # With its end token a source of three has four states: enough for four tokens, but not if two equal ones are
    # neighbors, between which a blank is needed.
    longer = [("xyz", "zyyx"), *((f"y{number}", f"xyzxyz{number}") for number in range(9))]
    prepare(recipe(write_jsonl(folder / "a.jsonl", [*fits, *longer])), CHARACTERS, folder / "set")
    return folder / "set"


def test_targets_longer_than_their_sources_are_left_out_or_refused(
    with_long_targets: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refused = (
        r"(\d+) of \d+ training pairs have targets that need more states .*\(first: document \d+\), which "
        r"objective\.name=ctc cannot predict, and data\.max_bad_fraction=0\.01; raise it"
    )
    with pytest.raises(UserError, match=refused) as error:
        training(with_long_targets, tmp_path)
    matched = re.search(refused, str(error.value))
    assert matched is not None
    builder = training(with_long_targets, tmp_path, max_bad_fraction=0.5)
    left = builder.order.indexes[0][0].size
    documents = builder.data.train
    assert left == len(documents) - int(matched[1]) < len(documents)
    why = (
        "have targets that need more states than their sources have tokens, one for each token and for a blank between "
        r"equal ones \(first: document \d+\) and are left out"
    )
    assert re.search(rf"{matched[1]} of {len(documents)} training pairs {why}", caplog.text)
    indexed = sum("training pairs" in record.message for record in caplog.records)
    training(with_long_targets, tmp_path, max_bad_fraction=0.5)
    assert sum("training pairs" in record.message for record in caplog.records) == indexed + 1, "at every start"
    targets = [documents.tokens(i)[source:] for i, source in enumerate(documents.source_lengths)]
    assert documents.target_repeats.tolist() == [min_states(target) - len(target) for target in targets]
    assert documents.target_repeats.any()


def test_label_smoothing_which_ctc_does_not_read_is_refused() -> None:
    described = {"model": {"preset": "ctc-mini"}, "phases": [{"seq_len": 8, "steps": 1}]}
    check_effects(TrainingConfig.model_validate(described))
    smoothed = TrainingConfig.model_validate({**described, "objective": {"label_smoothing": 0.2}})
    complaint = (
        r"objective\.label_smoothing=0\.2 has no effect with objective\.name=ctc; remove it, or set "
        r"objective\.name=translation$"
    )
    with pytest.raises(UserError, match=complaint):
        check_effects(smoothed)


@pytest.mark.parametrize(
    ("described", "complaint"),
    [
        ({"encoder": "transformer"}, "encoder=transformer needs heads"),
        ({"encoder": "lstm", "heads": 2}, "heads=2 is for encoder=transformer, not lstm; remove it"),
        ({"encoder": "gru", "intermediate": 64}, "intermediate=64 is for encoder=transformer, not gru"),
        ({"encoder": "lstm", "hidden": 33}, "hidden=33 is odd"),
        ({"encoder": "transformer", "heads": 3}, "hidden=256 is not a multiple of heads=3"),
    ],
)
def test_impossible_encoders_are_refused(described: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        parse_model_config({"preset": "ctc-mini", **described})
