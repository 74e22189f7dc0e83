"""The command `multihop init`: writes a first recipe for the user's texts."""

import re
from pathlib import Path
from typing import Annotated

import typer

from multihop.common.errors import UserError
from multihop.common.redaction import safe_text


def init(
    texts: Annotated[list[str], typer.Argument(metavar="TEXTS…", help="Files, directories or globs with your texts.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Recipe to write. Default: NAME.yaml, named after the texts.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="A GPT-2, which continues text. Default: a BERT.")] = False,
    field: Annotated[
        str | None, typer.Option(metavar="NAME", help="Field with the text, in files that have several.")
    ] = None,
    hours: Annotated[
        float, typer.Option(min=0.1, max=10_000, help="Hours that training may take on this machine, about.")
    ] = 1.0,
    force: Annotated[bool, typer.Option("--force", help="Replace the recipe if it exists.")] = False,
) -> None:
    """Write a first recipe for your texts. Its comments give the reason for each choice."""
    out = out or Path(f"{_name_after(texts[0])}.yaml")
    if out.is_dir():
        raise UserError(f"{out} is a directory, not a file; choose another --out")
    if out.exists() and not force:
        raise UserError(f"{out} exists; choose another --out, or replace it with --force")
    if not out.parent.is_dir():
        raise UserError(
            f"{out.parent} is not a directory, so {out} cannot be written; create it or choose another --out"
        )

    from multihop.cluster.runs.starter_recipe import check_amount, choose
    from multihop.cluster.runs.starter_yaml import recipe_yaml, summary
    from multihop.cluster.runs.survey_texts import survey, text_of, this_machine
    from multihop.common.files import write_atomically

    surveys = [survey(path, field) for path in texts]
    for each in surveys:
        print(each)
    text = text_of(surveys)
    check_amount(text)
    machine = this_machine()
    starter = choose(text, machine, causal, hours)
    content = recipe_yaml(starter, _name_after(str(out)), [each.source for each in surveys], text, machine)
    _check(content, str(out))
    try:
        write_atomically(out, content.encode())
    except FileNotFoundError:
        raise UserError(f"{out} cannot be written: its directory accepts no files; choose another --out") from None
    print(f"{machine}: {summary(starter)}")
    print(f"wrote {safe_text(str(out))}; read it, then start with: multihop run {safe_text(str(out))}")


def _name_after(path: str) -> str:
    """Return a valid name for a run, from the last part of a path without endings and globs."""
    from multihop.cluster.tracking.connection import STORE_FILES

    parts = [part for part in re.split(r"[/\\]", path) if part and not re.search(r"[*?\[]", part)]
    stem = re.sub(r"(?<=.)\.[A-Za-z0-9.]+$", "", parts[-1]) if parts else ""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:100]
    return name if name and not name.lower().startswith(STORE_FILES) else f"run-{name}"[:100].rstrip("-")


def _check(content: str, origin: str) -> None:
    """Validate the recipe as `multihop run` will.

    Raises:
        UserError: A path has a password, for instance.
    """
    from multihop.cluster.runs.recipe import validate_recipe
    from multihop.cluster.runs.recipe_text import parse_yaml
    from multihop.pretrain.check_effects import check_effects

    check_effects(validate_recipe(parse_yaml(content, origin), origin))
