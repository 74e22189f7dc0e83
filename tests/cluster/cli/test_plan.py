"""`multihop plan`: memory, time and cost of a recipe before it starts."""

import json
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from typer.testing import CliRunner
from workplace import begin, ended, wait_for

from multihop.cluster.cli.main import app
from multihop.cluster.cli.plan import described_gpu
from multihop.cluster.cli.plan_report import failures_line
from multihop.common.errors import FAILED, UserError
from multihop.common.gpus import GPUS

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
ONE_PHASE = "phases=[{seq_len: 64, global_batch_size: 64, steps: 1000}]"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "texts.txt").write_text("The river was a stone.\n")
    content = {
        "name": "planned",
        "data": {"sources": [{"path": str(tmp_path / "texts.txt")}]},
        "tokenizer": {"vocab_size": 1000},
        "model": {"preset": "bert-tiny"},
        "phases": [
            {
                "seq_len": 64,
                "global_batch_size": 64,
                "steps": 1000,
                "batch_ramp": [{"steps": 100, "global_batch_size": 16}],
            },
            {"seq_len": 128, "global_batch_size": 32, "steps": 100},
        ],
        "engine": {"precision": "bf16", "micro_batch_size": "auto"},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def plan(recipe: Path, *arguments: str) -> Any:
    result = CliRunner().invoke(app, ["plan", str(recipe), "--json", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_each_phase_with_its_memory_time_and_cost(recipe: Path) -> None:
    found = plan(recipe, "--gpus", "4", "--gpu", "H100", "--price", "2", "--failures", "0")
    first, second = found["plans"]
    assert (first["phase"], first["seq_len"], second["seq_len"]) == (0, 64, 128)
    assert first["micro_batch_size"] == 16 and first["micro_batches"] == 1
    assert 0 < first["between_steps"]["device"] < first["peak_bytes"] < 1e9
    for phase in (first, second):
        assert sum(phase["peak_by_category"].values()) == phase["peak_bytes"] and phase["micro_batch"] == "auto"
    # Saves after each 200 steps, held-out losses as often and before the first step; the last ones are in the second.
    assert first["hours"] == pytest.approx((first["phase_s"] + first["save_s"] + first["eval_s"]) / 3600)
    assert first["eval_s"] == pytest.approx(6 * second["eval_s"]) and second["eval_s"] > 0
    write_s = first["checkpoint_bytes"] / 1e9
    assert first["save_s"] == pytest.approx(5 * first["save_pause_s"])
    assert second["save_s"] == pytest.approx(first["save_pause_s"] + write_s)
    # A quarter of the samples in a tenth of the steps takes a quarter of their time, or all of it if launches limit it.
    assert 925 * (1 - 1e-9) <= first["phase_s"] / first["step_s"] <= 1000 * (1 + 1e-9)
    assert 0 < first["step_s"] < 1
    assert first["cost"] == pytest.approx(2 * 4 * first["hours"]) and 0 < first["mfu"] < 1
    assert found["with_failures"] is None


@pytest.mark.long
def test_a_slow_store_and_the_host_may_limit_a_run(recipe: Path) -> None:
    """The second phase begins with the last save of the first one in progress."""
    first, second = plan(recipe, "--gpus", "1", "--failures", "0", "--store", "0.001")["plans"]
    pause_s, write_s = first["save_pause_s"], first["checkpoint_bytes"] / 1e6
    assert write_s > first["phase_s"] + second["phase_s"]
    # Five saves in the first phase, of which four wait for the one before; the sixth one, at the end, is waited for.
    saves_s = 6 * (pause_s + write_s) - (first["save_s"] + second["save_s"])
    assert saves_s == pytest.approx(first["phase_s"] + second["phase_s"], rel=0.3)
    offload = [ONE_PHASE, "model={preset: bert-base, layers: 2}", "engine={zero_stage: 2, offload: optimizer}"]
    assert plan(recipe, "--gpus", "1", *offload)["plans"][0]["limited_by"] == "offload"


LONG = "phases=[{seq_len: 64, global_batch_size: 64, steps: 400_000_000}]"
ON_FOUR_NODES = ["--gpus", "16", "--nodes", "4", "--network", "100", LONG, "--failures", "20"]


def test_a_run_on_nodes_that_fail_takes_longer(recipe: Path) -> None:
    found = plan(recipe, *ON_FOUR_NODES)
    (phase,), failing = found["plans"], found["with_failures"]
    hours = (phase["phase_s"] + phase["eval_s"]) / 3600
    assert failing["checkpoint_bytes"] == 12 * found["plans"][0]["parameters"]
    assert hours < failing["hours"][0] <= failing["hours"][1] <= failing["hours"][2] < 1.1 * hours
    assert failing["failures"] == pytest.approx(4 * 20 / 1000 * hours / 24)
    assert 0.9 < failing["goodput"] < 1 and not failing["is_elastic"]


@pytest.mark.parametrize(
    ("workers", "is_elastic"), [("[12,16]", True), pytest.param("[13,16]", False, marks=pytest.mark.long)]
)
def test_it_continues_with_fewer_nodes_if_they_have_enough_gpus(recipe: Path, workers: str, is_elastic: bool) -> None:
    """A node has four."""
    found = plan(recipe, *ON_FOUR_NODES, f"cluster.workers={workers}", "engine.micro_batch_size=16")
    assert found["with_failures"]["is_elastic"] == is_elastic


@pytest.mark.parametrize(
    ("precision", "stages"), [("fp32", [0, 1, 2, 3]), pytest.param("bf16", [1, 2, 3], marks=pytest.mark.long)]
)
def test_all_stages_the_cheapest_that_fits_first(recipe: Path, precision: str, stages: list[int]) -> None:
    """Stage 0 is not for bf16: it would have no fp32 weights."""
    arguments = ["--gpus", "4", "--sweep", "--price", "0", ONE_PHASE, "engine.micro_batch_size=8", "model.layers=1"]
    plans = plan(recipe, *arguments, f"engine.precision={precision}")["plans"]
    assert len(plans) == 3 * len(stages) and {row["cost"] for row in plans} == {0.0}
    assert sorted({row["zero_stage"] for row in plans}) == stages
    hours = [row["hours"] for row in plans]
    assert hours == sorted(hours) and all(row["micro_batch_size"] == 8 for row in plans)


@pytest.mark.long
def test_stages_in_which_a_deepspeed_key_has_no_effect_are_left_out(recipe: Path) -> None:
    keys = "engine.deepspeed={zero_optimization: {allgather_bucket_size: 1000000}}"
    arguments = ["--gpus", "2", "--sweep", ONE_PHASE, "engine.micro_batch_size=8", "model.layers=1", keys]
    plans = plan(recipe, *arguments, "engine.precision=fp32")["plans"]
    assert {row["zero_stage"] for row in plans} == {1, 2} and len(plans) == 6


@pytest.mark.long
def test_smaller_micro_batches_that_take_less_memory(recipe: Path) -> None:
    only_stage_3 = ["engine={zero_stage: 3, offload: optimizer+weights}", "model.layers=1"]
    plans = plan(recipe, "--gpus", "4", "--sweep", *only_stage_3)["plans"]
    for kind in ("none", "selective", "full"):
        rows = [row for row in plans if row["activation_checkpointing"] == kind]
        # Of 16 and 8 samples a rank, in the two phases, all fit; a recipe has one micro-batch for all phases.
        assert {(row["micro_batch"], row["phase"], row["micro_batch_size"], row["micro_batches"]) for row in rows} == {
            *(("auto", 0, 16, 1), ("auto", 1, 8, 1)),
            *((4, 0, 4, 4), (4, 1, 4, 2)),
            *((2, 0, 2, 8), (2, 1, 2, 4)),
        }
        for phase in (0, 1):
            least, middle, most = sorted(
                (row["micro_batch_size"], row["peak_bytes"], -row["hours"]) for row in rows if row["phase"] == phase
            )
            assert least[1] <= middle[1] < most[1] and least[2] < middle[2] < most[2]
    settings = list(dict.fromkeys((row["activation_checkpointing"], row["micro_batch"]) for row in plans))
    assert [(row["activation_checkpointing"], row["micro_batch"]) for row in plans] == [
        setting for setting in settings for _ in range(2)
    ]


@pytest.mark.long
def test_several_numbers_of_gpus_those_with_the_fewest_gpu_hours_first(recipe: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plans.png"
    arguments = ["--gpus", "2,8", "--nodes", "2", "--network", "1", "--picture", str(picture), ONE_PHASE]
    plans = plan(recipe, *arguments)["plans"]
    assert {row["gpus"] for row in plans} == {2, 8}
    hours = [row["gpus"] * row["hours"] for row in plans]
    assert hours == sorted(hours)
    slow = next(row for row in plans if row["gpus"] == 8)  # in two nodes with a slow network between them
    assert slow["limited_by"] == "communication"
    assert picture.stat().st_size > 0


@pytest.mark.long
def test_real_steps_on_this_machine(recipe: Path) -> None:
    (phase,) = plan(recipe, "--probe", "--gpus", "1", ONE_PHASE, "engine.precision=fp32")["phases"]
    check_probed(phase)
    assert phase["micro_batch_size"] == 64 and phase["phase_s"][1] == 1000 * phase["step_s"][1]


def check_probed(phase: dict[str, Any]) -> None:
    low, middle, high = phase["step_s"]
    assert 0 < low <= middle <= high and phase["mfu"] > 0 and 0 < phase["bytes"] < phase["limit_bytes"]
    assert phase["hours"] == [seconds / 3600 for seconds in phase["phase_s"]]


@pytest.mark.long
def test_real_steps_of_each_phase(recipe: Path) -> None:
    first, second = plan(recipe, "--probe", "--gpus", "2")["phases"]
    assert (first["micro_batch_size"], second["micro_batch_size"]) == (32, 16)
    for phase in (first, second):
        check_probed(phase)
    # A tenth of the first phase's steps has a quarter of the samples.
    assert 900 < first["phase_s"][1] / first["step_s"][1] <= 1000 and second["phase_s"][1] == 100 * second["step_s"][1]


def test_what_does_not_fit_says_so(recipe: Path) -> None:
    result = CliRunner().invoke(
        app,
        [
            "plan",
            str(recipe),
            "--gpus",
            "4",
            "--gpu-memory",
            "1",
            "model.preset=bert-base",
            "engine.micro_batch_size=1",
        ],
        catch_exceptions=False,
    )
    assert result.exit_code == 0 and "does not fit" in result.stdout
    assert "1.4 of 1 GB with micro-batches of 1, 0.4 without" in result.stdout
    assert "Peak GB: 4 GPUs, ZeRO 1, checkpointing none, micro-batch 1" in result.stdout
    header, row = result.stdout.splitlines()[-4:-2]
    assert header.split()[0] == "phase" and "parameters" in header and "optimizer states" in header
    *parts, total = map(float, row.split()[1:])
    assert sum(parts) == pytest.approx(total, abs=0.05) and total == pytest.approx(1.4, abs=0.05)
    assert "The data is not prepared: every sample is assumed to have all tokens of its phase" in result.stdout


def test_of_prepared_data_nothing_is_assumed(recipe: Path, texts: Path, tmp_path: Path) -> None:
    prepared = [f"data={{sources: [{{path: {texts}}}], heldout_fraction: 0.1}}", "tokenizer.vocab_size=100"]
    changes = ["phases=[{seq_len: 64, global_batch_size: 4, steps: 1}]", "engine.micro_batch_size=1"]
    arguments = [str(recipe), "--runs", str(tmp_path / "runs"), *prepared, *changes]
    found = CliRunner().invoke(app, ["prep", *arguments], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    result = CliRunner().invoke(app, ["plan", *arguments, "--gpus", "2"], catch_exceptions=False)
    assert result.exit_code == 0 and "limited by" in result.stdout
    assert "not prepared" not in result.stdout


@pytest.mark.long
def test_no_more_ranks_than_pairs(recipe: Path) -> None:
    pairs = [
        "data.sources=[{path: pairs.jsonl, fields: {source: en, target: es}}]",
        "model={preset: transformer-tiny}",
        "tokenizer={special_tokens: t5, vocab_size: 1000}",
        "phases=[{seq_len: 64, global_batch_tokens: 1000, steps: 1}]",
        "engine.micro_batch_size=32",
    ]
    assert plan(recipe, "--gpus", "15", *pairs)["plans"][0]["micro_batch_size"] == 1
    complaint = re.escape(
        "--gpus=16 exceeds the 15 pairs of seq_len=64 tokens that phases[0].global_batch_tokens=1000 has"
    )
    for command in (["--gpus", "16"], ["--gpus", "16", "--probe"]):
        with pytest.raises(UserError, match=complaint):
            CliRunner().invoke(app, ["plan", str(recipe), *command, *pairs], catch_exceptions=False)


def test_a_planning_process_that_is_killed_is_reported(recipe: Path) -> None:
    command = begin(recipe.parent, "plan", str(recipe))

    def workers() -> list[psutil.Process]:
        children = psutil.Process(command.pid).children()
        return [each for each in children if "multihop.pretrain.plan.worker" in each.cmdline()]

    wait_for(workers, recipe.parent, command)
    workers()[0].kill()
    output = ended(recipe.parent, command, FAILED)
    assert "multihop: the planning process ended with exit code -9; see its messages above\n" in output


def test_a_known_gpu_with_other_figures() -> None:
    known = GPUS["A100 80GB"]
    assert described_gpu("A100-80", None, 312, None) == known
    faster = described_gpu("A100-80", 90, 624, 3000)
    assert faster.achievable_flops == 2 * known.achievable_flops and faster.fp32_flops == 2 * known.fp32_flops
    assert (faster.memory, faster.bandwidth) == (90e9, 3000e9)


def test_a_short_interval_between_saves_is_in_seconds() -> None:
    found = {
        "failures_per_1000_node_days": 5.0, "failures": 20.0, "repair_h": 4.0, "is_elastic": True,
        "hours": [1.0, 2.0, 3.0], "save_interval_s": 19.6, "checkpoint_bytes": 18.7e9, "goodput": 0.9,
    }  # fmt: skip
    assert "If it is saved every 20 s (18.7 GB), " in str(failures_line(found, 1024, None))
    assert "If it is saved every 3 min (18.7 GB), " in str(
        failures_line(found | {"save_interval_s": 180.0}, 1024, None)
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--gpu", "Voodoo"], "--gpu=Voodoo is not known; give one of B200"),
        (["--gpus", "8", "--nodes", "2"], "--network GBIT"),
        (["--network", "400"], "--network=400 is the bandwidth between nodes; give their number as --nodes M"),
        (["--gpus", "9", "--nodes", "2", "--network", "400"], "--gpus=9 cannot be divided among --nodes=2"),
        (
            ["--gpus", "13,32", "--nodes", "4", "--network", "400"],
            "--gpus=13 cannot be divided among 2 nodes of 8 GPUs",
        ),
        (["--failures", "inf"], "--failures=inf is not finite"),
        (["--gpu-memory", "inf"], "--gpu-memory=inf is not finite"),
        (["--gpu", " "], "--gpu=' ' is empty"),
        (["--probe", "--sweep"], "--probe measures one setting on this machine; remove --sweep"),
        (
            ["--probe", "--gpu", "A100-80", "--network", "400", "--failures", "5"],
            "--probe measures one setting on this machine; remove --gpu, --network, --failures",
        ),
        (["--probe", "--gpus", "1,2"], "--gpus=1,2: --probe measures one setting; give one number"),
        (["--picture", "no/such/directory.png"], "in a directory that exists"),
        (["--gpu", "V100-32"], "engine.precision=bf16: a V100 32GB has none"),
        (["--gpus", "128"], "--gpus=128 exceeds phases"),
        (["--gpus", "some"], "--gpus must be a positive integer"),
        (["--gpus", "0"], "--gpus must be a positive integer"),
    ],
)
def test_mistakes(recipe: Path, arguments: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        CliRunner().invoke(app, ["plan", str(recipe), *arguments], catch_exceptions=False)
