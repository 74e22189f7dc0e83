"""docs/clusters/slurm.sbatch on a real Slurm, whose nodes are hosts of this machine."""

import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import yaml
from network_hosts import ROOT, Hosts
from slurm_hosts import Slurm, missing_programs
from workplace import json_lines, losses, make_workplace

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing_programs()), reason="needs Debian's packages slurmctld and slurmd"),
]
STEPS = 600


def test_a_job_saves_before_its_time_is_over_and_goes_on_when_it_runs_again(
    hosts: Hosts, texts: Path, tmp_path: Path
) -> None:
    checkout, runs = tmp_path / "checkout", tmp_path / "runs"
    checkout.mkdir()
    (checkout / ".venv").symlink_to(Path(sys.executable).parents[1])
    make_workplace(checkout, texts, "small", STEPS)
    recipe = yaml.safe_load((checkout / "recipe.yaml").read_text())
    recipe |= {"data": {**recipe["data"], "sources": [{"path": str(texts.absolute())}]}}
    recipe["eval"] = {"tasks": ["heldout-perplexity"], "seq_len": 64}
    (checkout / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    slurm = Slurm(hosts, tmp_path / "slurm")
    script = str(ROOT / "docs" / "clusters" / "slurm.sbatch")
    options = ["--nodes=2", f"--output={tmp_path}/output.txt", script]
    submitted = slurm.run("sbatch", *options, "recipe.yaml", "--runs", str(runs), "cluster.workers=2", folder=checkout)
    found = re.search(r"Submitted batch job (\d+)", submitted)
    assert found, submitted
    job, run, output = found[1], runs / "small", tmp_path / "output.txt"

    def wait_for_state(*wanted: str) -> None:
        deadline = time.monotonic() + 300
        while (state := slurm.state(job)) not in wanted:
            assert time.monotonic() < deadline, state + output.read_text()
            time.sleep(0.5)

    wait_for_state("RUNNING")
    deadline = time.monotonic() + 240
    while len(losses(run)) < 30:
        assert time.monotonic() < deadline and slurm.state(job) == "RUNNING", output.read_text()
        time.sleep(0.2)
    slurm.run("scancel", "--batch", "--signal=TERM", job)  # as --signal=B:TERM@300 does when its time is nearly over
    wait_for_state("PENDING")
    saved = max(losses(run))
    assert saved < STEPS
    # Slurm lets two minutes pass before it starts the job again.
    wait_for_state("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    assert slurm.state(job) == "COMPLETED", output.read_text()
    starts = json_lines(run / "launches.jsonl")
    assert [(row["world_size"], row["nodes"], row["step"]) for row in starts] == [(2, 2, 0), (2, 2, saved)]
    assert sorted(losses(run)) == list(range(1, STEPS + 1)) and (run / "report.html").exists()
    token = re.compile(rb"RAY_AUTH_TOKEN=([0-9a-f]{64})")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and token.search(path.read_bytes())]
    left = [process.name() for host in (0, 1) for process in hosts.processes(host)]
    assert not {"raylet", "gcs_server"} & set(left), left
    for folder in Path("/tmp").glob(f"ray-{job}"):
        shutil.rmtree(folder)
