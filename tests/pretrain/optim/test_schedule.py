"""Learning rates: values that follow from the schedules' definitions, and properties of all schedules."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihop.common.errors import UserError
from multihop.pretrain.config import PhaseConfig
from multihop.pretrain.data.phases import locate
from multihop.pretrain.optim.schedule import factor, learning_rate

SCHEDULES = ["linear", "cosine", "polynomial", "inverse-sqrt", "warmup-stable-decay", "constant"]


def phase_of(schedule: str, **fields: Any) -> PhaseConfig:
    return PhaseConfig.model_validate({"schedule": schedule, "steps": 100, "lr": 2.0, "warmup_steps": 20, **fields})


def rates_of(phase: PhaseConfig) -> list[float]:
    return [learning_rate([phase], step) for step in range(phase.steps)]


@st.composite
def any_phase(draw: st.DrawFn) -> PhaseConfig:
    steps = draw(st.integers(1, 200))
    schedule = draw(st.sampled_from(SCHEDULES))
    decay = draw(st.floats(0.01, 1.0))
    longest = steps - 1 if schedule != "warmup-stable-decay" else min(steps - 1, steps - max(1, round(decay * steps)))
    return PhaseConfig(
        steps=steps,
        schedule=schedule,  # type: ignore[arg-type]  # one of them
        lr=draw(st.floats(1e-6, 10.0)),
        warmup_steps=draw(st.integers(0, longest)),
        power=draw(st.floats(0.2, 4.0)),
        decay_ratio=decay,
        min_lr_ratio=draw(st.sampled_from([0.0, 0.1, 1.0]) | st.floats(0.0, 1.0)),
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_climbs_in_equal_steps_to_the_highest_rate(schedule: str) -> None:
    rates = rates_of(phase_of(schedule))
    assert rates[:20] == [2.0 * (step + 1) / 20 for step in range(20)]
    assert max(rates) == 2.0


@pytest.mark.parametrize(
    ("phase", "middle", "last"),
    [  # after 20 steps of warm-up: step 60 is half of the way to step 100, step 99 is 79/80 of it
        (phase_of("linear"), 0.5, 1 / 80),
        (phase_of("linear", min_lr_ratio=0.1), 0.55, 0.1 + 0.9 / 80),
        (phase_of("cosine"), 0.5, (1 + math.cos(math.pi * 79 / 80)) / 2),
        (phase_of("cosine", min_lr_ratio=0.1), 0.55, 0.1 + 0.9 * (1 + math.cos(math.pi * 79 / 80)) / 2),
        (phase_of("polynomial", power=2.0), 0.25, (1 / 80) ** 2),
        (
            phase_of("polynomial", power=0.5, min_lr_ratio=0.2),
            0.2 + 0.8 * math.sqrt(0.5),
            0.2 + 0.8 * math.sqrt(1 / 80),
        ),
        (phase_of("warmup-stable-decay"), 1.0, 0.1),
        (phase_of("warmup-stable-decay", decay_ratio=0.8, min_lr_ratio=0.1), 0.55, 0.1 + 0.9 / 80),
        (phase_of("constant"), 1.0, 1.0),
        (phase_of("inverse-sqrt"), math.sqrt(20 / 61), math.sqrt(20 / 100)),
        (phase_of("inverse-sqrt", warmup_steps=0), math.sqrt(1 / 61), math.sqrt(1 / 100)),
    ],
    ids=lambda value: value.schedule if isinstance(value, PhaseConfig) else "",
)
def test_rates_are_what_the_definitions_say(phase: PhaseConfig, middle: float, last: float) -> None:
    rates = rates_of(phase)
    assert rates[60] == pytest.approx(2.0 * middle, rel=1e-12)
    assert rates[99] == pytest.approx(2.0 * last, rel=1e-12)


def test_inverse_sqrt_is_the_formula_of_vaswani_et_al() -> None:
    rates = rates_of(phase_of("inverse-sqrt"))
    formula = [min(number**-0.5, number * 20**-1.5) for number in range(1, 101)]
    assert rates == pytest.approx([2.0 * value / max(formula) for value in formula])


def test_warmup_stable_decay_is_stable_until_its_last_steps() -> None:
    rates = rates_of(phase_of("warmup-stable-decay", decay_ratio=0.3))
    assert rates[19:71] == [2.0] * 52
    assert rates[71:] == pytest.approx([2.0 * (100 - step) / 30 for step in range(71, 100)])


def test_warmup_stable_decay_without_a_stable_part_is_linear() -> None:
    assert rates_of(phase_of("warmup-stable-decay", decay_ratio=0.8)) == pytest.approx(rates_of(phase_of("linear")))


def test_polynomial_of_power_one_is_linear() -> None:
    assert rates_of(phase_of("polynomial", min_lr_ratio=0.3)) == rates_of(phase_of("linear", min_lr_ratio=0.3))


@given(any_phase())
def test_rates_stay_between_zero_and_the_highest_and_never_rise_after_warm_up(phase: PhaseConfig) -> None:
    rates = rates_of(phase)
    assert all(0 < rate <= phase.lr for rate in rates)
    after = rates[max(0, phase.warmup_length - 1) :]
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(after))
    if phase.schedule not in ("constant", "inverse-sqrt"):
        assert rates[-1] >= phase.lr * phase.min_lr_ratio * (1 - 1e-12)


@given(any_phase())
def test_rates_do_not_jump_where_warm_up_ends(phase: PhaseConfig) -> None:
    warmup = phase.warmup_length
    assert factor(phase, warmup) == 1.0 or phase.schedule == "inverse-sqrt"
    if warmup > 0:
        assert factor(phase, warmup - 1) == 1.0
        if phase.schedule == "inverse-sqrt":
            assert factor(phase, warmup) == pytest.approx(math.sqrt(warmup / (warmup + 1)))


@given(before=any_phase(), phase=any_phase(), after=any_phase(), data=st.data())
def test_a_phase_depends_on_no_other(
    before: PhaseConfig, phase: PhaseConfig, after: PhaseConfig, data: st.DataObject
) -> None:
    step = data.draw(st.integers(0, phase.steps - 1))
    assert learning_rate([before, phase, after], before.steps + step) == learning_rate([phase], step)


@pytest.mark.parametrize(("rule", "power"), [("sqrt", 0.5), ("linear", 1.0)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_follow_the_batch_size_up_a_ramp(rule: str, power: float, schedule: str) -> None:
    ramp = {
        "global_batch_size": 1024,
        "batch_ramp": [{"steps": 10, "global_batch_size": 64}, {"steps": 30, "global_batch_size": 256}],
    }
    plain = rates_of(phase_of(schedule, **ramp))
    scaled = rates_of(phase_of(schedule, **ramp, lr_scaling={"rule": rule, "global_batch_size": 256}))
    sizes = [64] * 10 + [256] * 30 + [1024] * 60
    assert scaled == pytest.approx([rate * (size / 256) ** power for rate, size in zip(plain, sizes, strict=True)])
    assert scaled[10:40] == plain[10:40]


@given(
    steps=st.integers(1, 300),
    warmup=st.floats(0.0, 0.99),
    lr=st.floats(1e-6, 10.0),
    schedule=st.sampled_from(["linear", "cosine", "constant"]),
)
def test_phases_of_older_recipes_keep_their_rates_bit_for_bit(
    steps: int, warmup: float, lr: float, schedule: str
) -> None:
    phase = PhaseConfig.model_validate({"steps": steps, "warmup_ratio": warmup, "lr": lr, "schedule": schedule})
    warmup_steps = round(warmup * steps)
    for step, rate in enumerate(rates_of(phase)):
        progress = (step - warmup_steps) / max(1, steps - warmup_steps)
        decayed = {"linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)), "constant": 1.0}
        assert rate == lr * ((step + 1) / warmup_steps if step < warmup_steps else decayed[schedule])


def test_phases_follow_one_another_and_warm_up_anew() -> None:
    phases = [
        PhaseConfig(steps=10, lr=1.0, warmup_ratio=0.2),
        PhaseConfig(steps=20, lr=0.5, warmup_ratio=0.1, schedule="cosine"),
    ]
    assert locate(phases, 9) == (0, 9)
    assert locate(phases, 10) == (1, 0)
    rates = [learning_rate(phases, step) for step in range(30)]
    assert rates[0] == 0.5 and rates[1] == rates[2] == 1.0
    assert rates[10] == 0.25 and rates[11] == 0.5
    assert 0 < rates[9] < 0.2 and 0 < rates[29] < 0.01
    with pytest.raises(UserError, match="step must be < 30"):
        learning_rate(phases, 30)


def test_a_far_step_costs_what_the_first_does() -> None:
    phase = PhaseConfig(steps=10**12)
    assert 0 < learning_rate([phase], 10**12 - 1) < learning_rate([phase], 10**11) < phase.lr
