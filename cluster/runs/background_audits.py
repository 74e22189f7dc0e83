"""checkpoint.audit: audits of checkpoints beside the training, where the cluster has room, and at its end.

until the run ends:
    take the oldest checkpoint that is due, once the cluster has had room for its ranks at two polls
    audit it in another process, which is stopped while the training has fewer ranks than it may have
then audit what is still due
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from multihop.cluster.console import console
from multihop.cluster.locks import InUseError, is_locked, lock_folder
from multihop.cluster.ray.capacity import has_free_room, has_gpus, has_room_for
from multihop.cluster.ray.session import session_address
from multihop.cluster.ray.watch import ranks_by_node
from multihop.cluster.runs.audit import PARENT, PLACE, tag_audits
from multihop.cluster.runs.resolved import ResolvedRun
from multihop.common.errors import STOPPED, UserError
from multihop.common.files import make_folder
from multihop.common.json_lines import Row, append_row, read_rows
from multihop.pretrain.checkpoint.verify import newest_step
from multihop.pretrain.data.phases import total_steps
from multihop.pretrain.run.audits import AuditDue, audits_due, checkpoint_of, first_different_step, outcome_of
from multihop.pretrain.run.files import AUDITS, AUDITS_GIVEN_UP, checkpoints_of

LOG = "audits.log"
"""File in the run's folder `logs` with what the audits print."""
_POLL_S = 10.0
_ENDED_POLL_S = 0.5
_TRIES = 30
"""Errors of the disk or the store at the end of a run, ten seconds apart, after which the audits are left to the next
start."""
_STOP_S = 15.0
"""Seconds in which an audit that is stopped ends its ranks."""


@contextmanager
def background_audits(run: ResolvedRun) -> Iterator[Callable[[], None]]:
    """Audit checkpoints while the block runs; yields a function that audits what is still due, and returns then.

    An audit that is refused, or fails twice, is reported, recorded and not tried again.

    Raises:
        UserError: audits would differ, because kernels on a GPU are not deterministic.
    """
    if run.recipe.checkpoint.audit is None:
        yield _nothing_is_due
        return
    if has_gpus() and not run.recipe.engine.deterministic:
        raise UserError(
            "checkpoint.audit on a GPU compares bits that its fastest kernels do not repeat; set engine.deterministic, "
            "or remove checkpoint.audit"
        )
    audits = _Audits(run)
    audits.start()
    try:
        yield audits.finish
    finally:
        audits.cancel()


def _nothing_is_due() -> None:
    """Of a run without checkpoint.audit."""


class _Audits(threading.Thread):
    """Starts the audits, one after another."""

    def __init__(self, run: ResolvedRun) -> None:
        super().__init__(name="audits", daemon=True)
        self._folder, self._recipe = run.folder.absolute(), run.recipe
        self._checkpoints = checkpoints_of(self._folder, self._recipe)
        self._is_finishing, self._is_cancelled = threading.Event(), threading.Event()
        self._failed, self._postponed = set[AuditDue](), set[AuditDue]()
        self._printed = ""

    def finish(self) -> None:
        """Audit what is still due."""
        self._is_finishing.set()
        self.join()
        tag_audits(self._folder)

    def cancel(self) -> None:
        """Stop the audit in progress, which the next start makes again."""
        self._is_cancelled.set()
        self.join()

    def run(self) -> None:
        try:
            self._audit_until_the_end()
        except Exception as error:  # the run goes on; its next start makes them
            self._print(f"audits    ended by {type(error).__name__}: {error}")

    def _audit_until_the_end(self) -> None:
        had_room: AuditDue | None = None
        failed = 0
        while not self._is_cancelled.is_set():
            is_finishing = self._is_finishing.is_set()
            try:
                every = audits_due(self._folder, self._recipe)
                due = next((each for each in every if each not in self._postponed), None)
                if due is None and is_finishing:
                    return
                has_room = due is not None and self._has_room(due, is_finishing)
                if due is not None and has_room and (is_finishing or due == had_room):
                    self._audit(due)
                    had_room = None
                    continue
                had_room = due if has_room else None
            except OSError as error:  # a store that does not answer, or a full disk
                failed += is_finishing
                if failed == _TRIES:
                    raise
                self._print(f"audits    {error}; trying again")
                had_room, is_finishing = None, False  # so that it waits longer
            self._is_cancelled.wait(_ENDED_POLL_S if is_finishing else _POLL_S)

    def _has_room(self, due: AuditDue, is_finishing: bool) -> bool:
        if not is_finishing:
            is_in_use = is_locked(self._folder / PLACE)  # by another audit, of a user or of an earlier start
            return not is_in_use and has_free_room(due.ranks) and not self._is_in_the_way()
        try:
            make_folder(self._folder / PLACE)
            with lock_folder(self._folder / PLACE):
                pass
        except InUseError as error:
            self._print(f"waiting   {error}")
            return False
        if not has_room_for(due.ranks):
            self._postponed.add(due)
            self._print(
                f"audit     {_steps(due)}: the cluster has no room for {due.ranks} ranks; the next start retries it"
            )
            return False
        return True

    def _audit(self, due: AuditDue) -> None:
        """Audit a checkpoint in another process, with a Ray job of its own; the outcome is in audits.jsonl."""
        steps, log = _steps(due), self._folder / "logs" / LOG
        make_folder(log.parent, mode=0o700)
        command = [sys.executable, "-P", "-m", "multihop.cluster.cli.main", "checkpoints", "audit", str(self._folder)]
        command += ["--from", str(due.first), "--to", str(due.last), "--address", session_address()]
        self._print(f"audit     {steps} are trained again")
        with log.open("ab") as output:
            # In a session of its own: Ctrl-C is for this process, which decides what becomes of the audit.
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | {PARENT: str(os.getpid())},
            )
        is_stopped = False
        try:
            while child.poll() is None and not is_stopped:
                is_stopped = self._is_cancelled.wait(_ENDED_POLL_S)
                is_stopped |= not self._is_finishing.is_set() and self._is_in_the_way()
        finally:
            _stop(child)
        row = self._outcome(due)
        if row is not None:
            self._print(f"audit     {_sentence(steps, row, log)}")
        elif is_stopped or child.returncode == STOPPED:  # by another's signal
            self._print(f"audit     {steps}: stopped; it will be retried")
        elif is_locked(self._folder / PLACE):
            self._print(f"audit     {steps}: another process audits the run; it will be retried")
        elif due not in self._failed:  # a node or a store may be lost, or another audit has just ended
            self._failed.add(due)
            self._print(f"audit     {steps} failed, and will be retried once: see {log}")
        else:
            self._give_up(due, f"see {log}")

    def _outcome(self, due: AuditDue) -> Row | None:
        rows = [row for row in read_rows(self._folder / AUDITS) if checkpoint_of(row) == (due.last, due.content)]
        return rows[-1] if rows else None

    def _give_up(self, due: AuditDue, reason: str) -> None:
        """Record that a checkpoint cannot be audited, so that it need not be kept."""
        append_row(self._folder / AUDITS_GIVEN_UP, {"of": due.content, "last": due.last, "reason": reason})
        self._print(f"audit     {_steps(due)} failed: {reason}")

    def _is_in_the_way(self) -> bool:
        """Whether the training is not over and has fewer ranks than it may have: an audit may hold what it needs."""
        if ranks_by_node().total() >= self._recipe.cluster.worker_range[1]:
            return False
        return newest_step(self._checkpoints) != total_steps(self._recipe.phases)

    def _print(self, sentence: str) -> None:
        if sentence != self._printed:
            console.print(sentence)
        self._printed = sentence


def _steps(due: AuditDue) -> str:
    return f"steps {due.first + 1:,} to {due.last:,}"


def _sentence(steps: str, row: Row, log: Path) -> str:
    """What is printed of an audit."""
    conditions = "; ".join(row["conditions"])
    match outcome_of(row):
        case "equal":
            step = first_different_step(row)
            state = "" if step is None else f"; the state of step {step:,} differs: see {log}"
            return f"{steps}: equal, bit for bit{state}"
        case "within rounding":
            return f"{steps}: within rounding ({conditions})"
        case "beyond rounding":
            return f"{steps} DIFFER from their replay beyond rounding ({conditions}): see {log}"
        case "no verdict":
            return f"{steps} differ, no verdict: {row['rounding']['reason']} ({conditions})"
        case "differs" | "not judged":
            return f"{steps} DIFFER from their replay: see {log}"


def _stop(child: "subprocess.Popen[bytes]") -> None:
    """End an audit, if it has not ended: its first signal asks the ranks to finish their step."""
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
