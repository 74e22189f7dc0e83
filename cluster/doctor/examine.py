"""Checks the cluster of this process, or another one by a job on its head.

The command of that job is `python -m multihop.cluster.doctor.examine REQUEST.json`.
"""

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from multihop.cluster.doctor.findings import ClusterReport, findings
from multihop.cluster.doctor.rounds import CheckRequest, Echo, gather
from multihop.cluster.doctor.smoke_test import smoke_test
from multihop.cluster.jobs.archive import code_to_send, format_untracked, untracked_files
from multihop.cluster.jobs.head_script import result_of, run_head_job
from multihop.cluster.jobs.head_scripts.inspect_head import code_hash
from multihop.cluster.jobs.submit import inspect_head
from multihop.cluster.ray.jobs import Jobs
from multihop.cluster.ray.session import ray_session
from multihop.cluster.runs.code_version import code_version
from multihop.cluster.runs.recipe import Recipe, validate_recipe

RESULT_PREFIX = "multihop doctor: "
PROGRESS_PREFIX = "multihop doctor does: "
"""Prefixes of lines of the output: the report as JSON, and progress."""
_REQUEST = "request.json"


def make_request(recipe: Recipe | None, runs: str | None, gpu: bool | None) -> CheckRequest:
    """Return a request to check what a run of this recipe needs; without a recipe, what any run needs.

    Args:
        runs: folder of all runs on the cluster, or s3://BUCKET/PREFIX.
    """
    stores = [runs] if runs else []
    if runs and runs.startswith("s3://"):
        runs = None
    if recipe is None:
        return CheckRequest(gpu=gpu, stores=stores, runs=runs)
    if recipe.checkpoint.location is not None:
        stores.append(recipe.checkpoint.location)
    return CheckRequest(
        gpu=gpu,
        stores=stores,
        tracks=True,
        tracking=recipe.tracking.uri,
        variables=recipe.cluster.env,
        ranks=recipe.cluster.worker_range[0],
        runs=runs,
        recipe=recipe.model_dump(mode="json"),
    )


def examine(request: CheckRequest, echo: Echo) -> ClusterReport:
    """Check the cluster that RAY_ADDRESS names, or Ray started on this machine.

    Returns:
        The report of `gather`; step, the result of `smoke_test`, if there are a recipe and no problems so far;
        and findings, a list.
    """
    with ray_session(None, 1):
        report = gather(request, echo)
    if request.recipe is not None and request.runs is not None and not findings(report):
        echo("a step, a checkpoint, a restart, another step")
        report["step"] = smoke_test(validate_recipe(request.recipe, "the recipe"), Path(request.runs))
    return report | {"findings": [asdict(finding) for finding in findings(report)]}


def examine_remotely(jobs: Jobs, request: CheckRequest, echo: Echo) -> ClusterReport:
    """Run `examine` as a small job on a cluster's head; returns its report. The code is sent if the head has another.

    Raises:
        HeadScriptFailed: the job failed.
    """
    local = code_version()
    installed = inspect_head(jobs, "").code
    is_same = installed is not None and installed == code_hash(local.package)
    code = {} if is_same else code_to_send(local)
    if code and (new := untracked_files(local)):
        echo(f"with files that git does not track: {format_untracked(new)}")
    contents = {_REQUEST: json.dumps(asdict(request)).encode()}
    command = f"exec python -m multihop.cluster.doctor.examine {_REQUEST}"

    def pass_progress(line: str) -> None:
        if line.startswith(PROGRESS_PREFIX):
            echo(line.removeprefix(PROGRESS_PREFIX).strip())

    printed = run_head_job(jobs, "doctor", command, contents, code, pass_progress)
    report: ClusterReport = result_of(printed, RESULT_PREFIX)
    return report


def main() -> None:
    """Check what the JSON file in the first argument requests. SIGTERM raises KeyboardInterrupt, for the clean-up."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    request = CheckRequest(**json.loads(Path(sys.argv[1]).read_text()))
    report = examine(request, lambda line: print(f"{PROGRESS_PREFIX}{line}", flush=True))
    print(RESULT_PREFIX + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
