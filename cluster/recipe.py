"""A recipe: one YAML file, with overrides from the command line, checked before anything starts."""

import json
import re
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from cluster.mlflow_store import STORE_FILES
from cluster.recipe_text import check_texts, read_tree
from data_prep.config import DataConfig, Section, TokenizerConfig
from eval.config import EvalConfig
from pretrain.config import TrainingConfig
from pretrain.deepspeed_config import fill_deepspeed_config, read_deepspeed_config

_TOLD = 5
_LONGEST_TOLD = 200


class TrackingConfig(Section):
    """Where runs are compared."""

    uri: str | None = None
    """MLflow's tracking URI; null: MLFLOW_TRACKING_URI, else SQLite in the folder of the runs."""
    experiment: str = "multihop"


class ClusterConfig(Section):
    """What it runs on."""

    address: str | None = None
    """A Ray cluster's address; null: RAY_ADDRESS, else Ray is started on this machine."""
    workers: int = Field(default=2, ge=1)
    """Ranks of pretraining."""

    @field_validator("address")
    @classmethod
    def _has_no_password(cls, address: str | None) -> str | None:
        if address is not None and "@" in address:
            raise ValueError("it has an @; write HOST:PORT, and give Ray's token by RAY_AUTH_TOKEN in the environment")
        return address


class Recipe(TrainingConfig):
    """Everything that decides a run."""

    name: str
    data: DataConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    eval: EvalConfig = EvalConfig()
    tracking: TrackingConfig = TrackingConfig()
    cluster: ClusterConfig = ClusterConfig()

    @field_validator("name")
    @classmethod
    def _name_is_a_folder(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise ValueError(f"{name!r} cannot be a folder's name; use letters, digits, dots, dashes and underscores")
        # A disk may take capital and small letters for the same.
        if name.lower().startswith(STORE_FILES):
            raise ValueError(f"{name!r} is a name that MLflow's files have in the folder of the runs; choose another")
        return name

    @model_validator(mode="after")
    def _pieces_suit_the_objective(self) -> "Recipe":
        wanted = ("gpt2",) if self.objective.name == "clm" else ("bert", "albert")
        # Those of an existing tokenizer are known when it is read.
        if self.tokenizer.path is None and self.tokenizer.special_pieces not in wanted:
            raise ValueError(
                f"tokenizer.special_pieces={self.tokenizer.special_pieces} lacks the pieces that objective.name="
                f"{self.objective.name} needs; set tokenizer.special_pieces={wanted[0]}"
            )
        return self


def load_recipe(path: Path, overrides: list[str]) -> Recipe:
    """Read, override, validate and resolve a recipe.

    Args:
        overrides: KEY.PATH=VALUE; a list's items by index (`phases[0].seq_len=512`); VALUE is YAML.

    Raises:
        ValueError: with the key's path, what was given and what would do.
    """
    content = read_tree(path, overrides)
    content.setdefault("name", path.stem)
    return _resolved(validate_recipe(content, str(path)))


def validate_recipe(content: dict[str, Any], origin: str) -> Recipe:
    """The recipe that `content` spells.

    Raises:
        ValueError: one sentence a mistake.
    """
    check_texts(content, origin)
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        sentences = [_sentence(part, origin) for part in error.errors()]
        more = len(sentences) - _TOLD
        raise ValueError("; ".join(sentences[:_TOLD]) + (f"; and {more} more" if more > 0 else "")) from None


def _sentence(error: Any, origin: str) -> str:
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    if error["type"] == "extra_forbidden":
        return f"{origin}: {key} is not a key of a recipe; known here: {', '.join(_known_keys(error['loc']))}"
    if error["type"] == "missing":
        return f"{origin}: {key} is missing; set it"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{origin}: {key + ': ' if key else ''}{message}"
    if error["type"] == "finite_number":
        message += ", such as 1e9 where no limit is meant"
    given = json.dumps(error["input"], default=str)
    given = given if len(given) <= _LONGEST_TOLD else f"{given[:_LONGEST_TOLD]}…"
    return f"{origin}: {key}={given}: {message[0].lower()}{message[1:]}"


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    section: Any = Recipe
    for part in location[:-1]:
        if isinstance(part, int) or not hasattr(section, "model_fields"):
            continue
        kind = section.model_fields[part].annotation
        section = getattr(kind, "__args__", (kind,))[0]
    return sorted(section.model_fields)


def _resolved(recipe: Recipe) -> Recipe:
    """With DeepSpeed's configuration in place of its path and absolute paths, so that a worker can start anywhere."""
    if isinstance(recipe.engine.deepspeed, str):
        given = read_deepspeed_config(Path(recipe.engine.deepspeed))
        recipe = _with(recipe, "engine", deepspeed=given)
    if recipe.checkpoint.location is not None:
        recipe = _with(recipe, "checkpoint", location=_absolute(recipe.checkpoint.location))
    if recipe.model.init_from is not None:
        recipe = _with(recipe, "model", init_from=_absolute(recipe.model.init_from))
    assert isinstance(recipe.engine.deepspeed, dict)
    fill_deepspeed_config(recipe.engine.deepspeed, recipe, recipe.engine.micro_batch)
    return recipe


def _with(recipe: Recipe, section: str, **changes: Any) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=changes)})


def _absolute(location: str) -> str:
    return location.rstrip("/") if "://" in location else str(Path(location).absolute())
