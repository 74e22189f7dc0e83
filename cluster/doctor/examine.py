"""Examine the cluster of this process, as a job on a cluster's head.

Its command is `python -m multihop.cluster.doctor.examine ORDER.json`.
"""

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from multihop.cluster.doctor.finding import ClusterReport
from multihop.cluster.doctor.findings import findings
from multihop.cluster.doctor.order import CheckRequest
from multihop.cluster.doctor.rounds import Say, gather
from multihop.cluster.doctor.smoke_test import smoke_test
from multihop.cluster.ray.session import ray_session
from multihop.cluster.runs.recipe import validate_recipe

MARK = "multihop doctor: "
SAYS = "multihop doctor does: "
"""Lines of the output: the report as JSON, and progress."""


def examine(order: CheckRequest, say: Say) -> ClusterReport:
    """Connect to Ray, or start it on this machine.

    Returns:
        The facts of `gather`; step, those of `smoke_test`, if the recipe is known and nothing is wrong so far; and
        findings, a list.
    """
    with ray_session(None, 1):
        report = gather(order, say)
    if order.recipe is not None and order.runs is not None and not findings(report):
        say("a step, a checkpoint, a restart, another step")
        report["step"] = smoke_test(validate_recipe(order.recipe, "the recipe"), Path(order.runs))
    return report | {"findings": [asdict(finding) for finding in findings(report)]}


def main() -> None:
    """Examine as the file of the first argument orders. SIGTERM raises KeyboardInterrupt, so that all is cleaned up."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    order = CheckRequest(**json.loads(Path(sys.argv[1]).read_text()))
    report = examine(order, lambda line: print(f"{SAYS}{line}", flush=True))
    print(MARK + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
