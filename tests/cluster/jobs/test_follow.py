"""A job's output is written once, across silences and interruptions."""

from collections.abc import Iterator
from typing import Any

import pytest

from multihop.cluster.jobs import follow
from multihop.cluster.jobs.follow import follow_job
from multihop.cluster.ray.jobs import Job, UnreachableError

LINES = ["one\n", "two\n", "three\n", "four\n"]


class Head:
    """Answers as a cluster's head does, but raises what `events` has for a line, such as Ctrl-C at the client."""

    def __init__(self, events: dict[str, list[BaseException]], clock: list[float]) -> None:
        self.events, self.clock = events, clock
        self.cut_off = 0
        """Minutes for which it does not answer, from the third line on."""
        self.is_cut = self.ended = False

    def tail_output(self, job_id: str) -> Iterator[str]:
        for line in LINES:
            if self.cut_off and (self.is_cut or line == "three\n"):
                self.is_cut = True
                raise UnreachableError("reset")
            if self.events.get(line):
                raise self.events[line].pop(0)
            self.clock[0] += 590.0  # a job that prints seldom
            yield line
        self.ended = True

    def get(self, job_id: str) -> Job:
        if self.cut_off:
            self.cut_off -= 1
            self.clock[0] += 60.0
            raise UnreachableError("no route to host")
        return Job(job_id, "SUCCEEDED" if self.ended else "RUNNING", 0, "", 0.0, None, {})

    def output(self, job_id: str) -> str:
        return "".join(LINES)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that pass only where the head says so."""
    now = [0.0]
    monkeypatch.setattr(follow.clock, "monotonic", lambda: now[0])
    monkeypatch.setattr(follow.clock, "sleep", lambda seconds: None)
    return now


def test_a_head_is_given_up_ten_minutes_after_its_last_line(clock: list[float]) -> None:
    written: list[str] = []
    head: Any = Head({}, clock)
    head.cut_off = 9
    job = follow_job(head, "a", written.append)
    assert job is not None and job.status == "SUCCEEDED" and "".join(written) == "".join(LINES)

    head = Head({}, clock)
    head.cut_off = 11
    assert follow_job(head, "a", written.append) is None


def test_an_interruption_repeats_no_line(clock: list[float]) -> None:
    written, interruptions = list[str](), list[int]()
    head: Any = Head({"two\n": [KeyboardInterrupt()], "four\n": [KeyboardInterrupt()]}, clock)
    assert follow_job(head, "a", written.append, lambda: interruptions.append(1)) is not None
    assert "".join(written) == "".join(LINES) and len(interruptions) == 2

    def leave() -> None:
        raise KeyboardInterrupt

    for on_interrupt in (None, leave):
        head = Head({"two\n": [KeyboardInterrupt()]}, clock)
        with pytest.raises(KeyboardInterrupt):
            follow_job(head, "a", written.append, on_interrupt)
