"""Files that the doctor writes to a location of runs and must remove again."""

import contextlib
import threading
import time
from pathlib import Path

import pytest
from s3_endpoint import S3

from multihop.cluster.doctor import store


def test_a_bucket_that_ignores_versions_is_found(bucket: str, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_CHUNK_BYTES", 2**10)
    assert store.write(bucket, "trial", "node")["compares"]
    s3.without_header = "HTTP_IF_MATCH"
    assert not store.write(bucket, "another-trial", "node")["compares"]


def test_removal_while_nodes_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine a writer of 64 MiB would begin after the removal has found nothing twice.
    monkeypatch.setattr(store, "_CHUNK_BYTES", 2**18)

    def write(node: str) -> None:
        with contextlib.suppress(OSError):  # its file was removed under it
            store.write(str(tmp_path), "trial", node)

    writers = [threading.Thread(target=write, args=(f"node-{number}",)) for number in range(4)]
    for writer in writers:
        writer.start()
        time.sleep(0.1)
    store.remove(str(tmp_path), "trial")
    for writer in writers:
        writer.join()
    assert list(tmp_path.iterdir()) == []
