"""Finds the prepared data of a recipe, for commands that only read it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from multihop.cluster.runs.recipe import Recipe
from multihop.common.errors import UserError
from multihop.data_prep.dataset.manifest import MANIFEST, read_data_manifest
from multihop.data_prep.pipeline.identity import dataset_settings, sources_key


def find_data(recipe: Recipe, runs: Path) -> Path:
    """Return the directory of the data prepared with the recipe's settings.

    Raises:
        UserError: there is none.
    """
    found = prepared_data(recipe, runs)
    if found is None:
        raise UserError(
            f"the data of {recipe.name} is not prepared in {runs}; run `multihop prep` with this recipe first"
        )
    return found


def prepared_data(recipe: Recipe, runs: Path) -> Path | None:
    """Return the directory of the data prepared with the recipe's settings; None if there is none."""
    of_run = [runs / recipe.name / "data" / MANIFEST]
    of_others = (runs / ".prepared" / sources_key(recipe.data)).glob(f"*/{MANIFEST}")
    newest_first = sorted(of_others, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [path for path in of_run if path.exists()] + newest_first:
        if read_data_manifest(path.parent).settings == dataset_settings(recipe.data, recipe.tokenizer):
            return path.parent
    return None


@contextmanager
def index_folder_of(run_dir: Path) -> Iterator[Path]:
    """Yield the directory of a run's sample indexes; of a run that does not exist a temporary one."""
    if run_dir.exists():
        yield run_dir / "index"
        return
    with tempfile.TemporaryDirectory(prefix="multihop-index-") as folder:
        yield Path(folder)
