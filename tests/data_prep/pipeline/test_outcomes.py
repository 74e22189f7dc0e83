"""However much is set aside, everything is counted, and the named part fits into a readable manifest."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multihop.common.errors import UserError
from multihop.data_prep.config import DataConfig, TokenizerConfig
from multihop.data_prep.dataset import manifest as manifests
from multihop.data_prep.dataset.manifest import SetAside, read_data_manifest, write_manifest
from multihop.data_prep.pipeline.outcomes import NAMED_PER_FILE, count_outcomes
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.reading.sources import FileRange, InputFile
from multihop.data_prep.stages.outputs import Output


def read_of(names: list[str], metadata: Callable[[int], dict[str, Any]]) -> tuple[list[list[FileRange]], list[Output]]:
    """Return files of one part each, and the outputs of reading them: `metadata` of a number updates a good result."""
    files = [InputFile(name, f"/{name}", 0, "text", "jsonl", "", 100, 1) for name in names]
    nothing = {"documents": 100, "places": 130, "unreadable": None, "filtered": {}, "bad": {}, "named": []}
    read = [Output("", "", "", {"parts": [nothing | metadata(number)]}) for number in range(len(files))]
    return [[FileRange(file, 0, file.size)] for file in files], read


def test_a_crawl_with_a_few_bad_lines_in_each_file_has_a_manifest_that_can_be_read(
    tmp_path: Path, data: DataConfig, tok: TokenizerConfig
) -> None:
    """The crawl has 30,000 files with 30 bad lines each, and a broken file after them."""
    names = [f"{'crawl-' + 'x' * 200}/{'y' * 200}/part-{number:06d}.jsonl" for number in range(30_000)] + ["last.jsonl"]
    few = [[place, "broken JSON"] for place in range(NAMED_PER_FILE)]
    bad = {"documents": 0, "unreadable": "broken gzip"}
    splits, read = read_of(names, lambda n: bad if n == 30_000 else {"bad": {"broken JSON": 30}, "named": few})
    counts, set_aside = count_outcomes(splits, read, 0.5)
    assert counts["read"] == {"kept": 3_000_000, "broken JSON": 900_000, "broken gzip": 1}
    assert SetAside(path="last.jsonl", reason="broken gzip") in set_aside
    assert [each.path for each in set_aside[:40]] == [f"{names[n]}:{place}" for n in (0, 1) for place in range(20)]
    manifest = prepare(data, tok, tmp_path).model_copy(update={"set_aside": set_aside, "counts": counts})
    write_manifest(tmp_path, manifest)
    assert read_data_manifest(tmp_path) == manifest and manifest.number_set_aside == 900_001
    assert (tmp_path / "manifest.json").stat().st_size < 2**24


def test_rare_reasons_are_counted_together(tmp_path: Path) -> None:
    reasons = {f"{columns} columns, the first line has 2": 1 + (columns == 7) for columns in range(3, 5_003)}
    splits, read = read_of(["a.tsv"], lambda _: {"bad": reasons})
    counts, _ = count_outcomes(splits, read, 1.0)
    assert len(counts["read"]) == 1_002 and sum(counts["read"].values()) == 100 + 5_001
    assert counts["read"]["7 columns, the first line has 2"] == 2 and counts["read"]["other reasons"] == 4_000


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"filters": {"gopher_quality": {"min_words": 900}, "c4": {"min_sentences": 500}}},
            r"all documents of data\.sources were dropped \(filter: 1\d\d fewer than 500 sentences.*\); relax or "
            r"remove these rules of data\.filters, or add text",
        ),
        (
            {"decontaminate": {"against": ["{folder}/exam.txt"], "common": None, "ngram": 3}},
            r"\(decontaminate: 120 contaminated\); correct",
        ),
        (
            {"sources": [{"path": "{folder}/texts/a.jsonl", "field": "body"}], "max_bad_fraction": 1.0},
            r"\(read: 40 no field 'body'\); correct data\.sources\[\]\.field or the files, or add text",
        ),
        ({"sources": [{"path": "{folder}/none.jsonl"}]}, r"data\.sources have no document; add text, or correct"),
    ],
)
def test_if_no_document_is_left_the_rules_that_dropped_most_are_named(
    tmp_path: Path, corpus: Path, data: DataConfig, tok: TokenizerConfig, settings: dict[str, Any], sentence: str
) -> None:
    texts = [json.loads(line)["text"] for path in corpus.glob("*.jsonl") for line in path.read_text().splitlines()]
    texts += [path.read_text() for path in (corpus / "books").iterdir()]
    (tmp_path / "exam.txt").write_text("\n".join(texts))
    (tmp_path / "none.jsonl").touch()
    given = json.loads(json.dumps(settings).replace("{folder}", str(tmp_path)))
    with pytest.raises(UserError, match=sentence):
        prepare(DataConfig.model_validate(data.model_dump() | given), tok, tmp_path / "out")


def test_a_manifest_that_is_too_large_is_not_written_and_the_old_data_stays(
    tmp_path: Path, data: DataConfig, tok: TokenizerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = prepare(data, tok, tmp_path)
    size = (tmp_path / "manifest.json").stat().st_size
    monkeypatch.setattr(manifests, "MAX_BYTES", size + 50)
    wide = before.model_copy(update={"set_aside": [SetAside(path="x" * 100, reason="y")]})
    with pytest.raises(
        UserError, match=r"would have [\d,]+ bytes for 2 shards of 1 sources.*prepare several smaller data sets"
    ):
        write_manifest(tmp_path, wide)
    assert read_data_manifest(tmp_path) == before
    other = data.model_copy(update={"heldout_fraction": 0.2, "max_bad_fraction": 0.123456789})
    monkeypatch.setattr(manifests, "MAX_BYTES", size)
    with pytest.raises(UserError, match="would have"):
        prepare(other, tok, tmp_path)
    assert read_data_manifest(tmp_path) == before
