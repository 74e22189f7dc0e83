"""An experiment: one YAML file that names a recipe, and the runs that change it to answer a question."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from multihop.cluster.runs.recipe import Recipe, check_keys, recipe_with, validate
from multihop.cluster.runs.recipe_text import Override, parse_override, read_tree
from multihop.common.config import Section
from multihop.common.errors import UserError

Values = dict[str, Any]
"""KEY.PATH -> VALUE, as overrides on the command line."""
SAME_SECONDS = "same-seconds"
_WHAT = "an experiment"


class Experiment(Section):
    """The content of an experiment's file."""

    name: str
    """The runs are called NAME-RUN; the name of the file without its ending if it is not set."""
    question: str
    """The question that the runs answer; the report begins with it."""
    recipe: str
    """Path of the recipe that the runs change, relative to the experiment's file."""
    set: Values = Field(default_factory=dict)
    """Changes of the recipe that all runs make."""
    runs: list[dict[str, Values]] = Field(min_length=1)
    """The runs by name, with the changes that each makes; the others are compared with the first. A list of such
    mappings is a grid: each combination is a run."""
    same_seconds: Values | None = None
    """If it is set, each run but the first is repeated with as many steps as take the first run's seconds of
    training, as RUN-same-seconds, with these changes (`{}`: none), unless it took them within 10 %."""
    x: str | None = None
    """The recipe key on the horizontal axis of a picture of the final losses."""
    series: list[str] = Field(default_factory=list)
    """The recipe key, or a list of them, that distinguishes the lines of that picture."""

    @field_validator("runs", mode="before")
    @classmethod
    def _one_mapping_is_a_grid_of_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, dict) else value

    @field_validator("series", mode="before")
    @classmethod
    def _one_key_is_a_list_of_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("runs")
    @classmethod
    def _each_axis_has_runs(cls, runs: list[dict[str, Values]]) -> list[dict[str, Values]]:
        if not all(runs):
            raise UserError("an axis has no runs; write at least one, for instance `base: {}`")
        return runs

    @field_validator("x", "series")
    @classmethod
    def _keys_are_of_a_recipe(cls, value: Any) -> Any:
        check_keys([value] if isinstance(value, str) else value or [])
        return value

    @field_validator("set", "runs", "same_seconds")
    @classmethod
    def _names_are_not_set(cls, value: Any) -> Any:
        if value is not None:
            axes = value if isinstance(value, list) else [{"": value}]
            if any("name" in values for axis in axes for values in axis.values()):
                raise UserError("the key name cannot be set: runs are called after the experiment and their own key")
        return value


@dataclass(frozen=True)
class Variant:
    """A run of an experiment."""

    base: Path
    name: str
    """Name of the run."""
    overrides: tuple[Override, ...]

    def recipe(self, *last: Override) -> Recipe:
        """Return the resolved recipe; raises UserError as `load_recipe`."""
        return recipe_with(self.base, [*self.overrides, *last, ("name", self.name)])


@dataclass(frozen=True)
class Plan:
    """An experiment with the overrides of the command line."""

    experiment: Experiment
    variants: list[Variant]
    repeated: list[Variant]
    """Each variant but the first, repeated for the first one's seconds; empty without `same_seconds`."""


def read_experiment(path: Path, overrides: list[str]) -> Plan:
    """Read and validate an experiment and the recipes of its runs.

    Args:
        overrides: KEY.PATH=VALUE for all recipes; `name=…` names the experiment.

    Raises:
        UserError: naming the file or the run, the value, and what is accepted.
    """
    parsed = [parse_override(text) for text in overrides]
    content = {"name": path.stem, **read_tree(path, _WHAT)} | {key: value for key, value in parsed if key == "name"}
    parsed = [(key, value) for key, value in parsed if key != "name"]
    experiment = validate(Experiment, content, str(path), _WHAT)
    base = path.parent / experiment.recipe

    def variant(parts: list[str], *changes: Values) -> Variant:
        changed = [item for values in (experiment.set, *changes) for item in values.items()]
        return Variant(base, "-".join([experiment.name, *parts]), (*changed, *parsed))

    grid = [list(zip(*each, strict=True)) for each in product(*(axis.items() for axis in experiment.runs))]
    variants = [variant([*names], *changes) for names, changes in grid]
    repeated = []
    if experiment.same_seconds is not None:
        repeated = [variant([*names, SAME_SECONDS], *changes, experiment.same_seconds) for names, changes in grid[1:]]
    names = [each.name for each in (*variants, *repeated)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{path}: two runs are called {twice}; rename one")
    for each in (*variants, *repeated):
        _check(each, path)
    return Plan(experiment, variants, repeated)


def _check(variant: Variant, path: Path) -> None:
    try:
        variant.recipe()
    except UserError as error:
        raise UserError(f"{path}: the run {variant.name}: {error}") from None
