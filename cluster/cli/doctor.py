"""The command `doctor`: examine a cluster or this machine, and print what is wrong."""

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

from multihop.cluster.console import console, plain
from multihop.cluster.doctor.finding import ClusterReport
from multihop.cluster.doctor.order import CheckRequest, order_of
from multihop.cluster.jobs.head_script import HeadScriptFailed
from multihop.cluster.ray.jobs import Jobs
from multihop.cluster.runs.recipe import Recipe
from multihop.common.errors import DONE, FAILED, UserError
from multihop.common.redaction import shown


def examine_and_show(
    address: str | None, recipe: Recipe | None, runs: str | None, gpu: bool | None, as_json: bool
) -> int:
    """Print a table or JSON; returns the exit code: 0, or 1 where something is wrong.

    Args:
        address: of a head's dashboard; None: the cluster of RAY_ADDRESS, else this machine.
        gpu: examine GPUs, which each node must have; None: where the cluster has some.

    Raises:
        UserError: `runs` is relative on a cluster.
    """
    if runs is not None and not runs.startswith(("/", "s3://")):
        if address is not None:
            raise UserError(f"--runs={runs} is relative; give the absolute path that all nodes of the cluster see")
        runs = str(Path(runs).absolute())
    try:
        report = _report(address, order_of(recipe, runs, gpu))
    except HeadScriptFailed as error:
        print(f"multihop: the cluster could not be examined: {shown(str(error))}", file=sys.stderr)
        return FAILED
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    return FAILED if report["findings"] else DONE


def is_fit(address: str, recipe: Recipe, runs: str) -> bool:
    """Whether nothing is wrong that concerns the recipe; prints what is."""
    return examine_and_show(address, recipe, runs, None, as_json=False) == DONE


def show(report: ClusterReport) -> None:
    """Print a table of the nodes, one of the links, and the findings."""
    from rich.console import Console

    from multihop.cluster.doctor.table import links_table, nodes_table

    out = Console()
    out.print(nodes_table(report))
    if report["links"]:
        out.print(links_table(report))
    if (step := report.get("step", {})) and "error" not in step:
        seconds = f"{step['first_s']:.0f} s, and after a restart {step['second_s']:.0f} s" if "first_s" in step else ""
        out.print(plain(f"a step of the recipe: {seconds or 'not tried, ' + step['skipped']}"))
    if not report["findings"]:
        out.print("nothing is wrong")
    for finding in report["findings"]:
        text = f"{finding['node']}  {finding['check']}: {finding['seen']}; expected {finding['expected']}"
        out.print(plain(f"✗ {text}: {finding['advice']}"), soft_wrap=True)


def _report(address: str | None, order: CheckRequest) -> ClusterReport:
    def say(line: str) -> None:
        console.print(plain(f"examining: {line}"))

    if address is not None:
        from multihop.cluster.doctor.remote import examine_remotely

        return examine_remotely(Jobs(address), order, say)
    from multihop.cluster.doctor.examine import examine

    with redirect_stdout(sys.stderr):  # Ray prints messages about nodes at any time
        return examine(order, say)
