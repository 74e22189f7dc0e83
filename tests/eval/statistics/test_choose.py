"""Each initialization is judged at its own best settings."""

from typing import Any

import pytest

from multihop.eval.statistics.choose import TrialGroup, choose, median_scores, merged


def row(lr: float, seed: int, dev: float | None, init: str = "pretrained", **other: Any) -> dict[str, Any]:
    """Return a trial whose test score is the opposite of its development score."""
    return {
        "task": "t", "init": init, "seed": seed, "hyperparameters": {"epochs": 3.0, "lr": lr}, "dev_value": dev,
        "value": None if dev is None else 1 - dev, "status": "failed" if dev is None else "ok",
        "higher_is_better": True, "checkpoint_step": 10 if init == "pretrained" else None, **other,
    }  # fmt: skip


def test_the_development_score_alone_chooses_and_each_start_for_itself() -> None:
    rows = [row(lr, seed, dev) for lr, devs in ((3e-4, (0.7, 0.9, 0.8)), (1e-4, (0.7, 0.7, 0.95)))
            for seed, dev in enumerate(devs)]  # fmt: skip
    rows += [row(lr, seed, dev, "random") for lr, dev in ((3e-4, 0.5), (1e-4, 0.6)) for seed in range(3)]
    result = choose(rows)
    ours, theirs = result[TrialGroup("t", "pretrained", 10)], result[TrialGroup("t", "random", None)]
    assert ours.chosen.hyperparameters["lr"] == 3e-4 and ours.chosen.dev == 0.8
    assert theirs.chosen.hyperparameters["lr"] == 1e-4
    assert [setting.hyperparameters["lr"] for setting in ours.grid] == [3e-4, 1e-4]
    assert sorted(ours.chosen.values) == pytest.approx([0.1, 0.2, 0.3])


def test_a_task_has_one_score_for_each_start_and_checkpoint() -> None:
    rows = [
        row(lr, seed, dev, metric="F1", checkpoint_step=step)
        for step, best in ((10, 0.5), (20, 0.75))
        for lr, dev in ((3e-4, best), (1e-4, 0.1))
        for seed in range(3)
    ]
    rows += [row(3e-4, seed, dev, "random", metric="F1") for seed, dev in enumerate((None, None, 0.25))]
    rows += [row(3e-4, 0, None, "random", task="failed", metric="F1")]
    rows += [row(3e-4, 0, 0.5, task=f"of {init}", init=init, metric="F1") for init in ("pretrained", "parent")]
    rows[-2]["checkpoint_step"] = None
    earlier, asked = (
        tuple(each for each in rows if (each["checkpoint_step"] == 10) is is_10) for is_10 in (True, False)
    )
    assert list(median_scores((*earlier, *asked))) == [
        ("t F1", 10, 0.5), ("t F1", 20, 0.25), ("t F1 random", 0, 0.75),
        ("of pretrained F1 eval.checkpoint", 0, 0.5), ("of parent F1 parent", 0, 0.5),
    ]  # fmt: skip


def test_where_less_is_better_the_least_wins() -> None:
    rows = [row(lr, 0, dev, higher_is_better=False) for lr, dev in ((3e-4, 20.0), (1e-4, 15.0))]
    assert choose(rows)[TrialGroup("t", "pretrained", 10)].chosen.dev == 15.0


def test_settings_that_fail_lose_to_those_that_do_not_and_ties_go_to_the_first() -> None:
    start = TrialGroup("t", "pretrained", 10)
    rows = [row(3e-4, 0, 0.9), row(3e-4, 1, None), row(1e-4, 0, 0.5), row(1e-4, 1, 0.5)]
    result = choose(rows)[start]
    assert result.chosen.hyperparameters["lr"] == 1e-4 and [setting.failed for setting in result.grid] == [1, 0]
    tied = choose([row(3e-4, 0, 0.5), row(1e-4, 0, 0.5)])[start]
    assert tied.chosen.hyperparameters["lr"] == 3e-4
    none = choose([row(3e-4, 0, None)])[start].chosen
    assert (none.rows, none.failed, none.dev) == ((), 1, None)


def test_checkpoints_choose_for_themselves() -> None:
    rows = [row(lr, 0, dev, checkpoint_step=step)
            for step, lr, dev in ((10, 3e-4, 0.9), (10, 1e-4, 0.8), (20, 3e-4, 0.8), (20, 1e-4, 0.9))]  # fmt: skip
    result = choose(rows)
    chosen = [result[TrialGroup("t", "pretrained", step)].chosen.hyperparameters["lr"] for step in (10, 20)]
    assert chosen == [3e-4, 1e-4]


def test_one_setting_is_chosen_for_several_models_together() -> None:
    """The first model alone would take 3e-4, and the second 1e-4."""
    devs = {"a": {3e-4: 0.9, 1e-4: 0.8}, "b": {3e-4: 0.1, 1e-4: 0.8}, "c": {3e-4: 0.7, 1e-4: None}}
    of_models = [
        choose([row(lr, 0, dev, key=f"{model}{lr}") for lr, dev in by_rate.items()])[TrialGroup("t", "pretrained", 10)]
        for model, by_rate in devs.items()
    ]
    assert [each.chosen.hyperparameters["lr"] for each in of_models] == [3e-4, 1e-4, 3e-4]
    assert merged(of_models[:2]).chosen.hyperparameters["lr"] == 1e-4
    together = merged(of_models)
    assert together.chosen.hyperparameters["lr"] == 3e-4, "a trial at 1e-4 failed"
    assert [(len(setting.rows), setting.failed) for setting in together.grid] == [(3, 0), (2, 1)]


def test_trials_from_random_weights_that_several_runs_share_count_once() -> None:
    rows = [row(3e-4, seed, 0.5, "random", key=f"random{seed}") for seed in range(3)]
    shared = choose(rows)[TrialGroup("t", "random", None)]
    assert merged([shared, shared]) == shared
