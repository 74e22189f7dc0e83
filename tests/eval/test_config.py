"""The settings of a trial, the grid of a task and the shared section declare each setting in the same way."""

from typing import Any, get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from multihop.common.config import Effect
from multihop.eval.config import SETTINGS, EvalConfig, Grid, TaskConfig, TrialSettings


def _affects(field: FieldInfo) -> list[Effect]:
    return [each for each in field.metadata if isinstance(each, Effect)]


def _json_type(section: type[BaseModel], name: str) -> Any:
    """Return the JSON schemas of one value of a setting, with its limits; several if it may have several types."""
    schema = section.model_json_schema()["properties"][name]
    schemas = [each for each in schema.get("anyOf", [schema]) if each != {"type": "null"}]
    return [
        {key: value for key, value in each.items() if key not in ("default", "title", "minItems")}
        for each in (each["items"] if each.get("type") == "array" else each for each in schemas)
    ]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_has_one_type_and_one_effect_in_each_section(name: str) -> None:
    one = TrialSettings.model_fields[name]
    for section in (Grid, TaskConfig, EvalConfig):
        field = section.model_fields[name]
        assert _affects(field) == _affects(one) and len(_affects(one)) == 1
        assert _json_type(section, name) == _json_type(TrialSettings, name)
        values = field.get_default()
        if section is EvalConfig and name != "seq_len":
            assert (values[0] if isinstance(values, list) else values) == one.default
            assert type(None) in get_args(field.annotation) or values is not None
        else:
            assert values is None
