"""Recipes, keys, defaults, commands, options and formulas in the documentation exist and are right."""

import json
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import pytest
import typer
import yaml
from pydantic_core import PydanticUndefined

from multihop.cluster.cli.main import app
from multihop.cluster.runs.recipe import Recipe, load_recipe
from multihop.eval.tasks.known_tasks import TASK_NAMES
from multihop.eval.tasks.labeled_file import METRICS
from multihop.pretrain.config import PhaseConfig
from multihop.pretrain.optim.schedule import factor

ROOT = Path(__file__).parents[3]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "bench/README.md")),
    *(page for page in sorted(ROOT.glob("docs/**/*.md")) if "results" not in page.parts),
]
MINIMAL = {
    "name": "documented",
    "data": {"sources": [{"path": "texts/"}]},
    "model": {"preset": "bert-tiny"},
    "phases": [{"steps": 1000}],
}
YAML_BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
KEY = re.compile(rf"({'|'.join(Recipe.model_fields)})(\[\d*\])?(\.[a-z_]+(\[\d*\])?)+")
PATH = re.compile(r"(bench|cluster|common|data_prep|docs|eval|pretrain|recipes|tests)/[\w./-]*")


def found_in(pattern: re.Pattern[str]) -> list[Any]:
    return [
        pytest.param(match, id=f"{page.name}-{page.read_text()[: match.start()].count(chr(10)) + 1}")
        for page in PAGES
        for match in pattern.finditer(page.read_text())
    ]


def spans() -> list[str]:
    return sorted({span for page in PAGES for span in CODE_SPAN.findall(page.read_text())})


def tables(first_header: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the tables whose first column has this header."""
    for page in PAGES:
        inside = False
        for line in page.read_text().splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
            if cells and (inside or cells[0] == first_header):
                if inside and not cells[0].startswith("---"):
                    yield cells
                inside = True
            else:
                inside = False


def fields_at(path: str) -> list[Any]:
    """Return the pydantic fields of a dotted key such as `phases[].lr`: several if a section has several classes.

    Raises:
        KeyError: there is none.
    """
    sections: list[Any] = [Recipe]
    fields: list[Any] = []
    for part in path.split("."):
        name, is_item, _ = part.partition("[")
        fields = [section.model_fields[name] for section in sections if name in section.model_fields]
        if not fields:
            raise KeyError(path)
        inner = _bare(fields[0].annotation)
        if is_item:
            assert get_origin(inner) is list, f"{name} of {path} is no list"
            (inner,) = get_args(inner)
        sections = [kind for kind in get_args(inner) or [inner] if hasattr(kind, "model_fields")]
    return fields


def _bare(annotation: Any) -> Any:
    """Return the type without `| None`."""
    parts = [part for part in get_args(annotation) if part is not type(None)]
    is_union = get_origin(annotation) is Union or type(annotation).__name__ == "UnionType"
    return parts[0] if is_union and len(parts) == 1 else annotation


@pytest.mark.parametrize("block", found_in(YAML_BLOCK))
def test_recipe_snippets_are_valid_and_a_worker_can_read_them(
    block: re.Match[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | yaml.safe_load(block[1])))
    recipe = load_recipe(path, [])
    assert Recipe.model_validate(json.loads(json.dumps(recipe.model_dump(mode="json")))) == recipe


@pytest.mark.parametrize("cells", list(tables("key")), ids=lambda cells: cells[0].strip("`"))
def test_a_key_in_a_table_exists_and_has_that_default(cells: list[str]) -> None:
    defaults = [field.get_default(call_default_factory=True) for field in fields_at(cells[0].strip("`"))]
    assert all(default is not PydanticUndefined for default in defaults)
    written = [json.dumps(list(each)) if isinstance(each, list | tuple) else each for each in defaults]
    assert cells[1].strip("`") in ["null" if default is None else str(default) for default in written]


def keys() -> list[str]:
    """Return every key in the text, also those that are shown with a value."""
    result = {re.split(r": |=", span)[0] for span in spans()}
    return sorted(key for key in result if KEY.fullmatch(key) and not key.endswith(".py"))


@pytest.mark.parametrize("key", keys())
def test_a_key_in_the_text_exists(key: str) -> None:
    fields_at(key)


@pytest.mark.parametrize("path", [span for span in spans() if PATH.fullmatch(span)])
def test_a_file_in_the_text_exists(path: str) -> None:
    assert (ROOT / path).exists()


WALK = re.compile(r"^### ([^\n]+)\n.*?(\d+) stops, (\d+) returns\.\n\n((?:\d+\. [^\n]+\n)+)", re.MULTILINE | re.DOTALL)
STOP = re.compile(r"^(\d+)\. (↩ )?`([\w/.]+)`((?:, `[\w.]+`)+): ", re.MULTILINE)
WALKS = WALK.findall((ROOT / "docs" / "architecture.md").read_text())


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk[0])
def test_a_walk_through_the_code_names_its_files_functions_stops_and_returns(walk: tuple[str, ...]) -> None:
    _, stops, returns, lines = walk
    found = STOP.findall(lines)
    assert [number for number, *_ in found] == [str(number) for number in range(1, len(lines.splitlines()) + 1)]
    files = [path for _, _, path, _ in found]
    assert [bool(mark) for _, mark, _, _ in found] == [path in files[:at] for at, path in enumerate(files)]
    assert (int(stops), int(returns)) == (len(files), len(files) - len(set(files)))
    for _, _, path, names in found:
        text = (ROOT / path).read_text()
        for name in re.findall(r"\w+", names):
            assert re.search(rf"(def|class) {name}\b", text), f"{path} has no {name}"


def test_the_architecture_has_four_walks() -> None:
    assert len(WALKS) == 4


@pytest.mark.parametrize("name", TASK_NAMES)
def test_every_task_is_in_the_documentation(name: str) -> None:
    assert f"`{name}`" in (ROOT / "docs" / "evaluation.md").read_text()


def test_every_metric_of_a_users_task_is_in_the_documentation() -> None:
    text = (ROOT / "docs" / "evaluation.md").read_text()
    assert [name for names in METRICS.values() for name in names if name not in text] == []


def leaves(command: Any, name: str) -> Iterator[str]:
    """Yield the commands below a command, as they are typed."""
    below = getattr(command, "commands", {})
    for each, inner in below.items():
        yield from leaves(inner, f"{name} {each}")
    if not below:
        yield name


@pytest.mark.parametrize("command", leaves(typer.main.get_command(app), "multihop"))
def test_every_command_is_in_the_documentation(command: str) -> None:
    assert re.search(rf"`{command}[` ]", (ROOT / "docs" / "commands.md").read_text())


def commands() -> list[str]:
    """Return every `multihop …` in text and in code blocks, without comments and explanations."""
    in_blocks = re.compile(r"^ {4}(?:\$ )?(?:\.venv/bin/)?(multihop [^\n]*)", re.MULTILINE)
    result = [match for page in PAGES for match in in_blocks.findall(page.read_text())]
    result += [span for span in spans() if span.startswith("multihop ")]
    return sorted({re.split(r"\s{3,}|\s+#", command)[0].strip() for command in result})


@pytest.mark.parametrize("command", commands())
def test_a_command_exists_and_has_these_options(command: str) -> None:
    words = shlex.split(command)[1:]
    at: Any = typer.main.get_command(app)
    while (subcommands := getattr(at, "commands", None)) and words[:1] != ["--install-completion"]:
        if not words and at.invoke_without_command:
            break
        assert words and words[0] in subcommands, f"expected one of {', '.join(subcommands)}"
        at = subcommands[words.pop(0)]
    known = {option for parameter in at.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known


@pytest.mark.parametrize(
    "target", sorted({m for page in PAGES for m in re.findall(r"`make ([\w-]+)`", page.read_text())})
)
def test_a_target_of_make_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("cells", list(tables("schedule")), ids=lambda cells: cells[0].strip("`"))
def test_a_schedule_has_the_formula_that_is_shown(cells: list[str]) -> None:
    given = {
        "schedule": cells[0].strip("`"),
        "power": 2.5,
        "decay_ratio": 0.25,
        "min_lr_ratio": 0.1,
        "warmup_ratio": 0.125,
    }
    phase = PhaseConfig.model_validate({"steps": 80, **given})
    formula = compile(cells[1].strip("`"), "formula", "eval")
    n, w, d = phase.steps, phase.warmup_length, phase.decay_length
    for t in range(w, n):
        names = {
            "t": t,
            "n": n,
            "w": w,
            "d": d,
            "p": (t - w) / (n - w),
            "min_lr_ratio": phase.min_lr_ratio,
            "power": phase.power,
        }
        functions = {"sqrt": math.sqrt, "cos": math.cos, "pi": math.pi, "min": min, "max": max}
        assert eval(formula, {"__builtins__": {}}, names | functions) == pytest.approx(factor(phase, t))


def test_every_schedule_is_shown() -> None:
    shown = {cells[0].strip("`") for cells in tables("schedule")}
    assert shown == set(get_args(PhaseConfig.model_fields["schedule"].annotation))
