"""A recipe: one YAML file, with overrides from the command line, checked before anything starts."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from multihop.cluster.runs.recipe_text import Override, check_texts, parse_override, put, read_tree
from multihop.cluster.tracking.connection import STORE_FILES
from multihop.common.config import LOCATION, LOGGING, SPEED, Section, effect_of, key_path, mistakes_in, sections_in
from multihop.common.errors import UserError
from multihop.data_prep.config import DataConfig, TokenizerConfig, check_tokenizer
from multihop.data_prep.tokenizers.special_tokens import SPECIAL_TOKENS
from multihop.eval.config import EvalConfig
from multihop.pretrain.check_effects import check_effects
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.engine.deepspeed_config import fill_deepspeed_config, read_deepspeed_config
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.objectives.config import OBJECTIVES

_Section = TypeVar("_Section", bound=Section)
_SHOWN = 5
_MAX_SHOWN = 200


class TrackingConfig(Section):
    """MLflow, which tracks and compares runs."""

    uri: Annotated[str | None, LOGGING] = None
    """MLflow's tracking URI; null: MLFLOW_TRACKING_URI, else SQLite in the folder of the runs."""
    experiment: Annotated[str, LOGGING] = Field(default="multihop", min_length=1)


class ClusterConfig(Section):
    """The Ray cluster that the run uses."""

    address: Annotated[str | None, LOGGING] = None
    """Address of a Ray cluster; null: RAY_ADDRESS if set, otherwise Ray is started on this machine."""
    workers: Annotated[list[Annotated[int, Field(ge=1)]], SPEED] = Field(default=[2], min_length=1, max_length=2)
    """Number of ranks in pretraining, or [min, max]: as many as the cluster has room for. The run goes on with fewer
    when nodes are lost, and with more when they join. Sample order and batch size do not depend on it; the
    results of a step differ by rounding."""
    env: Annotated[list[str], LOGGING] = Field(default=[])
    """Names of environment variables that the ranks need, for example AWS_PROFILE. Each must be set on all nodes when
    Ray is started on them; a rank that lacks one ends the run. Values stay on the nodes."""

    @field_validator("workers", mode="before")
    @classmethod
    def _one_number_is_a_list_of_one(cls, workers: Any) -> Any:
        return workers if isinstance(workers, list | tuple) else [workers]

    @field_validator("workers")
    @classmethod
    def _the_least_is_first(cls, workers: list[int]) -> list[int]:
        if workers != sorted(workers):
            raise UserError(f"expected [min, max]; write {sorted(workers)}")
        return workers

    @property
    def worker_range(self) -> tuple[int, int]:
        """Numbers of ranks."""
        return self.workers[0], self.workers[-1]

    @field_validator("env")
    @classmethod
    def _has_names_only(cls, names: list[str]) -> list[str]:
        # The message does not repeat the value, which may be a secret.
        if not all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) for name in names):
            raise UserError("expected names of environment variables, without values: set these on the nodes")
        return names

    @field_validator("address")
    @classmethod
    def _has_no_password(cls, address: str | None) -> str | None:
        if address is not None and "@" in address:
            raise UserError(
                "it contains an @; write HOST:PORT, and set Ray's token as RAY_AUTH_TOKEN in the environment"
            )
        return address


class Recipe(TrainingConfig):
    """All settings of a run."""

    name: Annotated[str, LOCATION]
    data: DataConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    eval: EvalConfig = EvalConfig()
    tracking: TrackingConfig = TrackingConfig()
    cluster: ClusterConfig = ClusterConfig()

    @field_validator("name")
    @classmethod
    def _name_is_a_folder(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise UserError(f"{name!r} is not a valid name; use letters, digits, dots, dashes and underscores")
        # File systems may be case-insensitive.
        if name.lower().startswith(STORE_FILES):
            raise UserError(f"{name!r} is reserved for the files of MLflow; choose another name")
        return name

    @model_validator(mode="after")
    def _tokens_suit_the_objective(self) -> "Recipe":
        needed = self.objective.needs.special_tokens
        wanted = [name for name, tokens in SPECIAL_TOKENS.items() if tokens.keys() == needed]
        # The special tokens of an existing tokenizer are known when it is read.
        if self.tokenizer.path is None and self.tokenizer.special_tokens not in wanted:
            raise UserError(
                f"tokenizer.special_tokens={self.tokenizer.special_tokens} lacks the tokens that objective.name="
                f"{self.objective.name} needs; set tokenizer.special_tokens={wanted[0]}"
            )
        return self

    @model_validator(mode="after")
    def _sources_suit_the_objective(self) -> "Recipe":
        reads_pairs = self.objective.needs.reads_pairs
        if reads_pairs and not self.data.holds_pairs:
            raise UserError(
                f"objective.name={self.objective.name} of model.family={self.model.family} reads pairs, but "
                "data.sources have documents; give the sources fields={source: …, target: …} or target_path, or set "
                "another family or objective"
            )
        if self.data.holds_pairs and not reads_pairs:
            of_pairs = [name for name, needs in OBJECTIVES.items() if needs.reads_pairs]
            own = [name for name in FAMILIES[self.model.family].objectives if name in of_pairs]
            families = [name for name, family in FAMILIES.items() if {*family.objectives} & {*of_pairs}]
            instead = f"objective.name={' or '.join(own)}" if own else f"model.family={' or '.join(families)}"
            raise UserError(
                f"data.sources have pairs, but objective.name={self.objective.name} of model.family="
                f"{self.model.family} reads documents; set {instead}"
            )
        check_tokenizer(self.data, self.tokenizer)
        return self


def check_keys(keys: Iterable[str], option: str = "") -> None:
    """Check that these dotted keys exist in a recipe; they may name whole sections.

    Args:
        option: the command-line option that they come from, for the message.

    Raises:
        UserError: a key does not exist.
    """
    for key in keys:
        try:
            effect_of(Recipe, key)
        except KeyError:
            text = f"{option}={key}" if option else key
            raise UserError(f"{text} is not a key of a recipe; write KEY.PATH, for instance model.layers") from None


def load_recipe(path: Path, overrides: list[str]) -> Recipe:
    """Read, override, validate and resolve a recipe.

    Args:
        overrides: KEY.PATH=VALUE; a list's items by index (`phases[0].seq_len=512`); VALUE is YAML.

    Raises:
        UserError: a value is not accepted; the message has the key, its value, and what is accepted.
    """
    return resolve_paths(read_recipe(path, overrides))


def read_recipe(path: Path, overrides: list[str]) -> Recipe:
    """Read, override and validate a recipe, without resolving its paths.

    Raises:
        UserError: As for `load_recipe`.
    """
    return _read(path, [parse_override(text) for text in overrides])


def recipe_with(path: Path, overrides: Iterable[Override]) -> Recipe:
    """Load a recipe as `load_recipe`, with overrides that are already parsed.

    Raises:
        UserError: as `load_recipe`.
    """
    return resolve_paths(_read(path, overrides))


def _read(path: Path, overrides: Iterable[Override]) -> Recipe:
    content = read_tree(path, "a recipe")
    for override in overrides:
        put(content, override)
    content.setdefault("name", path.stem)
    recipe = validate_recipe(content, str(path))
    check_effects(recipe)
    return recipe


def validate_recipe(content: dict[str, Any], origin: str) -> Recipe:
    """Validate the content of a recipe.

    Raises:
        UserError: one sentence per mistake.
    """
    return validate(Recipe, content, origin, "a recipe")


def validate(section: type[_Section], content: dict[str, Any], origin: str, what: str) -> _Section:
    """Validate the content of a file.

    Args:
        what: the file is, for messages.

    Raises:
        UserError: one sentence per mistake.
    """
    check_texts(content, origin)
    try:
        return section.model_validate(content)
    except ValidationError as error:
        sentences = [_sentence(part, origin, section, what) for part in mistakes_in(error)]
        more = len(sentences) - _SHOWN
        raise UserError("; ".join(sentences[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")) from None


def _sentence(error: Any, origin: str, section: type[Section], what: str) -> str:
    location, known_keys = _locate(section, error["loc"])
    key = key_path(location)
    if error["type"] == "extra_forbidden":
        known = ", ".join(known_keys)
        return f"{origin}: {key} is not a key of {what}; known keys: {known}"
    if error["type"] == "missing":
        return f"{origin}: {key} is missing; set it"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{origin}: {key + ': ' if key else ''}{message}"
    if error["type"] == "finite_number" and re.match(r"max_|.*_mb$", str(location[-1])):
        message += "; for no limit write a large number such as 1e9"
    if error["type"] == "string_type" and isinstance(error["input"], int | float):
        message += f"""; write it in quotes, on the command line as {key}='"{error["input"]}"'"""
    value = json.dumps(error["input"], default=str)
    value = value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}…"
    return f"{origin}: {key}={value}: {message[0].lower()}{message[1:]}"


def _locate(section: Any, location: tuple[int | str, ...]) -> tuple[list[int | str], list[str]]:
    """Return the key that pydantic's location of an error names, and the keys of its section.

    Where a section has several classes, pydantic adds the value of the key that chose one.
    """
    path: list[int | str] = []
    kinds: list[Any] = [section]
    for part in location:
        if len(kinds) > 1:
            kinds = [kind for kind in kinds if part in get_args(kind.model_fields["family"].annotation)]
            continue
        path.append(part)
        if isinstance(part, str) and kinds and part in kinds[0].model_fields and part != location[-1]:
            kinds, _ = sections_in(kinds[0].model_fields[part].annotation)
    return path, sorted({key for kind in kinds for key in kind.model_fields})


def resolve_paths(recipe: Recipe) -> Recipe:
    """Replace DeepSpeed's configuration path by its content, and make paths absolute: a worker starts anywhere."""
    if isinstance(recipe.engine.deepspeed, str):
        config = read_deepspeed_config(Path(recipe.engine.deepspeed))
        recipe = _with(recipe, "engine", deepspeed=config)
    if recipe.checkpoint.location is not None:
        recipe = _with(recipe, "checkpoint", location=_absolute(recipe.checkpoint.location))
    if recipe.model.init_from is not None:
        recipe = _with(recipe, "model", init_from=_absolute(recipe.model.init_from))
    assert isinstance(recipe.engine.deepspeed, dict)
    fill_deepspeed_config(recipe.engine.deepspeed, recipe, recipe.engine.micro_batch_size)
    return recipe


def _with(recipe: Recipe, section: str, **changes: Any) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=changes)})


def _absolute(location: str) -> str:
    return location.rstrip("/") if "://" in location else str(Path(location).absolute())
