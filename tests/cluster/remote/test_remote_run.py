"""A run in an object store, from its driver's side."""

import threading
from pathlib import Path

import pytest

from multihop.cluster.remote.lease import hold_lease
from multihop.cluster.remote.remote_run import RemoteRun, open_remote_run
from multihop.common.errors import UserError
from multihop.common.storage import open_folder


@pytest.mark.timeout(120)
def test_one_driver_at_a_time_prepares_data_sets_of_the_same_sources(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = (RemoteRun(f"{bucket}/runs", name) for name in ("one", "two"))
    sources, others = (first.runs / ".prepared" / name for name in ("sources", "others"))
    inside, ended = threading.Event(), threading.Event()

    def hold() -> None:
        with first.lock_preparation(sources):
            inside.set()
            assert ended.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(30)
    with second.lock_preparation(others) as location:
        assert location == f"{bucket}/runs/.prepared/others/work"
    threading.Timer(15, ended.set).start()
    with second.lock_preparation(sources):
        assert ended.is_set()
    holder.join()
    assert capfd.readouterr().err.count("waiting") == 1


def test_a_run_that_another_driver_holds_is_a_sentence_for_the_user(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    refused = pytest.raises(UserError, match=rf"^{bucket}/one/.lease is in use by process \d+ on ")
    lease = open_folder(f"{bucket}/one/.lease")
    with hold_lease(lease, lambda: None), refused, open_remote_run(bucket, "one"):
        raise AssertionError("two hold it")
