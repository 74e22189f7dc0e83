"""A run in an object store, from its driver's side."""

import threading
from pathlib import Path

import pytest

from multihop.cluster.remote.lease import hold_lease
from multihop.cluster.remote.remote_run import RemoteRun, open_remote_run
from multihop.common import clock
from multihop.common.errors import UserError
from multihop.common.files import make_folder, write_atomically
from multihop.common.s3 import Bucket
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


def test_the_last_push_restores_what_a_late_request_removed(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with open_remote_run(bucket, "one") as run:
        assert run is not None
        make_folder(run.folder)
        write_atomically(run.folder / "summary.json", b"{}")
        run.push()
        open_folder(f"{bucket}/one").remove("summary.json")
        run.push()
    assert open_folder(f"{bucket}/one").read_bytes("summary.json") == b"{}"


def test_a_file_that_others_change_again_and_again_is_an_error(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(clock, "sleep", lambda seconds: None)
    run = RemoteRun(bucket, "one")
    make_folder(run.folder)
    write_atomically(run.folder / "summary.json", b"{}")
    monkeypatch.setattr(Bucket, "replace", lambda *request: None)
    with pytest.raises(OSError, match=r"^s3://.*/one/summary.json was changed by others 10 times in a row"):
        run.push()
