"""Text that tests make themselves, and a small data set prepared from it."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from made_up_pairs import CHARACTERS, COMPLETED, TOKENS, pair, recipe, shortened, write_jsonl
from rank_pool import RankPool
from s3_endpoint import bucket, s3, s3_server

from multihop.data_prep.config import DataConfig, Source, TokenizerConfig

__all__ = ["bucket", "s3", "s3_server"]
pytest_plugins = ["exit_status", "groups_of_tests", "tables_of_tests"]

# Ray gives its workers a niceness of 15, with which the tests of the other process would starve them.
os.environ.setdefault("RAY_worker_niceness", "0")

# What a busy machine makes slow is no failure. `make test-long` runs the properties with "thorough".
for _name, _examples in (("multihop", 50), ("thorough", 500)):
    settings.register_profile(
        _name, max_examples=_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("multihop")

_WORDS = [
    "river",
    "stone",
    "light",
    "window",
    "garden",
    "letter",
    "winter",
    "summer",
    "market",
    "engine",
    "paper",
    "silver",
    "bridge",
    "music",
    "harbour",
    "forest",
    "captain",
    "teacher",
    "doctor",
    "village",
    "answer",
    "question",
    "morning",
    "evening",
    "mountain",
    "valley",
    "kitchen",
    "table",
    "story",
    "number",
]


def write_texts(folder: Path, documents: int, seed: int = 0) -> Path:
    """`documents` .txt files of a few random sentences each."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        sentences = [
            " ".join(rng.choices(_WORDS, k=rng.randint(3, 12))).capitalize() + "." for _ in range(rng.randint(2, 12))
        ]
        (folder / f"{number:04d}.txt").write_text(" ".join(sentences))
    return folder


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 small documents."""
    return write_texts(tmp_path_factory.mktemp("texts"), 300)


def _prepared(texts: Path, out: Path, special_tokens: str) -> Path:
    from multihop.data_prep.pipeline.prepare import (
        prepare,  # not above: on a GPU's machine the libraries for text may be missing
    )

    prepare(
        DataConfig(sources=[Source(path=str(texts))], heldout_fraction=0.1),
        TokenizerConfig.model_validate({"vocab_size": 100, "special_tokens": special_tokens}),
        out,
    )
    return out


@pytest.fixture(scope="session")
def bert_data(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared data set with BERT's special pieces."""
    return _prepared(texts, tmp_path_factory.mktemp("bert-data"), "bert")


@pytest.fixture(scope="session")
def gpt2_data(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared data set with GPT-2's special pieces."""
    return _prepared(texts, tmp_path_factory.mktemp("gpt2-data"), "gpt2")


@pytest.fixture(scope="session")
def pairs_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared data set of 300 pairs."""
    from multihop.data_prep.pipeline.prepare import prepare

    folder = tmp_path_factory.mktemp("pairs-data")
    source = write_jsonl(folder / "pairs.jsonl", map(pair, range(300)))
    prepare(recipe(source), TOKENS, folder / "set")
    return folder / "set"


@pytest.fixture(scope="session")
def completion_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pairs of `pairs_data`, prepared for a causal model."""
    from multihop.data_prep.pipeline.prepare import prepare

    folder = tmp_path_factory.mktemp("completion-data")
    prepare(recipe(write_jsonl(folder / "pairs.jsonl", map(pair, range(300)))), COMPLETED, folder / "set")
    return folder / "set"


@pytest.fixture(scope="session")
def ctc_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared data set of 300 pairs of characters, whose targets are shorter than their sources."""
    from multihop.data_prep.pipeline.prepare import prepare

    folder = tmp_path_factory.mktemp("ctc-data")
    prepare(recipe(write_jsonl(folder / "pairs.jsonl", map(shortened, range(300)))), CHARACTERS, folder / "set")
    return folder / "set"


@pytest.fixture(scope="session")
def prepared(
    bert_data: Path, gpt2_data: Path, pairs_data: Path, completion_data: Path, ctc_data: Path
) -> Callable[[str], Path]:
    """A function that returns the prepared data set for an objective."""
    of_pairs = {"translation": pairs_data, "completion": completion_data, "ctc": ctc_data}
    return lambda objective: {"clm": gpt2_data, **of_pairs}.get(objective, bert_data)


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], RankPool]]:
    """A group of training processes by their number, started with its first job and kept until the tests end."""
    pools: dict[int, RankPool] = {}

    def of(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    yield of
    for each in pools.values():
        each.close()


@pytest.fixture(params=["disk", "s3"])
def location(request: pytest.FixtureRequest) -> str:
    """A location for files, once on the disk and once in a bucket."""
    if request.param == "disk":
        return str(request.getfixturevalue("tmp_path"))
    return f"{request.getfixturevalue('bucket')}/some/prefix"
