"""Two drivers of one run in a bucket, of which one takes over what the other leaves."""

import itertools
import sys
from pathlib import Path

import pytest
from simulation.bucket import SimulatedBucket
from simulation.every_failure import Scenario, check_every_failure, every_and_seed
from simulation.world import World
from tables_of_tests import Table

from multihop.cluster.locks import InUseError
from multihop.cluster.remote import remote_run
from multihop.cluster.remote.lease import Lease
from multihop.cluster.remote.remote_run import open_remote_run
from multihop.common import clock, storage
from multihop.common.json_lines import append_row, read_rows

_RESULTS = "eval/results.jsonl"


@pytest.fixture
def two_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """Each driver finishes three trials, twenty seconds apart, and starts again after an error.

    Promised: what was pushed without an error is in the bucket, once, whatever happened.
    """
    worlds = itertools.count()

    def scenario(world: World) -> None:
        bucket, disks = SimulatedBucket(world), tmp_path / str(next(worlds))
        monkeypatch.setattr(storage, "connect", lambda *_: bucket)
        monkeypatch.setattr(remote_run, "node_folder", lambda _: disks / world.process().name)
        monkeypatch.setattr(remote_run, "_exit_after_loss", lambda _: world.kill())
        started, acknowledged, trials = set[int](), set[int](), itertools.count()

        def driver() -> None:
            for _ in range(20):
                try:
                    with open_remote_run("s3://bucket/runs", "run") as remote:
                        assert remote is not None
                        clock.sleep(45.0)  # longer than the lease is taken for granted
                        for _ in range(3):
                            trial = next(trials)
                            started.add(trial)
                            append_row(remote.folder / _RESULTS, {"trial": trial})
                            remote.push()
                            acknowledged.add(trial)
                            clock.sleep(20.0)
                    return
                except (InUseError, OSError):
                    clock.sleep(5.0)

        for name in ("first", "second"):
            world.start(name, driver)
        world.run()
        reader = world.start("reader", driver)
        world.run()
        assert reader.error is None or (world.fault is not None and world.fault.process == "reader"), reader.error
        path = disks / "results.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bucket.objects.get(f"bucket/runs/run/{_RESULTS}", b""))
        rows = [row["trial"] for row in read_rows(path)]
        assert len(rows) == len(set(rows)), f"rows twice: {rows}"
        assert acknowledged <= set(rows), f"rows {sorted(acknowledged - set(rows))} were lost of {sorted(acknowledged)}"
        assert set(rows) <= started

    return scenario


@pytest.mark.parametrize(("every", "seed"), every_and_seed(29))
def test_a_run_whose_drivers_fail_anywhere(two_drivers: Scenario, every: int, seed: int, table: Table) -> None:
    check_every_failure(two_drivers, every, table, seed=seed)


@pytest.mark.long
def test_results_are_lost_if_the_lease_is_not_renewed_after_an_upload(
    two_drivers: Scenario, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew = Lease.renew

    def seldom(lease: Lease) -> None:
        if sys._getframe(1).f_code.co_name != "push":
            renew(lease)

    monkeypatch.setattr(Lease, "renew", seldom)
    with pytest.raises(AssertionError, match=r"kind='(suspend|freeze)'\).*rows .* were lost"):
        check_every_failure(two_drivers, 1, table, kinds=("suspend", "freeze"))


@pytest.mark.long
def test_results_are_lost_if_a_heartbeat_does_not_notice_a_new_holder(
    two_drivers: Scenario, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder whose listing takes 90 s writes no heartbeat meanwhile, and its main thread goes on."""

    def renew_blindly(lease: Lease) -> None:
        with lease._lock:
            lease._folder.write_atomically(f"{lease._number:08d}.heartbeat", f"{lease._count}".encode())
            lease._folder.names()
            lease._count, lease._renewed_at = lease._count + 1, clock.boottime()

    monkeypatch.setattr(Lease, "renew", renew_blindly)
    with pytest.raises(AssertionError, match=r"kind='slow'\).*rows .* were lost"):
        check_every_failure(two_drivers, 1, table, kinds=("slow",))


@pytest.mark.long
def test_a_living_driver_loses_its_run_if_its_waiter_measures_time_by_the_wall_clock(
    two_drivers: Scenario, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "_monotonic", World._wall)
    with pytest.raises(AssertionError, match=r"kind='jump'\).*ended by Killed"):
        check_every_failure(two_drivers, 3, table, kinds=("jump",))


def test_results_are_lost_if_files_are_replaced_whatever_their_version(
    two_drivers: Scenario, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def regardless(bucket: SimulatedBucket, path: str, data: bytes, version: str | None) -> str:
        bucket.put(path, data)
        return ""

    monkeypatch.setattr(SimulatedBucket, "replace", regardless)
    with pytest.raises(AssertionError, match=r"kind='late'\) at 'put .*rows .* were lost"):
        check_every_failure(two_drivers, 1, table, kinds=("late",))
