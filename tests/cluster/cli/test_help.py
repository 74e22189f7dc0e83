"""The help of the command line, and what it imports before its first output."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from multihop.cluster.cli.main import app

ROOT = Path(__file__).parents[3]
IMPORTS_TORCH = """
import atexit, sys
from multihop.cluster.cli.main import main
atexit.register(lambda: print("torch" in sys.modules))
main()
"""
HEAVY = """
import sys
from multihop.cluster.cli.main import app
print({"torch", "ray", "mlflow", "pydantic", "rich"} & sys.modules.keys())
"""
MISTAKEN = [
    ["run", "missing.yaml"],
    ["prep", "missing.yaml", "--dry-run"],
    ["eval", "missing.yaml"],
    ["experiment", "missing.yaml"],
    ["inspect", "batch", "missing.yaml", "--step", "0"],
    ["fill-mask", "missing", "The [MASK]."],
    ["generate", "missing", "--prompt", "The"],
    ["checkpoints", "list", "missing"],
    ["checkpoints", "export", "missing", "--out", "out"],
]


def printed(*arguments: str, **environment: str) -> str:
    result = CliRunner().invoke(app, arguments, prog_name="multihop", env={"COLUMNS": "80", **environment})
    assert result.exit_code == 0, result.output
    return result.output


def groups() -> list[tuple[str, ...]]:
    """Return the command itself, and its commands that have commands."""
    root: Any = typer.main.get_command(app)
    return [(), *((name,) for name, command in root.commands.items() if hasattr(command, "commands"))]


@pytest.mark.parametrize("group", groups(), ids=" ".join)
def test_commands_are_listed_with_whole_sentences(group: tuple[str, ...]) -> None:
    _, _, listed = printed(*group, "--help").partition("Commands:\n")
    lines = listed.strip().splitlines()
    assert lines and all(line.endswith(".") and not line.endswith("...") for line in lines), listed


@pytest.mark.parametrize("command", [(), ("run",), ("checkpoints",), ("checkpoints", "list"), ("jobs",)], ids=" ".join)
def test_h_is_short_for_help(command: tuple[str, ...]) -> None:
    assert printed(*command, "-h") == printed(*command, "--help")


def test_version_is_that_of_the_package() -> None:
    assert printed("--version") == f"multihop {version('multihop')}\n"


def test_shell_completion_of_commands_and_options() -> None:
    def completed(words: str, number: int) -> list[str]:
        environment = {"_MULTIHOP_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(number)}
        return printed(**environment).split()

    assert completed("multihop che", 1) == ["checkpoints"]
    assert completed("multihop run --allow", 2) == ["--allow-change"]


@pytest.mark.parametrize("arguments", MISTAKEN, ids=" ".join)
def test_a_missing_recipe_or_run_is_reported_before_torch_is_imported(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS_TORCH, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr
    assert done.stderr.startswith("multihop: ") and "missing" in done.stderr and done.stderr.count("\n") == 1


def test_help_imports_neither_torch_nor_ray_nor_mlflow() -> None:
    assert subprocess.check_output([sys.executable, "-c", HEAVY], text=True, cwd=ROOT) == "set()\n"
