"""The state of a run that a start finds, resolved once."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from multihop.cluster.runs.prepared import link_dataset, work_of
from multihop.cluster.runs.recipe import Recipe, load_recipe
from multihop.cluster.runs.resolved import ResolvedRun, check_data_unchanged, resolve, store_of
from multihop.data_prep.dataset.manifest import Manifest
from multihop.data_prep.pipeline.identity import make_work_folder, resolve_inputs
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.reading import sources

ROOT = Path(__file__).parents[3]


@pytest.fixture
def recipe(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    shutil.copytree(texts, tmp_path / "texts")
    monkeypatch.chdir(ROOT)
    overrides = [f"data.sources=[{{path: {tmp_path / 'texts'}}}]", "data.heldout_fraction=0.1"]
    return load_recipe(ROOT / "recipes" / "demo-bert.yaml", [*overrides, "tokenizer={vocab_size: 100, threads: 1}"])


@pytest.fixture
def prepared(recipe: Recipe, tmp_path: Path) -> Manifest:
    """The run's data set in the store, and a link to it in the run's folder."""
    store, folder = store_of(recipe, tmp_path), tmp_path / recipe.name
    files, work = sources.list_files(recipe.data.sources), work_of(store)
    make_work_folder(work)
    inputs = resolve_inputs(recipe.data, recipe.tokenizer, files, work)
    manifest = prepare(recipe.data, recipe.tokenizer, store / inputs.identity[:16], work=work, resolved=inputs)
    folder.mkdir()
    link_dataset(folder / "data", store / inputs.identity[:16])
    return manifest


def found(recipe: Recipe, tmp_path: Path, full: bool = False) -> ResolvedRun:
    return resolve(recipe, tmp_path / recipe.name, store_of(recipe, tmp_path), full)


def test_a_run_that_has_nothing_yet(recipe: Recipe, tmp_path: Path) -> None:
    run = found(recipe, tmp_path)
    assert (run.inputs, run.data, run.checkpoint, run.step, run.is_trained) == (None, None, None, 0, False)


def test_inputs_are_listed_once_and_nothing_is_hashed(
    recipe: Recipe, prepared: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[Any] = []
    find = sources.list_location

    def counting(*arguments: Any) -> Any:
        listed.append(arguments)
        return find(*arguments)

    monkeypatch.setattr(sources, "list_location", counting)
    shard = next((tmp_path / recipe.name / "data").glob("train-*.arrow"))
    content, before = shard.read_bytes(), os.stat(shard)
    shard.write_bytes(content[:-9] + b"x" + content[-8:])
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    run = found(recipe, tmp_path)
    assert run.data == prepared and len(listed) == len(recipe.data.sources)
    assert found(recipe, tmp_path, full=True).data is None  # left to preparation, which hashes
    os.utime(shard)
    assert found(recipe, tmp_path).data is None


def test_another_text_is_another_data_set(recipe: Recipe, prepared: Manifest, tmp_path: Path) -> None:
    (tmp_path / "texts" / "new.txt").write_text("A text that is new. It has two sentences.")
    run = found(recipe, tmp_path)
    assert run.inputs is None and run.data is None
    check_data_unchanged(run, prepared, ())  # nothing was trained on the former one
