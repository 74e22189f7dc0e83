"""The progress of long operations, as a terminal shows it."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRETRAINING = """
import time
from multihop.cluster.console import progress_line
with progress_line("pretrain ") as line:
    for step in range(1, 6):
        line.update(step * 100, 2400, "loss 5.774  held-out 5.845  12,499 tokens/s  MFU 31%")
        time.sleep(0.2)
"""


def on_terminal(code: str, columns: int) -> list[str]:
    """Return the lines that a program writes to a terminal of this width, without control codes."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "NO_COLOR": "1"}
    environment.pop("COLUMNS", None)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=side, stdout=side, stderr=side, env=environment, close_fds=True
    )
    os.close(side)
    written = b""
    try:
        while part := os.read(main, 4096):
            written += part
    except OSError:  # Linux reports the end of a terminal so
        pass
    os.close(main)
    assert process.wait() == 0, written
    lines = written.decode().replace("\r", "\n").split("\n")
    return [line for each in lines if (line := each.replace("\x1b[2K", "").replace("\x1b[1A", "").rstrip())]


@pytest.mark.parametrize(
    ("columns", "kept", "dropped"),
    [
        (40, ["/2400", "loss 5.774", " left"], ["held-out", "tokens/s", "MFU", "━"]),
        (60, ["pretrain", "/2400", "loss 5.774", "held-out 5.845", " left"], ["MFU", "━"]),
        (80, ["pretrain", "/2400", "loss 5.774", "held-out 5.845", "12,499 tokens/s", " left"], ["━"]),
        (140, ["pretrain", "━", "/2400", "loss 5.774", "held-out 5.845", "tokens/s", "MFU 31%", " left"], []),
    ],
)
def test_a_narrow_terminal_keeps_step_loss_and_time_left(columns: int, kept: list[str], dropped: list[str]) -> None:
    lines = [line for line in on_terminal(PRETRAINING, columns) if "left" in line]
    assert lines
    for line in lines:
        assert len(line) <= columns and all(part in line for part in kept), line
        assert not any(part in line for part in dropped), line
