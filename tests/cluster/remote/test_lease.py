"""A lease has one holder at a time, and does not outlive a dead process."""

import threading
from pathlib import Path

import pytest
from s3_endpoint import S3

from multihop.cluster.locks import InUseError
from multihop.cluster.remote import lease
from multihop.cluster.remote.lease import hold_lease
from multihop.common import clock
from multihop.common.storage import open_folder


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the times of leases from tens of seconds to tenths."""
    monkeypatch.setattr(lease, "_BEAT_S", 0.1)
    monkeypatch.setattr(lease, "_POLL_S", 0.05)
    monkeypatch.setattr(lease, "_EXPIRY_S", 3.0)


def refuse() -> None:
    raise AssertionError("it was lost")


def test_one_at_a_time_and_again_when_it_has_ended(location: str) -> None:
    remote_location = open_folder(f"{location}/lease")
    in_use = pytest.raises(InUseError, match=r"is in use by process \d+ on .*; wait for that process to end")
    with hold_lease(remote_location, refuse), in_use, hold_lease(remote_location, refuse):
        raise AssertionError("two hold it")
    for _ in range(12):
        with hold_lease(remote_location, refuse):
            pass
    assert len(remote_location.names()) <= 6  # old ones are removed


def test_of_many_at_once_one_gets_it(location: str) -> None:
    remote_location, got, refused = open_folder(f"{location}/lease"), list[int](), list[int]()
    ready, done = threading.Barrier(4), threading.Event()

    def attempt(number: int) -> None:
        ready.wait()
        try:
            with hold_lease(remote_location, refuse):
                got.append(number)
                done.wait(20)
        except InUseError:
            refused.append(number)
        if len(refused) == 3:
            done.set()

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 3)


def test_a_silent_holder_loses_it_and_is_notified(tmp_path: Path) -> None:
    remote_location, lost = open_folder(str(tmp_path)), threading.Event()
    with hold_lease(remote_location, refuse):
        pass
    remote_location.create("00000002", b"{}", "dead")  # killed before it could prove anything
    with hold_lease(remote_location, lost.set):
        assert "00000003" in remote_location.names()
        remote_location.create(
            "00000004", b"{}", "other"
        )  # somebody else, after a minute in which the store was not reached
        assert lost.wait(5)


def test_a_holder_that_was_suspended_notices_before_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_BEAT_S", 1e6)  # its thread was suspended as well
    remote_location, lost = open_folder(str(tmp_path)), threading.Event()
    with hold_lease(remote_location, lost.set) as held:
        remote_location.create("00000002", b"{}", "other")
        held.confirm()  # a moment after its last heartbeat nobody else can have it
        now = clock.boottime
        monkeypatch.setattr(clock, "boottime", lambda: now() + 60.0)
        with pytest.raises(InUseError, match="another process has taken over"):
            held.confirm()
    assert lost.is_set()


def test_a_store_that_is_unreachable_at_the_end_does_not_fail_the_work(bucket: str, s3: S3) -> None:
    remote_location = open_folder(f"{bucket}/lease")
    s3.failure = "400 Bad Request"  # which is not tried again by the library
    with hold_lease(remote_location, refuse):
        s3.failures = 1_000
    s3.failures = 0
    with hold_lease(remote_location, refuse):  # after a silence
        pass
    with pytest.raises(RuntimeError, match="the block's own"), hold_lease(remote_location, refuse):
        s3.failures = 1_000
        raise RuntimeError("the block's own")
