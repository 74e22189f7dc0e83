"""The recipe of `multihop init` is valid for all texts and machines, and its model grows with them."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from multihop.cluster.runs.recipe import Recipe, validate_recipe
from multihop.cluster.runs.recipe_text import parse_yaml
from multihop.cluster.runs.starter_recipe import (
    LEAST_BYTES,
    LEAST_DOCUMENTS,
    Machine,
    Text,
    choose,
    pick_field,
    vocabulary_limit,
)
from multihop.cluster.runs.starter_yaml import recipe_yaml, summary
from multihop.common.errors import UserError
from multihop.data_prep.config import Source
from multihop.pretrain.check_effects import check_effects

TEXTS = st.builds(
    Text,
    bytes=st.integers(LEAST_BYTES, 10**13),
    documents=st.integers(LEAST_DOCUMENTS, 10**10),
    characters=st.integers(1, 1_000),
)
GPUS = st.sampled_from(["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "some other card"])
MACHINES = st.one_of(
    st.builds(Machine, cores=st.integers(1, 512), memory=st.integers(0, 2**42)),
    st.builds(
        Machine,
        cores=st.integers(1, 512),
        memory=st.integers(2**30, 2**42),
        gpus=st.integers(1, 16),
        gpu_name=GPUS,
        gpu_memory=st.integers(2**32, 2**37),
        has_bf16=st.booleans(),
    ),
)
HOURS = st.floats(0.1, 10_000)
SOURCES = [
    Source(path="texts/*.jsonl.gz", field="the body: #1"),
    Source(path='a "b" \\ *c/', documents="line"),
]


def written(text: Text, machine: Machine, causal: bool, hours: float) -> Recipe:
    starter = choose(text, machine, causal, hours)
    content = parse_yaml(recipe_yaml(starter, "first", SOURCES, text, machine), "first.yaml")
    return validate_recipe(content, "first.yaml")


@given(TEXTS, MACHINES, st.booleans(), HOURS)
def test_the_recipe_is_valid_and_says_what_was_chosen(text: Text, machine: Machine, causal: bool, hours: float) -> None:
    assume(text.characters * 1.25 + 200 <= vocabulary_limit(text))
    starter = choose(text, machine, causal, hours)
    recipe = written(text, machine, causal, hours)
    check_effects(recipe)
    assert recipe.data.sources == SOURCES
    (phase,) = recipe.phases
    assert (phase.seq_len, phase.global_batch_size, phase.steps) == (starter.seq_len, starter.batch, starter.steps)
    assert (recipe.model.layers, recipe.model.hidden, recipe.model.heads) == (
        starter.layers,
        starter.hidden,
        starter.heads,
    )
    assert phase.global_batch_size >= machine.ranks == recipe.cluster.workers[0]
    assert recipe.engine.eval_interval <= phase.steps and recipe.checkpoint.save_interval <= phase.steps
    assert summary(starter)


@given(TEXTS, MACHINES, st.booleans(), HOURS)
def test_the_vocabulary_is_one_that_the_text_supports_and_has_its_characters(
    text: Text, machine: Machine, causal: bool, hours: float
) -> None:
    assume(text.characters * 1.25 + 200 <= vocabulary_limit(text))
    vocab_size = choose(text, machine, causal, hours).vocab_size
    assert text.characters < vocab_size <= vocabulary_limit(text)


@given(TEXTS, MACHINES, st.booleans(), HOURS, st.integers(1, 1000))
def test_more_text_makes_no_smaller_model_vocabulary_or_batch(
    text: Text, machine: Machine, causal: bool, hours: float, times: int
) -> None:
    assume(text.characters * 1.25 + 200 <= vocabulary_limit(text))
    more = replace(text, bytes=text.bytes * times, documents=text.documents * times)
    little, much = (choose(each, machine, causal, hours) for each in (text, more))
    assert little.parameters <= much.parameters and little.vocab_size <= much.vocab_size
    assert (little.layers, little.hidden) <= (much.layers, much.hidden)
    assert little.heldout_fraction >= much.heldout_fraction


@given(TEXTS, st.booleans(), HOURS, st.integers(1, 16), st.integers(1, 8), st.floats(1, 100))
def test_a_faster_machine_and_more_time_make_no_smaller_model(
    text: Text, causal: bool, hours: float, cores: int, times: int, longer: float
) -> None:
    assume(text.characters * 1.25 + 200 <= vocabulary_limit(text))
    slow, fast = (Machine(count, 2**33 * count) for count in (cores, cores * times))
    little, much = choose(text, slow, causal, hours), choose(text, fast, causal, hours * longer)
    assert (little.layers, little.hidden) <= (much.layers, much.hidden)
    assert little.vocab_size <= much.vocab_size


@given(TEXTS, MACHINES, st.booleans(), HOURS)
def test_text_is_not_read_more_often_than_pays_unless_a_run_would_have_too_few_steps(
    text: Text, machine: Machine, causal: bool, hours: float
) -> None:
    assume(text.characters * 1.25 + 200 <= vocabulary_limit(text))
    starter = choose(text, machine, causal, hours)
    assert starter.passes <= (4 if causal else 10) or starter.steps == 1000
    assert starter.hours <= hours * 1.001 or starter.steps == 1000


GPU = "NVIDIA H100 80GB HBM3"
DOCUMENTED = {
    "2 cores": Machine(2, 16 * 10**9),
    "16 cores": Machine(16, 64 * 10**9),
    "8 H100": Machine(16, 64 * 10**9, 8, GPU, 80 * 10**9, has_bf16=True),
}
BYTES = {"1 MB": 10**6, "10 MB": 10**7, "100 MB": 10**8, "1 GB": 10**9, "10 GB": 10**10}


def test_the_documented_choices_are_these() -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/how-much.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:2] == "| "]
    assert rows[0][0] == "text" and len(rows) > 5
    for amount, machine, hours, *documented in rows[1:]:
        amount, _, kind = amount.partition(", ")
        text = Text(BYTES[amount], BYTES[amount] // 2000, 90)
        starter = choose(text, DOCUMENTED[machine], kind == "causal", float(hours))
        assert documented == [
            f"{starter.layers} x {starter.hidden}",
            f"{starter.vocab_size:,}",
            f"{starter.steps:,}",
            f"{starter.batch} x {starter.seq_len}",
            f"{starter.passes:.1f}",
        ]


def test_too_little_text_is_refused() -> None:
    cores = Machine(2, 2**34)
    with pytest.raises(UserError, match=r"have about 5,000 bytes, .* less than 100,000"):
        choose(Text(5_000, 100, 60), cores, False, 1.0)
    with pytest.raises(UserError, match="have 2 documents, and less than 30"):
        choose(Text(10**6, 2, 60), cores, False, 1.0)
    with pytest.raises(UserError, match=r"4,000 different characters, but 100,000 bytes support .* 1,500 tokens"):
        choose(Text(100_000, 100, 4_000), cores, False, 1.0)


@pytest.mark.parametrize(
    ("lengths", "field"),
    [
        ({"body": 80.0}, "body"),
        ({"text": 80.0, "title": 79.0}, "text"),
        ({"body": 400.0, "title": 100.0}, "body"),
    ],
)
def test_the_field_is_the_only_one_or_clearly_the_text(lengths: dict[str, float], field: str) -> None:
    assert pick_field(lengths, "a.jsonl") == field


def test_an_ambiguous_field_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"body \(on average 200 characters\), summary \(on .*; choose one with --field"
    ):
        pick_field({"body": 200.0, "summary": 90.0}, "a.jsonl")
    with pytest.raises(UserError, match=r"a\.jsonl has no field with text in its first rows; name it with --field"):
        pick_field({}, "a.jsonl")
