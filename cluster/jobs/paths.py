"""Checks the paths in a recipe that is sent to a cluster: they are paths on its nodes and must be absolute."""

from collections.abc import Iterator
from pathlib import Path

from multihop.cluster.remote.remote_run import with_remote_checkpoints
from multihop.cluster.runs.recipe import Recipe, read_recipe, resolved
from multihop.common.errors import UserError

_SQLITE = "sqlite:///"


def load_for_cluster(path: Path, overrides: list[str], runs: str | None) -> Recipe:
    """`load_recipe` for a run on a cluster.

    Args:
        runs: directory of all runs on the nodes, or s3://BUCKET/PREFIX; None if unknown.

    Raises:
        UserError: A path is relative, or as for `load_recipe`.
    """
    recipe = read_recipe(path, overrides)
    for key, given in (*_paths(recipe), ("--runs", runs)):
        if given is not None and not given.startswith(("/", "package:")) and "://" not in given:
            raise UserError(f"{key}={given} is relative; give the absolute path that all nodes of the cluster see")
    uri = recipe.tracking.uri
    if uri is not None and uri.startswith(_SQLITE) and not uri.startswith(f"{_SQLITE}/"):
        raise UserError(
            f"tracking.uri={uri} is relative; write {_SQLITE} and the absolute path on the cluster's head, or omit it "
            "for SQLite in the directory of the runs"
        )
    return resolved(recipe if runs is None else with_remote_checkpoints(recipe, runs))


def _paths(recipe: Recipe) -> Iterator[tuple[str, str | None]]:
    """Keys and values that are paths on the nodes. `engine.deepspeed` is not among them: its content is sent."""
    for number, source in enumerate(recipe.data.sources):
        yield f"data.sources[{number}].path", source.path
        yield f"data.sources[{number}].target_path", source.target_path
    for number, path in enumerate(recipe.data.decontaminate.against if recipe.data.decontaminate else ()):
        yield f"data.decontaminate.against[{number}]", path
    yield "data.filters.c4.bad_words", recipe.data.filters.c4.bad_words if recipe.data.filters.c4 else None
    yield "tokenizer.path", recipe.tokenizer.path
    yield "model.init_from", recipe.model.init_from
    yield "checkpoint.location", recipe.checkpoint.location
    yield "eval.data_dir", recipe.eval.data_dir
    yield "eval.checkpoint", recipe.eval.checkpoint
    for number, task in enumerate(recipe.eval.tasks):
        if task.name.endswith((".yaml", ".yml")):
            yield f"eval.tasks[{number}]", task.name
