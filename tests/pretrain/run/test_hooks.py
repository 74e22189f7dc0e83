"""What the file `trace` of a run may contain."""

import os
from pathlib import Path

import pytest

from multihop.pretrain.run.hooks import read_trace_request


def test_a_number_is_asked_for_once(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(" 12\n")
    assert [read_trace_request(tmp_path / "trace") for _ in range(2)] == [12, 0]


@pytest.mark.parametrize(
    "content", [b"\xff\n", "²".encode(), "٣".encode(), b"9" * 5000, b"", b"0", b"-1", b"3 4", b"\0"]
)
def test_anything_else_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    (tmp_path / "trace").write_bytes(content)
    assert read_trace_request(tmp_path / "trace") == 0
    assert len(caplog.messages[0]) < 500 and "expected the number of steps to trace, such as 3" in caplog.messages[0]
    assert read_trace_request(tmp_path / "trace") == 0 and len(caplog.messages) == 1


def test_what_is_no_file_neither_waits_nor_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "trace")
    assert read_trace_request(tmp_path / "trace") == 0 and "not a regular file" in caplog.messages[0]
    assert not (tmp_path / "trace").exists()
    (tmp_path / "trace").mkdir()
    assert read_trace_request(tmp_path / "trace") == 0 and (tmp_path / "trace").is_dir()
