"""Training is the same in every ZeRO stage, on any number of ranks, in any precision and with offload, also LAMB."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from covering import short_and_long, three_way_combinations
from numpy.typing import NDArray
from rank_jobs import begin_training, loss_scales, norm_of_equal_passes, train_on_pairs
from rank_pool import RankPool
from reference import PlainTraining, train_plainly
from tables_of_tests import Table

from multihop.pretrain.engine.deepspeed_config import KEYS

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1800)]
Pool = Callable[[int], RankPool]

STEPS, SEQUENCES = 30, 5
LR = {"lamb": 2e-2, "adamw": 2e-3, "muon": 5e-3}
PRECISIONS = {"fp32": (2e-6, 1e-6), "bf16": (5e-3, 8e-2), "fp16": (5e-4, 6e-3)}
"""Largest deviations of losses (relative) and weights (absolute) from the plain loop's, which is in fp32. In bf16 an
element whose gradient is about zero has the sign of its rounding, and Adam makes a whole step of it."""
NORMS = {"fp32": 1e-5, "bf16": 5e-2, "fp16": 5e-3}
"""Largest relative deviations of the norms of gradients."""
PLACES = [
    (stage, offload)
    for stage in (0, 1, 2, 3)
    for offload in ("none", "optimizer", "optimizer+weights")
    if not ((stage == 0 and offload != "none") or (stage < 3 and offload == "optimizer+weights"))
]
ALL = [
    (optimizer, precision, ranks, stage, offload)
    for optimizer in ("lamb", "adamw", "muon")
    for precision in PRECISIONS
    for ranks in (1, 2, 4)
    for stage, offload in PLACES
    if precision == "fp32" or stage > 0
]
SHORT = [
    ("lamb", "fp32", 2, 0, "none"),
    ("lamb", "fp32", 2, 2, "optimizer"),
    ("lamb", "fp32", 2, 3, "none"),
    ("lamb", "bf16", 2, 3, "optimizer"),
    ("lamb", "fp16", 2, 1, "none"),
    ("adamw", "bf16", 2, 2, "none"),
    ("muon", "fp32", 2, 1, "none"),
    ("muon", "bf16", 2, 3, "none"),
]
"""Each optimizer, stage and precision. Offloaded weights, and LAMB on 4 ranks, are tried with layer_lr_decay below."""
MORE = [
    ("muon", "bf16", 4, 3, "optimizer"),
    ("lamb", "fp32", 4, 1, "none"),
    ("adamw", "fp32", 2, 3, "optimizer+weights"),
    ("lamb", "fp32", 1, 0, "none"),
    ("lamb", "fp32", 2, 1, "none"),
    ("lamb", "fp32", 4, 1, "optimizer"),
    ("lamb", "fp32", 4, 2, "none"),
    ("lamb", "bf16", 2, 1, "none"),
    ("lamb", "fp16", 2, 2, "none"),
    ("adamw", "fp32", 2, 2, "none"),
    ("adamw", "fp16", 2, 1, "optimizer"),
    ("muon", "fp32", 2, 0, "none"),
    ("muon", "fp32", 2, 2, "optimizer"),
    ("muon", "fp32", 2, 3, "none"),
    ("muon", "fp32", 4, 1, "none"),
]

LAYER_WISE_SHORT = [("adamw", 2, 3, "optimizer+weights"), ("lamb", 2, 2, "optimizer"), ("muon", 2, 2, "none")]
LAYER_WISE_MORE = [("adamw", 2, 0, "none"), ("lamb", 1, 0, "none"), ("lamb", 4, 3, "none"), ("muon", 2, 3, "none")]
LAYER_WISE_MORE += [("lamb", 4, 1, "none"), ("muon", 4, 1, "optimizer"), ("muon", 2, 0, "none")]


SHORT_OFFLOADED = (
    ("fp32", 3, "optimizer+weights"),
    ("bf16", 1, "optimizer"),
    ("fp16", 2, "optimizer"),
    ("bf16", 3, "optimizer"),
)

SHORT_MUON = (("fp32", 1, "none"), ("fp16", 1, "none"), ("bf16", 3, "optimizer"))


DECIDED = ("train_micro_batch_size_per_gpu", "gradient_clipping", "managed_gradient_accumulation", "bf16.enabled")
DECIDED += ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "bf16.check_grad_overflow")
DECIDED += tuple(f"zero_optimization.{key}" for key in ("stage", "round_robin_gradients", "zero_hpz_partition_size"))
DECIDED += tuple(f"zero_optimization.{section}.device" for section in ("offload_optimizer", "offload_param"))
"""Keys of ds_config.json that can have one value only."""


def settings(optimizer: str, precision: str = "fp32", stage: int = 1, offload: str = "none") -> dict[str, Any]:
    return {
        "seed": 3,
        "model": {"family": "bert", "layers": 2, "hidden": 16, "heads": 2, "max_positions": 32, "dropout": 0.0},
        "phases": [{"seq_len": 16, "global_batch_size": SEQUENCES, "steps": STEPS, "lr": LR[optimizer]}],
        "optimizer": {"name": optimizer, "weight_decay": 0.01},
        # A low first loss scale: a step that overflows is a step less, and another training than the plain loop's.
        "engine": {
            "deepspeed": {"fp16": {"initial_scale_power": 6}},
            "micro_batch_size": 1,
            "precision": precision,
            "zero_stage": stage,
            "offload": offload,
        },
    }


@cache
def plainly(optimizer: str, steps: int = STEPS, skipped: tuple[int, ...] = ()) -> PlainTraining:
    return train_plainly(settings(optimizer), steps, SEQUENCES, skipped)


def gathered(results: list[dict[str, Any]], kind: str) -> dict[str, NDArray[np.float32]]:
    """Return whole tensors from the slices of all ranks, each of which must be owned exactly once."""
    whole = {}
    for name, shape in results[0]["shapes"].items():
        flat = np.full(math.prod(shape), np.nan, np.float32)
        for result in results:
            for key, values in result["state"].items():
                if key.startswith(f"{kind}/{name}@"):
                    start = int(key.rpartition("@")[2])
                    assert np.isnan(flat[start : start + len(values)]).all(), f"{key} is owned twice"
                    flat[start : start + len(values)] = values
        assert not np.isnan(flat).any(), f"nobody owns all of {kind}/{name}"
        whole[name] = flat.reshape(shape)
    return whole


def deviations(results: list[dict[str, Any]], expected: PlainTraining) -> tuple[float, float]:
    """Return the largest deviations of losses (relative) and of weights (absolute) from the plain loop.

    Attention's key bias is left out: it has no influence on the loss, so that its gradient is nothing but rounding,
    which Adam's division makes as large as any other.
    """
    found = gathered(results, "weight")
    compared = [name for name in expected.weights if not name.endswith("attention.key.bias")]
    of_weights = max(float(np.abs(found[name] - expected.weights[name].numpy()).max()) for name in compared)
    return largest(results[0]["losses"], expected.losses), of_weights


def largest(ours: list[float], theirs: list[float]) -> float:
    """Return the largest relative deviation."""
    return max(abs(one / other - 1) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("optimizer", "precision", "ranks", "stage", "offload"),
    short_and_long(SHORT, [*MORE, *three_way_combinations(ALL)]),
)
def test_thirty_steps_are_those_of_a_plain_loop(
    pool: Pool, table: Table, optimizer: str, precision: str, ranks: int, stage: int, offload: str
) -> None:
    results = pool(ranks).run(train_on_pairs, settings(optimizer, precision, stage, offload), STEPS, SEQUENCES)
    expected = plainly(optimizer)
    of_losses, of_weights = deviations(results, expected)
    what = f"{optimizer:5}  {precision}  {ranks} ranks  stage {stage}  {offload:17}"
    table(f"{what}  from the plain loop: losses {of_losses:.1e} (relative), weights {of_weights:.1e}")
    loss_bound, weight_bound = PRECISIONS[precision]
    assert of_losses < loss_bound and of_weights < weight_bound
    assert largest(results[0]["norms"], expected.norms) < NORMS[precision]
    for other in results[1:]:
        assert other["losses"] == results[0]["losses"]
        assert all(np.array_equal(values, results[0]["module"][name]) for name, values in other["module"].items())
    assert results[0]["updates"] == STEPS
    first = plainly(optimizer, 0).weights
    moved = max(float((weight - first[name]).abs().max()) for name, weight in expected.weights.items())
    assert moved > 0.01, "a training that moves nothing would agree with anything"


@pytest.mark.parametrize(
    ("optimizer", "ranks", "stage", "offload"),
    short_and_long(LAYER_WISE_SHORT, LAYER_WISE_MORE),
)
def test_with_layer_wise_learning_rate_decay_steps_are_those_of_a_plain_loop(
    pool: Pool, optimizer: str, ranks: int, stage: int, offload: str
) -> None:
    given = settings(optimizer, "fp32", stage, offload)
    given["optimizer"]["layer_lr_decay"] = 0.5
    expected = train_plainly(given, STEPS, SEQUENCES)
    results = pool(ranks).run(train_on_pairs, given, STEPS, SEQUENCES)
    of_losses, of_weights = deviations(results, expected)
    loss_bound, weight_bound = PRECISIONS["fp32"]
    assert of_losses < loss_bound and of_weights < weight_bound
    assert largest(results[0]["norms"], expected.norms) < NORMS["fp32"]
    assert deviations(results, plainly(optimizer))[1] > 1000 * weight_bound


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
def test_with_norms_of_local_pieces_it_would_not_be_lamb(pool: Pool, stage: int) -> None:
    results = pool(2).run(train_on_pairs, settings("lamb", stage=stage), STEPS, SEQUENCES, (), True)
    _, of_weights = deviations(results, plainly("lamb"))
    assert of_weights > 100 * PRECISIONS["fp32"][1]


@pytest.mark.parametrize(
    ("optimizer", "precision", "stage", "offload"),
    [
        pytest.param(optimizer, precision, stage, offload, marks=[] if short else [pytest.mark.long])
        for optimizer in ("lamb", "muon")
        for precision in PRECISIONS
        for stage, offload in PLACES
        if precision == "fp32" or stage > 0
        for of_lamb in [offload == "none" or (precision, stage, offload) in SHORT_OFFLOADED]
        for short in [of_lamb if optimizer == "lamb" else (precision, stage, offload) in SHORT_MUON]
    ],
)
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(
    pool: Pool, optimizer: str, precision: str, stage: int, offload: str
) -> None:
    spoiled = (2, 3)
    results = pool(2).run(train_on_pairs, settings(optimizer, precision, stage, offload), 8, SEQUENCES, spoiled)
    for result in results:
        assert result["applied"] == [True, True, False, False, True, True, True, True]
        assert result["untouched"] == [True, True]
        assert result["updates"] == 6
    expected = plainly(optimizer, 8, spoiled)
    of_losses, of_weights = deviations(results, expected)
    loss_bound, weight_bound = PRECISIONS[precision]
    assert of_losses < loss_bound and of_weights < weight_bound
    assert largest(results[0]["norms"][4:], expected.norms[4:]) < NORMS[precision]


@pytest.mark.parametrize(
    ("optimizer", "stage", "offload"),
    [*(("adamw", stage, "optimizer") for stage in (1, 2, 3)), ("adamw", 1, "none"), ("muon", 2, "none")],
)
def test_a_loss_scale_that_starts_too_high_comes_down_and_training_starts(
    pool: Pool, optimizer: str, stage: int, offload: str
) -> None:
    started = settings(optimizer, "fp16", stage, offload)
    started["engine"]["deepspeed"] = {"fp16": {"initial_scale_power": 24, "hysteresis": 1}}
    applied = pool(2).run(train_on_pairs, started, 16, SEQUENCES)[0]["applied"]
    assert not any(applied[:3]) and all(applied[-4:])


def test_a_dynamic_loss_scale_is_resumed_and_a_static_one_is_the_recipes(pool: Pool) -> None:
    fixed, adapted = {"loss_scale": 128}, {"initial_scale_power": 20, "hysteresis": 1}
    for before, after, expected in (
        (adapted, adapted, lambda scale: scale),
        (adapted, fixed, lambda _: 128.0),
        (fixed, adapted, lambda _: 2.0**20),
        (fixed, {"loss_scale": 64}, lambda _: 64.0),
    ):
        first, second = settings("adamw", "fp16"), settings("adamw", "fp16")
        first["engine"]["deepspeed"], second["engine"]["deepspeed"] = {"fp16": before}, {"fp16": after}
        reached, resumed = pool(1).run(loss_scales, first, second)[0]
        assert resumed == expected(reached)
        assert before is fixed or reached < 2.0**20


@pytest.mark.parametrize(
    ("stage", "offload"),
    [(2, "optimizer"), *(pytest.param(stage, "none", marks=pytest.mark.long) for stage in (1, 3))],
)
def test_narrow_gradients_of_many_micro_batches_are_added_up_in_fp32(pool: Pool, stage: int, offload: str) -> None:
    # In bf16 a sum stops growing when a term is a 256th of it.
    one, many = (
        pool(2).run(norm_of_equal_passes, settings("adamw", "bf16", stage, offload), passes)[0] for passes in (1, 300)
    )
    assert many["norm"] == pytest.approx(one["norm"], rel=5e-3)


def test_the_norm_of_large_gradients_is_the_same_in_every_stage(pool: Pool) -> None:
    norms = []
    for stage in (0, 1, 2, 3):
        large = settings("adamw", stage=stage)
        large["model"] |= {"hidden": 64}
        norms.append(pool(1).run(norm_of_equal_passes, large, 1, 30_522)[0]["norm"])
    assert norms == pytest.approx([norms[-1]] * 4, rel=1e-6)


def test_weights_lie_where_vectorized_kernels_can_read_them(pool: Pool) -> None:
    # The output's bias has 61 elements, that of the two classes 2.
    found = pool(1).run(norm_of_equal_passes, settings("lamb", "bf16"), 1)[0]["offsets"]
    assert len(found) > 20 and {name for name, offset in found.items() if offset} == {"next_sentence.bias"}


VALUES = {"true or false": (True, False), "a whole number, 0 or more": (0, 1000), "a number, 0 or more": (0, 64.0)}
VALUES |= {"a whole number above 0": (1, 1000), "an even number above 0": (2, 1000)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "fp32"), (1, "fp32"), (1, "bf16"), (2, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")]
)
def test_every_value_of_a_passed_on_key_trains_alike(pool: Pool, table: Table, stage: int, precision: str) -> None:
    plain = settings("lamb", precision, stage)
    expected = pool(2).run(train_on_pairs, plain, 2, SEQUENCES)[0]
    for key, (kind, stages) in KEYS.items():
        if stage not in stages or key in DECIDED or key.startswith("fp16"):
            continue
        for value in VALUES[kind.description]:
            nested: Any = value
            for part in reversed(key.split(".")):
                nested = {part: nested}
            given = {**plain, "engine": {**plain["engine"], "deepspeed": nested}}
            found = pool(2).run(train_on_pairs, given, 2, SEQUENCES)[0]
            furthest = max(largest(found[what], expected[what]) for what in ("losses", "norms"))
            table(f"stage {stage}  {precision}  {key}={value}: {furthest:.1e}")
            assert furthest < (1e-6 if precision == "fp32" else 1e-2), (key, value)


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_recomputed_activations_give_the_same_training(pool: Pool, stage: int, kind: str) -> None:
    saved = settings("adamw", stage=stage)
    saved["model"]["dropout"] = 0.1
    recomputed = {**saved, "engine": {**saved["engine"], "activation_checkpointing": kind}}
    ours, theirs = (pool(2).run(train_on_pairs, each, 4, SEQUENCES) for each in (recomputed, saved))
    assert ours[0]["losses"] == theirs[0]["losses"]


def test_zero_3_takes_the_memory_of_a_module_at_a_time(pool: Pool) -> None:
    whole, apart = (pool(2).run(begin_training, settings("adamw", stage=stage)) for stage in (1, 3))
    elements = sum(math.prod(shape) for shape in whole[0]["shapes"].values())
    assert [result["most"] for result in whole] == [elements, elements]
    assert max(result["most"] for result in apart) < elements / 4
    ours, theirs = gathered(apart, "weight"), gathered(whole, "weight")
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["selective", "none", "full"])
def test_compiled_layers_give_the_same_training(pool: Pool, kind: str) -> None:
    plain = settings("adamw")
    compiled = {**plain, "engine": {**plain["engine"], "compile": True, "activation_checkpointing": kind}}
    ours, theirs = (pool(1).run(train_on_pairs, each, 3, SEQUENCES)[0] for each in (compiled, plain))
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    first, *others = ours["graphs"]
    assert first > 0, "something was compiled"
    assert set(others) == {first}, "five batches of different lengths a step, and no compilation after the first"
