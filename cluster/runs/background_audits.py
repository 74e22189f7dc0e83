"""checkpoint.audit: audits of checkpoints beside the training, where the cluster has room, and at its end.

until the run ends:
    take the oldest checkpoint that is due, once the cluster has had room for its ranks at two polls
    audit it in another process, which is stopped while the ranks of the training wait to be placed
then audit what is still due
"""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from multihop.cluster.console import console
from multihop.cluster.ray.capacity import has_free_room
from multihop.cluster.ray.session import session_address
from multihop.cluster.ray.watch import ranks_by_node
from multihop.cluster.runs.audit import tag_audits
from multihop.cluster.runs.resolved import ResolvedRun
from multihop.common.errors import DONE
from multihop.pretrain.checkpoint.verify import newest_step
from multihop.pretrain.data.phases import total_steps
from multihop.pretrain.run.audits_due import AuditDue, audits_due
from multihop.pretrain.run.files import checkpoints_of

LOG = "audits.log"
"""File in the run's folder `logs` with what the audits print."""
_POLL_S = 5.0
_ENDED_POLL_S = 0.5
_STOP_S = 15.0
"""Seconds in which an audit that is stopped ends its ranks."""


@contextmanager
def background_audits(run: ResolvedRun) -> Iterator[Callable[[], None]]:
    """Audit checkpoints while the block runs; yields a function that audits what is still due, and returns then.

    An audit that cannot be made is reported and not tried again before the next start.
    """
    audits = _Audits(run)
    if run.recipe.checkpoint.audit is not None:
        audits.start()
    try:
        yield audits.finish
    finally:
        audits.cancel()


class _Audits(threading.Thread):
    """Starts the audits, one after another."""

    def __init__(self, run: ResolvedRun) -> None:
        super().__init__(name="audits", daemon=True)
        self._folder, self._recipe = run.folder.absolute(), run.recipe
        self._is_finishing, self._is_cancelled = threading.Event(), threading.Event()
        self._given_up: set[int] = set()
        """Steps of checkpoints that could not be audited."""
        self._printed = ""

    def finish(self) -> None:
        """Audit what is still due."""
        if self.is_alive():
            self._is_finishing.set()
            self.join()
            tag_audits(self._folder)

    def cancel(self) -> None:
        """Stop the audit in progress, which the next start makes again."""
        self._is_cancelled.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        had_room: AuditDue | None = None
        while not self._is_cancelled.is_set():
            try:
                due = self._oldest_due()
            except OSError as error:  # a store that does not answer
                self._print(f"audits    {error}; trying again")
                due = had_room = None
            else:
                if due is None and self._is_finishing.is_set():
                    return
            has_room = due is not None and (self._is_finishing.is_set() or has_free_room(due.ranks))
            if due is not None and has_room and (self._is_finishing.is_set() or due == had_room):
                self._audit(due)
                had_room = None
                continue
            had_room = due if has_room else None
            self._is_cancelled.wait(_ENDED_POLL_S if self._is_finishing.is_set() else _POLL_S)

    def _oldest_due(self) -> AuditDue | None:
        due = audits_due(self._folder, self._recipe)
        return next((each for each in due if each.last not in self._given_up), None)

    def _audit(self, due: AuditDue) -> None:
        """Audit a checkpoint in another process, with a Ray job of its own; the outcome is in audits.jsonl."""
        steps = f"steps {due.first + 1:,} to {due.last:,}"
        command = [sys.executable, "-P", "-m", "multihop.cluster.cli.main", "checkpoints", "audit", str(self._folder)]
        command += ["--from", str(due.first), "--to", str(due.last), "--address", session_address()]
        log = self._folder / "logs" / LOG
        self._print(f"audit     {steps} are trained again")
        with log.open("ab") as output:
            # In a session of its own: Ctrl-C is for this process, which decides what becomes of the audit.
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        while child.poll() is None:
            if self._is_cancelled.is_set() or self._is_in_the_way():
                self._print(f"audit     {steps}: stopped, to be made again later")
                _stop(child)
                return
            self._is_cancelled.wait(_ENDED_POLL_S)
        if due in audits_due(self._folder, self._recipe):
            self._given_up.add(due.last)
            self._print(f"audit     {steps} could not be made: see {log}")
        elif child.returncode == DONE:
            self._print(f"audit     {steps}: equal, bit for bit")
        else:
            self._print(f"audit     {steps} DIFFER from their replay: see {log}")

    def _is_in_the_way(self) -> bool:
        """Whether the training has no ranks and is not over: an audit may hold what they need."""
        if self._is_finishing.is_set() or ranks_by_node():
            return False
        return newest_step(checkpoints_of(self._folder, self._recipe)) != total_steps(self._recipe.phases)

    def _print(self, sentence: str) -> None:
        if sentence != self._printed:
            console.print(sentence)
        self._printed = sentence


def _stop(child: "subprocess.Popen[bytes]") -> None:
    """End an audit: its first signal asks the ranks to finish their step."""
    child.terminate()
    try:
        child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
