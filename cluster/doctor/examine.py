"""Examine the cluster of this process: `python -m cluster.doctor.examine ORDER.json`, as a job on a cluster's head."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from cluster.doctor.finding import Facts
from cluster.doctor.findings import findings
from cluster.doctor.order import Order
from cluster.doctor.rounds import Say, gather
from cluster.ray.session import ray_session

MARK = "multihop doctor: "
SAYS = "multihop doctor does: "
"""Lines of the output: the report as JSON, and progress."""


def examine(order: Order, say: Say) -> Facts:
    """Connect to Ray, or start it on this machine, and report: the facts of `gather`, and findings, a list."""
    with ray_session(None, 1):
        report = gather(order, say)
    return report | {"findings": [asdict(finding) for finding in findings(report)]}


def main() -> None:
    """Argument: a file with an `Order`."""
    order = Order(**json.loads(Path(sys.argv[1]).read_text()))
    report = examine(order, lambda line: print(f"{SAYS}{line}", flush=True))
    print(MARK + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
