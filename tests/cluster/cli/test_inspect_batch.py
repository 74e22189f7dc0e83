"""`multihop inspect batch` shows the samples that training uses."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from kinds_of_families import TEXT_OBJECTIVES, TRAINED_WITH, model_section
from made_up_pairs import CHARACTERS, COMPLETED, FIELDS, TOKENS, pair, shortened, write_jsonl
from typer.testing import CliRunner

from multihop.cluster.cli.main import app
from multihop.cluster.runs.recipe import load_recipe
from multihop.common.errors import UserError
from multihop.data_prep.config import TokenizerConfig
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.pipeline.identity import sources_key
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.tokenizers import tokenizer
from multihop.data_prep.tokenizers.info import TOKENIZER
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.data.index import build_indexes

OBJECTIVES = [*TEXT_OBJECTIVES, "mlm isolated", "clm isolated"]
PHASES = [
    {
        "seq_len": 24,
        "global_batch_size": 5,
        "steps": 6,
        "batch_ramp": [{"steps": 2, "global_batch_size": 3}],
        "skip_steps": [4],
    },
    {"seq_len": 32, "global_batch_size": 7, "steps": 2},
]


def write_recipe(folder: Path, texts: Path, objective: str = "mlm+nsp") -> Path:
    name, *isolated = objective.split()
    recipe = {
        "name": "looked-into",
        "data": {
            "sources": [
                {"path": f"{texts}/00[0-4]*.txt", "weight": 1.0},
                {"path": f"{texts}/00[5-9]*.txt", "weight": 3.0},
            ],
            "heldout_fraction": 0.1,
        },
        "tokenizer": {"vocab_size": 100, "special_tokens": "gpt2" if name == "clm" else "bert"},
        "model": model_section(TRAINED_WITH[name], layers=1, hidden=8, heads=1, max_positions=64),
        "objective": {"name": name, "isolate_documents": bool(isolated)},
        "phases": PHASES,
        "engine": {"deepspeed": {}},
        "eval": {"tasks": []},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.fixture(scope="module", params=OBJECTIVES)
def prepared(
    request: pytest.FixtureRequest, texts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A recipe and a runs directory with its prepared data but without a run."""
    folder = tmp_path_factory.mktemp("inspected")
    path = write_recipe(folder, texts, request.param)
    recipe, runs = load_recipe(path, []), folder / "runs"
    prepare(recipe.data, recipe.tokenizer, runs / ".prepared" / sources_key(recipe.data) / "set")
    return path, runs


def inspect(prepared: tuple[Path, Path], *arguments: str) -> str:
    path, runs = prepared
    result = CliRunner().invoke(app, ["inspect", "batch", str(path), "--runs", str(runs), *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def inspected(prepared: tuple[Path, Path], *arguments: str) -> dict[str, Any]:
    actual: dict[str, Any] = json.loads(inspect(prepared, "--json", *arguments))
    return actual


def without_rank(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in sample.items() if key != "rank"} for sample in samples]


@pytest.mark.parametrize(("step", "phase", "size"), [(0, 0, 3), (2, 0, 5), (4, 0, 5), (7, 1, 7)])
def test_a_step_has_its_samples(prepared: tuple[Path, Path], step: int, phase: int, size: int) -> None:
    actual = inspected(prepared, "--step", str(step))
    assert (actual["step"], actual["phase"], actual["skipped"]) == (step, phase, step == 4)
    assert len(actual["samples"]) == size
    for sample in actual["samples"]:
        assert {"sample", "epoch", "document", "source", "text"} <= set(sample) and "rank" not in sample
        assert all(part["stop"] > part["start"] for part in sample["documents"])
        assert len({part["source"] for part in sample["documents"]}) == 1  # weighted sources do not share samples
    assert actual == inspected(prepared, "--step", str(step))
    assert not (prepared[1] / "looked-into").exists()


def test_samples_are_those_that_a_rank_trains_on(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    path, runs = prepared
    recipe = load_recipe(path, [])
    (folder,) = (runs / ".prepared").glob("*/set")
    build_indexes(tmp_path, open_dataset(folder), recipe)
    model, data = tokenizer.load(folder / TOKENIZER), open_dataset(folder)
    for rank in range(3):
        builder = BatchBuilder.open(recipe, folder, tmp_path, rank, 3, [2, 2])
        sequences = [
            sequence
            for batch in builder.step(7).micro_batches
            if batch.tokens
            for sequence in np.split(batch.inputs["packed"].input_ids, batch.inputs["packed"].cu_seqlens[1:-1])  # type: ignore[union-attr]
        ]
        samples = inspected(prepared, "--step", "7", "--world-size", "3", "--rank", str(rank))["samples"]
        assert [sample["rank"] for sample in samples] == [rank] * len(samples)
        assert len(samples) == builder.step(7).samples

        def spelled(ids: Iterable[int]) -> str:
            return "".join(model.id_to_token(int(i)) for i in ids).replace("▁", "")

        # A sample is one sequence, or several if documents are separate; in order, samples and sequences are the same.
        # Under plm the text is an input, too, and the mask tokens stand for the query stream's.
        name = "masked_text" if recipe.objective.name.startswith("mlm") else "text"
        shown = [sample[name].replace(" ", "") for sample in samples]
        assert "".join(shown) == "".join(map(spelled, sequences))
        separate = recipe.objective.isolate_documents or recipe.objective.name == "bilm"
        assert len(samples) == len(sequences) or separate
        for sample in samples:
            for part in sample["documents"]:
                number = int(np.flatnonzero(data.train.ids == int(part["document"]))[0])
                assert data.manifest.sources[data.train.source(number)] == part["source"]
                span = data.train.tokens(number)[part["start"] : part["stop"]].tolist()
                original = spelled(span[:-1])  # under clm the last token is only a target
                # The marks between two sentences of a biLM are no tokens of the document.
                assert original in sample["text"].replace(" ", "").replace("[SEP][CLS]", "")


def test_the_ranks_share_the_samples_of_the_step(prepared: tuple[Path, Path]) -> None:
    whole = inspected(prepared, "--step", "7")["samples"]
    shared = inspected(prepared, "--step", "7", "--world-size", "3")["samples"]
    assert without_rank(shared) == whole
    assert [sample["rank"] for sample in shared] == [0, 0, 1, 1, 2, 2, 2]
    of_second = inspected(prepared, "--step", "7", "--world-size", "3", "--rank", "1")["samples"]
    assert of_second == [sample for sample in shared if sample["rank"] == 1]
    assert inspected(prepared, "--step", "0", "--world-size", "7", "--rank", "0")["samples"] == []


def test_masks_and_segments_are_shown(prepared: tuple[Path, Path]) -> None:
    recipe = load_recipe(prepared[0], [])
    samples = inspected(prepared, "--step", "7")["samples"]
    shown = inspect(prepared, "--step", "7")
    if recipe.objective.name.startswith(("mlm", "plm")):
        assert any("[MASK]" in sample["masked_text"] for sample in samples)
        assert all("[MASK]" not in sample["text"] for sample in samples)
        cls_last = recipe.objective.name == "plm"
        texts = [sample["text"].replace(" ", "") for sample in samples]
        ends = [(text.startswith("[CLS]"), text.endswith("[SEP][CLS]")) for text in texts]
        assert set(ends) == {(not cls_last, cls_last)}
        assert " → [MASK]}" in shown
    if "nsp" in recipe.objective.name:
        for sample in samples:
            is_other = sample["next_document"] != sample["document"]
            assert sample["is_random_next"] == is_other and sample["next_source"] == sample["source"]
    if "sop" in recipe.objective.name:
        assert {sample["is_swapped"] for sample in samples} <= {True, False}
        for sample in samples:
            first, second = sample["documents"]
            assert first["document"] == second["document"]
            assert sample["is_swapped"] == (first["start"] > second["start"])
    if recipe.objective.name == "mlm":
        longer = inspected(prepared, "--step", "7", "phases[1].seq_len=64", "phases[1].global_batch_size=40")["samples"]
        assert any(len(sample["documents"]) > 1 for sample in longer)
        for sample in longer:
            several = len(sample["documents"]) if recipe.objective.isolate_documents else 1
            assert sample["text"].count("[CLS]") == several
            assert sample["text"].count("[SEP]") == len(sample["documents"])
    if recipe.objective.name == "bilm":
        assert all(sample["text"].startswith("[CLS]") for sample in samples)
        assert any(sample["text"].count("[CLS]") > 1 for sample in samples)
    if not recipe.objective.name.startswith(("mlm", "plm")):
        assert all("masked_text" not in sample for sample in samples)
        assert samples[0]["text"] in shown
    assert all(f"sample {sample['sample']}  epoch {sample['epoch']}" in shown for sample in samples)
    assert "skipped by the recipe" in inspect(prepared, "--step", "4")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--step", "8"], "step must be < 8"),
        (["--step", "-1"], "step must be >= 0, got -1"),
        (["--step", "0", "--rank", "0"], "needs the number of ranks; give --world-size too"),
        (["--step", "0", "--world-size", "2", "--rank", "2"], "--rank must be < --world-size, got 2 and 2"),
        (["--step", "0", "tokenizer.vocab_size=90"], "is not prepared in .*run `multihop prep`"),
    ],
)
def test_a_user_error_is_one_sentence(prepared: tuple[Path, Path], arguments: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        inspect(prepared, *arguments)


def test_a_run_keeps_the_indexes_and_is_compared_with_the_recipe(
    prepared: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path, runs = prepared
    recipe = load_recipe(path, ["name=begun"])
    run_dir = runs / "begun"
    run_dir.mkdir(exist_ok=True)
    (run_dir / "recipe.json").write_text(recipe.model_dump_json())
    if not (run_dir / "data").exists():
        (prepared_data,) = (runs / ".prepared").glob("*/set")
        (run_dir / "data").symlink_to(prepared_data)

    def note(*overrides: str) -> str:
        arguments = ["inspect", "batch", str(path), "--runs", str(runs), "--step", "1", "name=begun", *overrides]
        result = CliRunner().invoke(app, arguments)
        assert result.exception is None
        return result.stderr

    assert note() == "" and any((run_dir / "index").glob("train-*-source1-*.npy"))
    assert note("phases[0].lr=0.5", "engine.log_interval=7") == ""
    assert "differs in seed, phases[1].global_batch_size" in note("seed=9", "phases[1].global_batch_size=6")


def test_it_starts_nothing_heavy(prepared: tuple[Path, Path]) -> None:
    path, runs = prepared
    code = (
        "import sys\nfrom multihop.cluster.cli.main import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "print([name for name in ('torch', 'ray', 'mlflow', 'deepspeed') if name in sys.modules], file=sys.stderr)"
    )
    for arguments in (["inspect", "batch", str(path), "--runs", str(runs), "--step", "0"], ["inspect", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
        assert done.stderr.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    ("objective", "tokens", "made", "shown"),
    [
        ("translation", TOKENS, pair, "{}</s> {}</s>"),
        ("completion", COMPLETED, pair, "<|endoftext|> {} <|endoftext|> {} <|endoftext|>"),
        ("ctc", CHARACTERS, shortened, "{}</s> {}"),
    ],
)
def test_pairs_are_shown_side_by_side(
    objective: str, tokens: TokenizerConfig, made: Callable[[int], tuple[str, str]], shown: str, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "pairs.jsonl", map(made, range(60)))
    heads = {} if objective == "ctc" else {"heads": 1}
    recipe = {
        "name": "pairs",
        "data": {"sources": [{"path": str(source), "fields": FIELDS}], "heldout_fraction": 0.1},
        "tokenizer": tokens.model_dump(exclude={"path", "lowercase"}, exclude_defaults=True),
        "model": {"family": TRAINED_WITH[objective], "layers": 1, "hidden": 8, "max_positions": 200, **heads},
        "objective": {"name": objective},
        "phases": [{"seq_len": 200, "global_batch_tokens": 400, "steps": 5}],
        "engine": {"deepspeed": {}},
    }
    path, runs = tmp_path / "recipe.yaml", tmp_path / "runs"
    path.write_text(yaml.safe_dump(recipe))
    loaded = load_recipe(path, [])
    prepare(loaded.data, loaded.tokenizer, runs / ".prepared" / sources_key(loaded.data) / "set")
    actual = inspected((path, runs), "--step", "3", "--world-size", "2")["samples"]
    sides = {shown.format(one, other).replace(" ", "") for one, other in map(made, range(60))}
    assert len(actual) > 1 and {sample["text"].replace(" ", "") for sample in actual} <= sides
    assert {sample["rank"] for sample in actual} == {0, 1}
    for sample in actual:
        first, second = sample["documents"]
        assert first["document"] == second["document"] and first["start"] == 0 and first["stop"] == second["start"]
