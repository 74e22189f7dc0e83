"""Code for machines with a GPU, which may have neither Ray nor MLflow nor the libraries for text."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LACKING = ("boto3", "ftfy", "jinja2", "matplotlib", "mlflow", "moto", "py3langid", "ray", "rich", "sacrebleu", "scipy")
LACKING += ("sentencepiece", "sentencex", "seqeval", "sklearn", "typer")


def test_its_tests_are_found() -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({LACKING})); import pytest; "
        "sys.exit(pytest.main(['-m', 'gpu', '--collect-only', '-q', 'tests/pretrain/models', 'tests/pretrain/optim']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_on_a_gpu_nothing_waits" in done.stdout and "error" not in done.stdout
