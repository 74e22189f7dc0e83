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


def code_files(root: Path) -> list[Path]:
    """The files of the packages in a checkout or in site-packages, sorted by their paths."""
    found = (path for package in PACKAGES for path in (root / package).rglob("*"))
    return sorted(path for path in found if path.suffix in SUFFIXES and "__pycache__" not in path.parts)


def code_hash(root: Path) -> str | None:
    """The SHA-256 of paths and contents; None where a package is missing."""
    if not all((root / package / "__init__.py").is_file() for package in PACKAGES):
        return None
    digest = hashlib.sha256()
    for path in code_files(root):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def installed() -> str | None:
    """The code hash of what `import cluster` would import here; None where it is not installed."""
    spec = find_spec("cluster")
    return None if spec is None or spec.origin is None else code_hash(Path(spec.origin).parents[1])


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
