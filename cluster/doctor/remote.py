"""Examine a cluster from afar, by a small job on its head that runs this code."""

import json

from multihop.cluster.doctor.examine import MARK, SAYS
from multihop.cluster.doctor.finding import ClusterReport
from multihop.cluster.doctor.order import CheckRequest
from multihop.cluster.doctor.rounds import Say
from multihop.cluster.jobs.archive import code_to_send, untracked, untracked_line
from multihop.cluster.jobs.head_script import HeadScriptFailed, run_head_job
from multihop.cluster.jobs.head_scripts.inspect_head import code_hash
from multihop.cluster.jobs.submit import look
from multihop.cluster.ray.jobs import Jobs
from multihop.cluster.runs.code_version import code_version

_ORDER = "order.json"


def examine_remotely(jobs: Jobs, order: CheckRequest, say: Say) -> ClusterReport:
    """The report of `examine`. As for `submit`, the code is sent if the head has another.

    Raises:
        HeadScriptFailed: the job failed.
    """
    here = code_version()
    installed = look(jobs, "").code
    is_same = installed is not None and installed == code_hash(here.package)
    code = {} if is_same else code_to_send(here)
    if code and (new := untracked(here)):
        say(f"with files that git does not track: {untracked_line(new)}")
    contents = {_ORDER: json.dumps(order.as_json()).encode()}
    command = f"exec python -m multihop.cluster.doctor.examine {_ORDER}"

    def pass_on(line: str) -> None:
        if line.startswith(SAYS):
            say(line.removeprefix(SAYS).strip())

    printed = run_head_job(jobs, "doctor", command, contents, code, pass_on)
    found = next((line for line in printed.splitlines() if line.startswith(MARK)), None)
    if found is None:
        raise HeadScriptFailed("the job printed no report")
    report: ClusterReport = json.loads(found.removeprefix(MARK))
    return report
