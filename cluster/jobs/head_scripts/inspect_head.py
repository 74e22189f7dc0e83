"""Lists what a host has installed; the program prints it for a cluster's head, with the recipe of a run."""

import hashlib
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from .run_files import read

PACKAGES = ("cluster", "common", "data_prep", "eval", "pretrain")
SUFFIXES = (".py", ".jinja")
RESULT_PREFIX = "multihop found: "
_VERSIONS = ("ray", "torch", "deepspeed", "mlflow", "pyarrow", "sentencepiece", "tokenizers")


def code_files(package: Path) -> list[Path]:
    """Return the files of the package `multihop` in a directory, sorted by path."""
    paths = (path for name in PACKAGES for path in (package / name).rglob("*"))
    code = (path for path in paths if path.suffix in SUFFIXES and "__pycache__" not in path.parts)
    return sorted([package / "__init__.py", *code])


def code_hash(package: Path) -> str | None:
    """Return the SHA-256 of paths and contents; None if a part of the package is missing."""
    if not all((package / name / "__init__.py").is_file() for name in (".", *PACKAGES)):
        return None
    digest = hashlib.sha256()
    for path in code_files(package):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def installed_code() -> str | None:
    """Return the code hash of what `import multihop` would import; None if it is not installed."""
    spec = find_spec("multihop")
    return None if spec is None or spec.origin is None else code_hash(Path(spec.origin).parent)


def installed_versions() -> dict[str, str | None]:
    """Return the versions of Python and of the libraries; None for a library that is missing."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def recipe_of(run_dir: str) -> str | None:
    """Return the text of a run's recipe.json, or None."""
    content = read(run_dir, "recipe.json")
    return None if content is None else content.decode()


def main(run: str) -> None:
    """Print a line of JSON: the hash of the installed code, the versions, and the run's recipe.

    Args:
        run: the run's folder, or its s3:// URI.
    """
    report = {"code": installed_code(), "versions": installed_versions(), "recipe": recipe_of(run)}
    print(RESULT_PREFIX + json.dumps(report), flush=True)
