"""The commands `multihop recipes …`: the recipes and experiments that come with the package."""

import itertools
import os
import re
import shutil
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer

from multihop.common.errors import UserError

recipes_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@recipes_app.callback()
def list_recipes(context: typer.Context) -> None:
    """List the recipes that come with multihop, or copy one."""
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    with as_file(files("multihop") / "recipes") as folder:
        for name, path in _recipes_in(folder).items():
            table.add_row(name, _description(path.read_text()))
    Console(markup=False).print(table)


@recipes_app.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `multihop recipes` lists.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write to.")] = Path("."),
) -> None:
    """Copy a recipe to DIR/NAME.yaml. An experiment is copied with the recipe that its runs change."""
    with as_file(files("multihop") / "recipes") as folder:
        recipes = _recipes_in(folder)
        if name not in recipes:
            raise UserError(f"{name} is not the name of a recipe; known names: {', '.join(recipes)}")
        source = recipes[name]
        wanted = [source, *_recipe_of_experiment(source)]
        targets = [out / path.relative_to(folder) for path in wanted]
        if existing := [path for path in targets if path.exists()]:
            raise UserError(f"{existing[0]} exists; move it away, or choose another --out")
        for path, target in zip(wanted, targets, strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            print(target)


def _recipes_in(folder: Path) -> dict[str, Path]:
    """Return paths by name, the recipes first and then the experiments."""
    paths = [*sorted(folder.glob("*.yaml")), *sorted(folder.glob("experiments/*.yaml"))]
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}


def _recipe_of_experiment(path: Path) -> list[Path]:
    import yaml

    recipe = yaml.safe_load(path.read_text()).get("recipe")
    return [] if recipe is None else [Path(os.path.normpath(path.parent / recipe))]


def _description(text: str) -> str:
    """Return the question of an experiment, or the first sentence of a recipe's comment."""
    import yaml

    comment = itertools.takewhile(lambda line: line.startswith("# "), text.splitlines())
    described = yaml.safe_load(text).get("question") or " ".join(line.removeprefix("# ") for line in comment)
    return re.split(r"(?<=[.?]) (?=[A-Z])", described)[0].strip()
