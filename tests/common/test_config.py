"""What each key of a recipe decides is declared once, on its field."""

from typing import Annotated, Any

import pytest
from pydantic import Field, ValidationError

from multihop.cluster.runs.recipe import Recipe
from multihop.common.config import (
    COMPATIBILITY,
    DATA,
    LOGGING,
    ORDER,
    SPEED,
    Section,
    effect_of,
    effects_by_key,
    select_by_effect,
)


class Inner(Section):
    rows: Annotated[int, ORDER] = 1
    threads: Annotated[int, SPEED] = 2


class Plain(Section):
    words: int = 1


class Outer(Section):
    name: Annotated[str, LOGGING] = "a"
    inner: Inner = Inner()
    several: list[Inner] = Field(default=[Inner(), Inner(rows=5)])
    perhaps: Annotated[Plain | None, DATA] = None
    free: Annotated[dict[str, int], SPEED | COMPATIBILITY] = Field(default={"x": 1})


class Numbers(Section):
    several: tuple[int, ...] = ()
    pair: tuple[float, float] = (0.0, 1.0)
    perhaps: Annotated[Annotated[float, Field(ge=0.0)] | None, DATA] = None
    either: bool | int = 0


@pytest.mark.parametrize("content", [{"several": [3, True]}, {"pair": [False, 0.5]}, {"perhaps": True}])
def test_true_and_false_are_no_numbers_wherever_they_stand(content: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"(several=true|pair=false|perhaps=true) is not a number"):
        Numbers.model_validate(content)


def test_true_is_taken_where_it_is_meant() -> None:
    assert Numbers.model_validate({"either": True, "several": [0, 1]}).either is True


def test_every_key_of_a_recipe_declares_what_it_decides() -> None:
    result = effects_by_key(Recipe)
    assert len(result) > 100 and all(result.values())


def test_a_field_that_declares_nothing_is_an_error() -> None:
    class Forgotten(Section):
        inner: Plain = Plain()

    with pytest.raises(TypeError, match=r"Plain.words does not declare its effects"):
        effects_by_key(Forgotten)


def test_a_section_in_a_declared_field_inherits() -> None:
    assert effects_by_key(Outer)["perhaps.words"] == DATA


@pytest.mark.parametrize(
    ("key", "decides"),
    [
        ("name", LOGGING),
        ("inner.rows", ORDER),
        ("inner", ORDER | SPEED),
        ("several[1].threads", SPEED),
        ("several", ORDER | SPEED),
        ("perhaps", DATA),
        ("free.x", SPEED | COMPATIBILITY),
    ],
)
def test_a_key_is_found_with_indexes_and_as_a_whole_section(key: str, decides: object) -> None:
    assert effect_of(Outer, key) == decides


def test_a_key_that_does_not_exist() -> None:
    with pytest.raises(KeyError):
        effect_of(Outer, "inner.other")


def test_the_part_that_decides_something() -> None:
    outer = Outer()
    assert select_by_effect(outer, ORDER) == {"inner": {"rows": 1}, "several": [{"rows": 1}, {"rows": 5}]}
    assert select_by_effect(outer, DATA) == {"perhaps": None}
    empty = outer.model_copy(update={"several": []})
    assert select_by_effect(empty, ORDER) == {"inner": {"rows": 1}, "several": []}
    assert select_by_effect(empty, COMPATIBILITY) == {"free": {"x": 1}}
    assert select_by_effect(outer.model_copy(update={"perhaps": Plain()}), DATA) == {"perhaps": {"words": 1}}
    assert select_by_effect(outer, COMPATIBILITY) == {"free": {"x": 1}}
