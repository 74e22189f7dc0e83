"""What the planned memory is for, beside what is counted by hand from the shapes of a small GPT-2 or BERT."""

from typing import Any

import pytest

from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.plan.assumed_batch import assumed_batch
from multihop.pretrain.plan.rank_trace import RankTrace, trace_rank

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
VOCABULARY, HIDDEN, POSITIONS, LAYERS = 1000, 128, 256, 2
RANKS = 8
MATRICES = LAYERS * 12 * HIDDEN**2
PARAMETERS = VOCABULARY * HIDDEN + POSITIONS * HIDDEN + MATRICES + LAYERS * 13 * HIDDEN + 2 * HIDDEN
"""Those of GPT-2: embeddings, and in each layer 12 squares of its width, 9 biases, and the weights of two norms."""
RELEASED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}
"""Keep no weight that another rank has too."""


def traced(
    family: str = "gpt2",
    ranks: int = 1,
    samples: int = 8,
    vocabulary: int = VOCABULARY,
    optimizer: str = "adamw",
    model: dict[str, int] | None = None,
    **engine: Any,
) -> tuple[Batch, RankTrace]:
    """A micro-batch, and a step of two of them."""
    sizes = {"layers": LAYERS, "hidden": HIDDEN, "heads": 4, "max_positions": POSITIONS, **(model or {})}
    config = TrainingConfig.model_validate(
        {
            "seed": 3,
            "model": {"family": family, **sizes},
            "objective": {"name": FAMILIES[family].default_objective},
            "phases": [{"seq_len": POSITIONS, "global_batch_size": 16 * RANKS, "steps": 9}],
            "optimizer": {"name": optimizer},
            "engine": {"micro_batch_size": samples, "precision": "bf16", "deepspeed": {}, **engine},
        }
    )
    batch = assumed_batch(config, 0, samples, vocabulary)
    trace = trace_rank(config, vocabulary, None, [batch] * 2, samples, ranks)
    for part, found in trace.categories.items():
        assert sum(found.values()) == trace.peaks[part]["device"] and min(found.values()) >= 0
    assert sum(trace.peak_by_category.values()) == trace.peak
    return batch, trace


@pytest.mark.parametrize(
    ("stage", "precision", "parameters", "optimizer_states", "gradients"),
    [
        (0, "fp32", 4, 8, 4),
        (1, "bf16", 2, 12 / RANKS, 4),
        (2, "bf16", 2, 12 / RANKS, 4 / RANKS),
        (3, "bf16", 2 / RANKS, 12 / RANKS, 4 / RANKS),
    ],
)
def test_each_zero_stage_divides_one_more_by_the_ranks(
    stage: int, precision: str, parameters: float, optimizer_states: float, gradients: float
) -> None:
    """Bytes of each parameter (Rajbhandari et al. 2020, figure 1), where gradients are summed in fp32."""
    zero = {"zero_optimization": RELEASED} if stage == 3 else {}
    _, trace = traced(ranks=RANKS, zero_stage=stage, precision=precision, deepspeed=zero)
    for part in ("backward", "update"):
        found = trace.categories[part]
        assert found["parameters"] == pytest.approx(parameters * PARAMETERS, rel=0.03)
        assert found["optimizer_states"] == pytest.approx(optimizer_states * PARAMETERS, rel=0.03)
    # The backward pass has also those that are not sent yet, and that of the output layer, in fp32.
    output = 4 * (VOCABULARY + 24) * HIDDEN
    assert gradients * PARAMETERS < trace.categories["backward"]["gradients"] < gradients * PARAMETERS + 2 * output
    if stage != 1:  # which sends them in the update
        assert trace.categories["update"]["gradients"] == pytest.approx(gradients * PARAMETERS, rel=0.03)


def test_gradients_of_a_micro_batch_are_gradients_before_they_are_summed() -> None:
    """In stage 2 a rank alone sums a bucket of all at the end of the backward pass: until then it has 2 bytes of each
    parameter, beside 4 of the sums."""
    vocabulary, hidden, layers = 64, 512, 4
    _, trace = traced(samples=1, vocabulary=vocabulary, model={"hidden": hidden, "layers": layers}, zero_stage=2)
    parameters = (vocabulary + POSITIONS) * hidden + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden
    assert trace.peak_by_category["gradients"] == pytest.approx((2 + 4) * parameters, rel=0.01)


def test_logits_are_those_of_predicted_tokens_alone_and_of_a_chunk_at_a_time() -> None:
    vocabulary, columns = 50_000, 50_048
    batch, trace = traced("bert", samples=16, vocabulary=vocabulary)
    assert batch.tokens == 16 * POSITIONS and len(batch.targets) < 0.2 * batch.tokens
    assert trace.peak_by_category["logits"] == 2 * len(batch.targets) * columns
    batch, trace = traced(samples=32, vocabulary=vocabulary)
    assert batch.tokens == len(batch.targets) == 8192
    # Whole, they would be 8,192 rows; a chunk has 2**28 scores, in a multiple of 64 rows.
    assert trace.peak_by_category["logits"] == 2 * 5312 * columns


def test_a_layer_under_full_checkpointing_keeps_its_input_alone() -> None:
    """2 bytes of each token and channel instead of about 34 (Korthikanti et al. 2022, section 4.1), which the backward
    pass makes again for a layer at a time."""

    def activations(kind: str, layers: int) -> float:
        _, trace = traced(model={"layers": layers}, vocabulary=64, activation_checkpointing=kind)
        return trace.peak_by_category["activations"] / (8 * POSITIONS * HIDDEN)

    few, many = (activations("full", layers) for layers in (3, 6))
    assert many - few == pytest.approx(3 * 2, rel=0.02)
    assert few - 3 * 2 == pytest.approx(34, rel=0.25)
    assert activations("none", 6) - activations("none", 3) == pytest.approx(3 * 34, rel=0.1)


def test_muon_keeps_one_moment_of_a_matrix() -> None:
    states = {name: traced(optimizer=name)[1].peak_by_category["optimizer_states"] for name in ("adamw", "muon")}
    assert states["adamw"] == pytest.approx(12 * PARAMETERS, rel=0.01)
    assert states["muon"] == pytest.approx(12 * PARAMETERS - 4 * MATRICES, rel=0.01)


def test_what_is_offloaded_is_not_on_the_gpu() -> None:
    _, trace = traced(zero_stage=2, offload="optimizer")
    assert trace.peak_by_category["optimizer_states"] == 0
    assert trace.peak_by_category["parameters"] == pytest.approx(2 * PARAMETERS, rel=0.01)


def test_communication_is_buckets_of_gradients_and_gathered_weights() -> None:
    def sent(stage: int, **zero: int) -> int:
        trace = traced(ranks=RANKS, zero_stage=stage, deepspeed={"zero_optimization": zero})[1]
        return trace.categories["backward"]["communication"]

    bucket = PARAMETERS // 10
    whole, small = sent(1), sent(1, reduce_bucket_size=bucket)
    assert whole >= 2 * PARAMETERS > 4 * small
    # In stage 3 the whole embedding is gathered, and a bucket is there all the time.
    assert 2 * VOCABULARY * HIDDEN < sent(3, reduce_bucket_size=bucket, **RELEASED) - 2 * bucket < 2 * PARAMETERS


def test_a_table_that_a_forward_pass_caches_is_a_buffer_of_every_trace() -> None:
    traces = [traced("transformer", samples=1)[1] for _ in range(2)]
    table = 2 * POSITIONS * HIDDEN
    assert [trace.peak_by_category["buffers"] for trace in traces] == [table, table]
    assert traces[0].peaks == traces[1].peaks
