"""DeepSpeed's versions: which were tested, and what happens with others."""

import logging
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from multihop.common.errors import UserError
from multihop.pretrain.engine import deepspeed_internals
from multihop.pretrain.engine.deepspeed_internals import TESTED_VERSIONS

ROOT = Path(__file__).parents[3]


def test_the_pinned_version_is_a_tested_one() -> None:
    pinned = re.search(r"^deepspeed==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned and pinned[1] == TESTED_VERSIONS[-1]


def test_another_version_is_used_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "multihop"):
        deepspeed_internals._warn_if_untested(TESTED_VERSIONS[-1])
        assert not caplog.records
        deepspeed_internals._warn_if_untested("9.9.9")
    (record,) = caplog.records
    assert record.getMessage() == (
        f"DeepSpeed 9.9.9 is not a version that multihop was tested with ({', '.join(TESTED_VERSIONS)})"
    )


def test_a_version_without_what_is_patched_is_refused() -> None:
    class Optimizer:
        device = None

    deepspeed_internals._check_attributes(Optimizer(), ["device"])
    expected = (
        f"DeepSpeed {version('deepspeed')} has no Optimizer.check_overflow, which multihop needs; install a version "
        f"that was tested: deepspeed=={TESTED_VERSIONS[-1]}"
    )
    with pytest.raises(UserError, match=re.escape(expected)):
        deepspeed_internals._check_attributes(Optimizer(), ["device", "check_overflow"])


def test_a_rank_does_not_import_mlflow_with_deepspeed() -> None:
    """It would take longer than all of the rest, and is found as before afterwards."""
    code = """
import sys
from multihop.pretrain.engine.deepspeed_internals import import_deepspeed
import_deepspeed()
assert "deepspeed.autotuning.autotuner" in sys.modules and "mlflow" not in sys.modules
import mlflow.version
import_deepspeed()
assert "mlflow.version" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
