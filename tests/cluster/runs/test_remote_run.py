"""The home of a run in an object store, as its driver sees it."""

import threading
from pathlib import Path

import pytest

from multihop.cluster.runs.remote_run import RemoteRun


@pytest.mark.timeout(120)
def test_one_driver_at_a_time_prepares_data_sets_of_the_same_sources(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = (RemoteRun(f"{bucket}/home", name) for name in ("one", "two"))
    sources, others = (first.runs / ".prepared" / name for name in ("sources", "others"))
    inside, ended = threading.Event(), threading.Event()

    def hold() -> None:
        with first.preparing(sources):
            inside.set()
            assert ended.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(30)
    with second.preparing(others) as location:
        assert location == f"{bucket}/home/.prepared/others/work"
    threading.Timer(15, ended.set).start()
    with second.preparing(sources):
        assert ended.is_set()
    holder.join()
    assert capfd.readouterr().err.count("waiting") == 1
