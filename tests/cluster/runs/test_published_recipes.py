"""The recipes of published models build and train what the papers print."""

import re
from dataclasses import dataclass
from itertools import product
from math import ceil
from pathlib import Path

import pytest

from multihop.cluster.runs.recipe import Recipe, load_recipe
from multihop.eval.config import TaskConfig, settings_of
from multihop.pretrain.data.phases import batch_size_of, locate, samples_before, samples_in_phase, total_steps
from multihop.pretrain.models.build import build_model_on_meta
from multihop.pretrain.optim.schedule import learning_rate

ROOT = Path(__file__).parents[3]
OURS = {
    "comet", "continue", "ctc", "demo", "demo-bert", "elmo-mini", "lamb", "reviews", "small-budget", "translation",
    "ulmfit", "ulmfit-general",
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """The numbers that a paper prints about a model."""

    parameters: float
    within: float
    """Tolerance: half a unit of the last digit in the paper, or more if the paper counts differently."""
    vocabulary: int
    """Number of tokens in the vocabulary of the released model."""
    steps: int
    samples: int
    """Number of samples in all steps."""
    pieces: float
    """Number of tokens in all steps if every sample has the maximum length."""
    rates: dict[int, float]
    """The learning rate of the N-th step, from 1."""


BERT_RATES = {
    1: 1e-8,
    5_000: 0.5e-4,
    10_000: 1e-4,  # the end of warm-up
    505_001: 0.5e-4,  # half-way down one line to 0 over both phases
    900_001: 1e-4 * 10 / 99,  # the first at 512 pieces
    1_000_000: 1e-4 / 990_000,
}
BERT_PIECES = 256 * (900_000 * 128 + 100_000 * 512)


def albert(parameters: float, within: float) -> Published:
    rates = {3_125: 1.76e-3, 125_000: 1.76e-3 / 121_875}
    return Published(parameters, within, 30_000, 125_000, 512_000_000, 512e6 * 512, rates)


def roberta(parameters: float, within: float, warmup: int, lr: float) -> Published:
    rates = {warmup // 2: lr / 2, warmup: lr, 500_000: lr / (500_000 - warmup)}
    return Published(parameters, within, 50_265, 500_000, 500_000 * 8_192, 500_000 * 8_192 * 512, rates)


def gpt2(parameters: float, within: float, lr: float) -> Published:
    # Brown et al. 2020: 375 million pieces of warm-up, down to a tenth, 300 billion pieces.
    rates = {715: lr, 715 + (572_205 - 715) // 2 + 1: 0.55 * lr, 572_205: 0.1 * lr}
    return Published(parameters, within, 50_257, 572_205, 572_205 * 512, 300e9, rates)


PUBLISHED = {
    "bert-mini": Published(11.3e6, 0.05e6, 30_522, 1_000_000, 256_000_000, BERT_PIECES, BERT_RATES),
    "bert-base": Published(110e6, 0.5e6, 30_522, 1_000_000, 256_000_000, BERT_PIECES, BERT_RATES),
    "bert-large": Published(340e6, 5e6, 30_522, 1_000_000, 256_000_000, BERT_PIECES, BERT_RATES),
    "bert-large-lamb": Published(
        340e6,
        5e6,
        30_522,
        8_599,
        512_000_000,  # as many as the paper's baseline, of 1,000,000 steps of 512
        0.9 * 512e6 * 128 + 0.1 * 512e6 * 512,
        {2_000: 6e-3, 7_037: 6e-3 / 5_037, 7_037 + 200: 4e-3, 8_599: 4e-3 / 1_362},
    ),
    "albert-base": albert(12e6, 0.5e6),
    "albert-large": albert(18e6, 0.5e6),
    "albert-xlarge": albert(60e6, 1e6),
    "albert-xxlarge": albert(223e6, 0.5e6),  # of the released model; the paper has 235M, which its sizes do not make
    "roberta-base": roberta(125e6, 0.5e6, 24_000, 6e-4),
    "roberta-large": roberta(355e6, 0.5e6, 30_000, 4e-4),
    "modernbert-base": Published(
        149e6,
        1e6,
        50_368,
        374_902 + 423_855 + 84_771,
        4_239 * 11_520 + (374_902 - 5 * 4_239) * 4_608 + (423_855 + 84_771) * 72,
        1.719e12 + 250e9 + 50e9,  # Warner et al. 2024, table 3
        {3_815: 8e-4, 374_902: 8e-4, 374_903: 3e-4, 798_757: 3e-4, 883_528: 3e-4 / 84_771},
    ),
    "gpt": Published(
        117e6,
        0.5e6,
        40_478,
        3_000_000,
        192_000_000,
        100 * 985e6,  # epochs, words
        {1_000: 1.25e-4, 2_000: 2.5e-4, 1_501_001: 1.25e-4},
    ),
    "gpt2-124m": gpt2(124e6, 0.5e6, 6e-4),
    "gpt2-355m": gpt2(355e6, 0.5e6, 3e-4),
    "gpt2-774m": gpt2(774e6, 0.5e6, 2.5e-4),
    "gpt2-1.5b": gpt2(1558e6, 0.5e6, 2e-4),
    "gpt2-8.3b": Published(
        8.3e9,
        0.05e9,
        50_257,
        300_000,
        300_000 * 512,
        300_000 * 512 * 1_024,
        {1_500: 0.75e-4, 3_000: 1.5e-4, 300_000: 1e-5},
    ),
}
NAMES = list(PUBLISHED)
TRANSFORMERS = {"transformer-base": (65e6, 100_000, 0.1), "transformer-big": (213e6, 300_000, 0.3)}
"""Parameters, steps and dropout from Vaswani et al. 2017, tables 2 and 3 and section 5.2."""

# Lan et al. 2020, table 14: learning rate, batch size, dropout of ALBERT and of the classifier, training steps, warm-up
# steps and maximum length; then the training examples of the official files.
ALBERT_TASKS = {
    "glue/cola": (1e-5, 16, 0.0, 0.1, 5_336, 320, 512, 8_551),
    "glue/stsb": (2e-5, 16, 0.0, 0.1, 3_598, 214, 512, 5_749),
    "glue/sst2": (1e-5, 32, 0.0, 0.1, 20_935, 1_256, 512, 67_349),
    "glue/mnli": (3e-5, 128, 0.0, 0.1, 10_000, 1_000, 512, 392_702),
    "glue/qnli": (1e-5, 32, 0.0, 0.1, 33_112, 1_986, 512, 104_743),
    "glue/qqp": (5e-5, 128, 0.1, 0.1, 14_000, 1_000, 512, 363_846),
    "glue/rte": (3e-5, 32, 0.1, 0.1, 800, 200, 512, 2_490),
    "glue/mrpc": (2e-5, 32, 0.0, 0.1, 800, 200, 512, 3_668),
    "glue/wnli": (2e-5, 16, 0.1, 0.1, 2_000, 250, 512, 635),
    "squad1": (5e-5, 48, 0.0, 0.1, 3_649, 365, 384, 87_599),
    "squad2": (3e-5, 48, 0.0, 0.1, 8_144, 814, 512, 130_319),
    "race": (2e-5, 32, 0.1, 0.1, 12_000, 1_000, 512, 87_866),
}


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def recipe_of(name: str) -> Recipe:
    return load_recipe(Path("recipes", f"{name}.yaml"), [])


def test_every_recipe_that_is_not_our_own_is_checked_here() -> None:
    assert {path.stem for path in Path("recipes").glob("*.yaml")} == OURS | PUBLISHED.keys() | TRANSFORMERS.keys()


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_transformer_is_trained_as_published(name: str) -> None:
    (parameters, steps, dropout), recipe = TRANSFORMERS[name], recipe_of(name)
    model = build_model_on_meta(recipe.model, recipe.tokenizer.vocab_size)
    # The paper's counts are rounded, and say nothing of the bias of the logits.
    assert sum(each.numel() for each in model.parameters()) == pytest.approx(parameters, rel=0.03)
    assert recipe.model.dropout == dropout and recipe.objective.label_smoothing == 0.1
    assert [phase.global_batch_tokens for phase in recipe.phases] == [25_000] and total_steps(recipe.phases) == steps
    for step in (1, 2_000, 4_000, 16_000, steps):
        published = recipe.model.hidden**-0.5 * min(step**-0.5, step * 4_000**-1.5)
        assert learning_rate(recipe.phases, step - 1) == pytest.approx(published, rel=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_the_model_has_as_many_parameters_as_published(name: str) -> None:
    paper = PUBLISHED[name]
    model = build_model_on_meta(recipe_of(name).model, paper.vocabulary)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(
        paper.parameters, abs=paper.within
    )


@pytest.mark.parametrize("name", NAMES)
def test_steps_samples_and_pieces_are_the_published_ones(name: str) -> None:
    paper, phases = PUBLISHED[name], recipe_of(name).phases
    assert total_steps(phases) == paper.steps
    assert samples_before(phases, paper.steps) == pytest.approx(paper.samples, rel=1e-3)
    assert sum(samples_in_phase(phase, phase.steps) * phase.seq_len for phase in phases) == pytest.approx(
        paper.pieces, rel=2e-3
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_rate_is_the_published_one_at_the_points_that_are_known(name: str) -> None:
    paper, phases = PUBLISHED[name], recipe_of(name).phases
    for step, rate in paper.rates.items():
        assert learning_rate(phases, step - 1) == pytest.approx(rate, rel=1e-4), step


def test_berts_two_phases_have_one_schedule() -> None:
    """The rate falls by the same amount at every step, also where the length changes (Devlin et al. 2018, app. A.2)."""
    for name in ("bert-base", "bert-large"):
        phases = recipe_of(name).phases
        assert [phase.seq_len for phase in phases] == [128, 512] and phases[0].steps == 0.9 * total_steps(phases)
        for step in (10_000, 500_000, 899_998, 899_999, 900_000, 999_998):
            fall = learning_rate(phases, step) - learning_rate(phases, step + 1)
            assert fall == pytest.approx(1e-4 / 990_000, rel=1e-6), step


def test_lamb_changes_batch_and_length_together_and_warms_up_twice() -> None:
    """Nine tenths of the samples have 128 tokens (You et al. 2020, table 1 and section 4)."""
    phases = recipe_of("bert-large-lamb").phases
    first_of_second = phases[0].steps
    assert [(batch_size_of(phase, 0), phase.seq_len) for phase in phases] == [(65_536, 128), (32_768, 512)]
    assert locate(phases, first_of_second) == (1, 0)
    share = samples_before(phases, first_of_second) / samples_before(phases, total_steps(phases))
    assert share == pytest.approx(0.9, abs=5e-4)
    assert learning_rate(phases, first_of_second) == pytest.approx(4e-3 / 200)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("albert")])
def test_alberts_tasks_are_fine_tuned_as_published(name: str) -> None:
    section = recipe_of(name).eval
    result = {}
    for task in section.tasks:
        (given,) = settings_of(section, task)
        examples = ALBERT_TASKS[task.name][-1]
        if task.name.startswith("squad"):  # the published steps count questions
            steps = int(given.epochs * examples / given.batch_size)
        else:
            steps = round(given.epochs * ceil(examples / given.batch_size))
        rates = (given.lr, given.batch_size, given.dropout, given.head_dropout)
        result[task.name] = (*rates, steps, round(given.warmup_ratio * steps), given.seq_len, examples)
    assert result == ALBERT_TASKS


def test_the_compact_models_have_their_grid() -> None:
    section = recipe_of("bert-mini").eval
    given = settings_of(section, TaskConfig(name="glue/mrpc"))
    assert {(each.batch_size, each.lr) for each in given} == set(
        product((8, 16, 32, 64, 128), (3e-4, 1e-4, 5e-5, 3e-5))
    )
    assert {each.epochs for each in given} == {4}


def test_the_table_tells_of_every_recipe_its_steps_batches_and_parameters() -> None:
    rows = re.findall(r"^\| `([\w.-]+)` \| [^|]+ \| [^|]+ \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", _table(), re.MULTILINE)
    assert [name for name, _, _, _ in rows] == [*NAMES, *TRANSFORMERS]
    for name, parameters, steps, batches in rows:
        recipe = recipe_of(name)
        vocabulary = PUBLISHED[name].vocabulary if name in PUBLISHED else recipe.tokenizer.vocab_size
        model = build_model_on_meta(recipe.model, vocabulary)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert parameters == (f"{count / 1e9:.1f}B" if count > 5e9 else f"{count / 1e6:.1f}M")
        assert steps == " + ".join(f"{phase.steps:,}" for phase in recipe.phases)
        sizes = [
            f"{phase.global_batch_size:,}"
            if phase.global_batch_tokens is None
            else f"{phase.global_batch_tokens:,} tokens a side"
            for phase in recipe.phases
        ]
        assert batches == ", ".join(dict.fromkeys(sizes))


def _table() -> str:
    return Path("recipes", "README.md").read_text()
