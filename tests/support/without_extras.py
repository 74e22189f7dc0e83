"""Environments in which packages cannot be imported."""

import os
from pathlib import Path

EXTRAS = {"jinja2", "matplotlib", "mlflow", "ray", "seqeval", "sklearn"}
_SITE = f"import sys\nsys.modules.update(dict.fromkeys({sorted(EXTRAS)}))\n"
"""A module that is None in sys.modules cannot be imported, and is not found."""
_NO_COMPILER = """
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._dynamo":
            raise ImportError("torch's compiler is imported, although nothing is compiled")

sys.meta_path.insert(0, Refused())
"""
"""Where torch's compiler is None in sys.modules, torch takes it for imported."""


def without_extras(folder: Path) -> dict[str, str]:
    """Write a sitecustomize.py into `folder`; returns the environment variables with which Python reads it and imports
    no package of the extras `cluster` and `eval`."""
    return _variables(folder, _SITE)


def without_extras_and_compiler(folder: Path) -> dict[str, str]:
    """As `without_extras`; nor is torch's compiler imported."""
    return _variables(folder, _SITE + _NO_COMPILER)


def _variables(folder: Path, content: str) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(content)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
