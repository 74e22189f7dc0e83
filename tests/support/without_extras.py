"""An environment in which the packages of the extras `cluster` and `eval` cannot be imported."""

import os
from pathlib import Path

EXTRAS = {"jinja2", "matplotlib", "mlflow", "ray", "seqeval", "sklearn"}
_SITE = f"import sys\nsys.modules.update(dict.fromkeys({sorted(EXTRAS)}))\n"
"""A module that is None in sys.modules cannot be imported, and is not found."""


def without_extras(folder: Path) -> dict[str, str]:
    """Write a sitecustomize.py into `folder`; returns the environment variables with which Python reads it."""
    (folder / "sitecustomize.py").write_text(_SITE)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
