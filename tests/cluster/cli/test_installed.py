"""A wheel has all that the packages need, also outside of the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from tiny_runs import make_run
from without_extras import without_extras

ROOT = Path(__file__).parents[3]
PACKAGES = ("cluster", "common", "data_prep", "eval", "pretrain")


def files_of(package: Path) -> set[str]:
    """Return the files of `multihop` in a directory, without byte code."""
    result = (path for name in PACKAGES for path in (package / name).rglob("*") if path.is_file())
    return {path.relative_to(package).as_posix() for path in result if path.suffix != ".pyc"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of a wheel."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "src", source / "src", symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(source / "wheel")]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    (wheel,) = (source / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(out)
    return out


def test_the_wheel_has_every_file_of_the_packages(installed: Path) -> None:
    assert files_of(installed / "multihop") == files_of(ROOT / "src" / "multihop")


def test_a_recipe_needs_no_file_of_the_checkout(installed: Path, texts: Path, tmp_path: Path) -> None:
    recipe = {
        "name": "elsewhere",
        "data": {"sources": [{"path": str(texts)}]},
        "model": {"preset": "bert-tiny"},
        "phases": [{"steps": 10}],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    code = "import multihop.cluster.cli.main as cli; print(cli.__file__); cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "prep", "recipe.yaml", "--dry-run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed)) and "300 files" in done.stdout


@pytest.fixture(scope="module")
def run(gpt2_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "tiny", gpt2_data, "gpt2")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("recipes",),
        ("checkpoints", "list", "RUN"),
        ("checkpoints", "verify", "RUN"),
        ("checkpoints", "export", "RUN", "--out", "exported"),
        ("data", "verify", "RUN"),
        ("data", "stats", "RUN"),
        ("generate", "RUN", "--prompt", "a"),
        ("fill-mask", "--help"),
        ("translate", "--help"),
        ("embed", "RUN"),
    ],
    ids=" ".join,
)
def test_these_commands_need_no_extra(arguments: tuple[str, ...], run: Path, tmp_path: Path) -> None:
    command = [each.replace("RUN", str(run)) for each in arguments]
    done = multihop(tmp_path, *command)
    assert done.returncode == 0, done.stderr


def test_a_first_recipe_needs_no_extra(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text(
        "".join(f"line {number} of a text about {number % 97}\n" for number in range(9000))
    )
    done = multihop(tmp_path, "init", str(tmp_path / "lines.txt"), "--out", str(tmp_path / "first.yaml"))
    assert done.returncode == 0 and (tmp_path / "first.yaml").exists(), done.stderr


def test_a_command_whose_extra_is_missing_says_which(tmp_path: Path) -> None:
    done = multihop(tmp_path, "run", str(ROOT / "recipes" / "demo.yaml"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "is missing; pip install 'multihop[cluster]'" in done.stderr


def multihop(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in an environment in which the packages of the extras cannot be imported."""
    return subprocess.run(
        [sys.executable, "-m", "multihop.cluster.cli.main", *arguments],
        cwd=folder,
        env={**os.environ, **without_extras(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
