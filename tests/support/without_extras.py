"""An environment in which the packages of the extras `cluster` and `eval` cannot be imported, nor torch's compiler."""

import os
from pathlib import Path

EXTRAS = {"jinja2", "matplotlib", "mlflow", "ray", "seqeval", "sklearn"}
_SITE = f"""import sys
sys.modules.update(dict.fromkeys({sorted(EXTRAS)}))

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._dynamo":
            raise ImportError("torch's compiler is imported, although nothing is compiled")

sys.meta_path.insert(0, Refused())
"""
"""A module that is None in sys.modules cannot be imported, and is not found. torch would take its compiler for imported
then."""


def without_extras(folder: Path) -> dict[str, str]:
    """Write a sitecustomize.py into `folder`; returns the environment variables with which Python reads it."""
    (folder / "sitecustomize.py").write_text(_SITE)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
