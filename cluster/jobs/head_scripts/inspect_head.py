"""What a cluster has: prints one line of JSON with the code that is installed, and the recipe of a run."""

import hashlib
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from .files import read

PACKAGES = ("cluster", "common", "data_prep", "eval", "pretrain")
SUFFIXES = (".py", ".jinja")
MARK = "multihop found: "
_VERSIONS = ("ray", "torch", "deepspeed", "mlflow", "pyarrow", "sentencepiece", "tokenizers")


def code_files(package: Path) -> list[Path]:
    """The files of the package `multihop` in a directory, sorted by path."""
    found = (path for name in PACKAGES for path in (package / name).rglob("*"))
    code = (path for path in found if path.suffix in SUFFIXES and "__pycache__" not in path.parts)
    return sorted([package / "__init__.py", *code])


def code_hash(package: Path) -> str | None:
    """The SHA-256 of paths and contents; None if a part of the package is missing."""
    if not all((package / name / "__init__.py").is_file() for name in (".", *PACKAGES)):
        return None
    digest = hashlib.sha256()
    for path in code_files(package):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def installed() -> str | None:
    """The code hash of what `import multihop` would import here; None if it is not installed."""
    spec = find_spec("multihop")
    return None if spec is None or spec.origin is None else code_hash(Path(spec.origin).parent)


def versions() -> dict[str, str | None]:
    """Of the libraries; None for one that is missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def recipe_of(run_dir: str) -> str | None:
    """The text of a run's recipe.json, or None."""
    content = read(run_dir, "recipe.json")
    return None if content is None else content.decode()


def main() -> None:
    """Argument: the run's folder, or its location in a bucket."""
    found = {"code": installed(), "versions": versions(), "recipe": recipe_of(sys.argv[1])}
    print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
