"""The commands of `multihop data`: statistics and verification of a data set."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from multihop.cluster.cli.data import show_verdict
from multihop.cluster.cli.main import app
from multihop.common.errors import UserError
from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.dataset.manifest import read_data_manifest, write_manifest
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.dataset.statistics import QUANTILES, compute_statistics
from multihop.data_prep.pipeline.prepare import prepare


@pytest.fixture(scope="module")
def folder(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of two sources, as a run links to it."""
    folder = tmp_path_factory.mktemp("run")
    more = folder / "more.jsonl"
    more.write_text(
        "".join(json.dumps({"text": f"The garden has {n} stones. Some are red."}) + "\n" for n in range(40))
    )
    sources = [Source(path=str(texts)), Source(path=str(more))]
    prepare(DataConfig(sources=sources, heldout_fraction=0.1), TokenizerConfig(vocab_size=100), folder / "data")
    return folder


def test_statistics_are_those_of_the_documents(folder: Path) -> None:
    actual, dataset = compute_statistics(folder / "data"), open_dataset(folder / "data")
    assert [(part.split, part.source) for part in actual.groups] == [
        (split, source) for split in ("train", "heldout") for source in (0, 1)
    ]
    for part in actual.groups:
        documents = getattr(dataset, part.split)
        of_source = [i for i in range(len(documents)) if documents.source(i) == part.source]
        lengths = sorted(len(documents.tokens(i)) for i in of_source)
        assert (part.documents, part.tokens) == (len(lengths), sum(lengths))
        assert part.sentences == sum(len(documents.sentence_ends(i)) for i in of_source)
        assert part.lengths[0] == lengths[0] and part.lengths[-1] == lengths[-1]
        assert part.lengths == sorted(part.lengths) and len(part.lengths) == len(QUANTILES)
    for split, counts in actual.length_counts.items():
        lengths = getattr(dataset, split).lengths
        assert counts == [int(((lengths >= 2**k) & (lengths < 2 ** (k + 1))).sum()) for k in range(len(counts))]
        assert sum(counts) == len(lengths)
    half = actual.ids_that_make_up(0.5)
    largest = np.sort(actual.token_counts)[::-1]
    assert largest[: half - 1].sum() < actual.token_counts.sum() / 2 <= largest[:half].sum()
    assert actual.ids_that_make_up(1.0) == (actual.token_counts > 0).sum()


def test_verify_compares_what_the_manifest_says_of_the_tokenizer_with_the_tokenizer(folder: Path, capsys) -> None:
    manifest = read_data_manifest(folder / "data")
    info = manifest.tokenizer.model_copy(update={"special_ids": {**manifest.tokenizer.special_ids, "mask": 7}})
    try:
        write_manifest(folder / "data", manifest.model_copy(update={"tokenizer": info}))
        assert show_verdict(str(folder), Path("runs")) == 1
        assert "does not describe the tokenizer in" in capsys.readouterr().out
    finally:
        write_manifest(folder / "data", manifest)
    assert show_verdict(str(folder), Path("runs")) == 0


def test_stats_and_verify_accept_run_names_and_directories(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def data(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["data", *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout

    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(folder)
    picture = tmp_path / "stats.png"
    code, shown = data("stats", str(folder), "--plot", str(picture))
    assert code == 0 and "more.jsonl" in shown and "copy of another" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    by_name = data("stats", "mine")
    assert by_name == data("stats", "runs/mine") == data("stats", "mine", "--runs", str(tmp_path / "runs"))
    assert by_name[0] == 0 and "copy of another" in by_name[1]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"], "a command that shows something writes nothing"
    statistics = json.loads(data("stats", str(folder / "data"), "--json")[1])
    assert sum(part["documents"] for part in statistics["parts"]) == statistics["counts"]["encode"]["kept"]
    assert data("verify", str(folder))[0] == 0

    shard = next((folder / "data").glob("heldout-*.arrow"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    code, shown = data("verify", str(folder))
    assert code == 1 and str(shard) in shown and "is damaged" in shown and "3 of 4 files" in shown
    shard.unlink()
    assert "cannot be read" in data("verify", str(folder))[1]
    with pytest.raises(UserError, match="cannot be read"):
        data("stats", str(folder))
    shard.write_bytes(whole)
    assert data("verify", "mine")[0] == 0
    with pytest.raises(UserError, match=r"no run other .*\(runs with data: mine\), and no data set in the directory"):
        data("verify", "other")
