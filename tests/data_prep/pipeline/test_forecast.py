"""The forecast of a preparation, before it starts."""

import gzip
import json
from pathlib import Path

import pytest

from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.pipeline.forecast import Forecast, forecast
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.reading.sources import list_files


def look(data: DataConfig, tok: TokenizerConfig, out_dirs: list[Path], work: Path) -> Forecast:
    return forecast(data, tok, list_files(data.sources), out_dirs, work)


def files_below(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_it_writes_nothing_and_tells_what_is_done(tmp_path, data, tok):
    out, work = tmp_path / "out", tmp_path / "work"
    before = files_below(tmp_path)
    first = look(data, tok, [], work)
    assert files_below(tmp_path) == before
    assert not first.is_prepared and first.splits_read == 0 < first.splits
    manifest = prepare(data, tok, out, work=work)
    then = look(data, tok, [out], work)
    assert then.is_prepared and then.splits_read == then.splits == first.splits
    assert then.sources == first.sources
    text = sum(source.text_bytes for source in first.sources)
    measured = sum(totals.text_bytes for totals in manifest.totals.values())
    assert measured == pytest.approx(text, rel=0.2)
    assert not look(data, tok.model_copy(update={"vocab_size": 151}), [out], work).is_prepared


@pytest.mark.parametrize("packed", [False, True])
def test_text_and_documents_are_reckoned_from_a_beginning(tmp_path, tok, document, monkeypatch, packed):
    monkeypatch.setattr("multihop.data_prep.pipeline.forecast._SAMPLED_BYTES", 20_000)
    rows = [{"id": number, "text": document(number)} for number in range(1_000)]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(content) if packed else content)
    config = DataConfig(sources=[Source(path=str(path))])
    (source,) = look(config, tok, [], tmp_path / "work").sources
    assert source.bytes == path.stat().st_size and source.files == 1
    # Of a packed file a block is read at once, so that more of it than is unpacked may have been read.
    assert source.documents == pytest.approx(1_000, rel=0.15 if not packed else 0.9)
    assert source.text_bytes == pytest.approx(sum(len(row["text"]) for row in rows), rel=0.15 if not packed else 0.9)


def test_files_that_cannot_be_read_count_as_empty(tmp_path, tok):
    (tmp_path / "a.jsonl.gz").write_bytes(b"no gzip")
    (source,) = look(DataConfig(sources=[Source(path=str(tmp_path))]), tok, [], tmp_path / "work").sources
    assert (source.bytes, source.text_bytes, source.documents, source.bad_fraction) == (7, 0, 0, 1.0)


def test_files_that_are_a_document_each_are_counted(tmp_path, tok, document):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(document(number) * (1 + number**2))
    (source,) = look(DataConfig(sources=[Source(path=str(tmp_path))]), tok, [], tmp_path / "work").sources
    assert source.documents == 10


def test_where_the_file_of_median_size_is_broken_a_neighbor_counts(tmp_path, tok, document):
    for name, documents in (("a", 10), ("c", 1_000)):
        lines = [json.dumps({"text": document(number)}) for number in range(documents)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_bytes(b"{" * 20_000)
    (source,) = look(DataConfig(sources=[Source(path=str(tmp_path))]), tok, [], tmp_path / "work").sources
    assert source.text_bytes > 0 and source.documents >= 1_000


def test_files_of_all_sizes_are_read_and_unusable_documents_counted(tmp_path, tok, document):
    for number in range(60):
        lines = [json.dumps({"text" if row % 4 else "txt": document(row)}) for row in range(4 + 4 * number)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))
    (source,) = look(DataConfig(sources=[Source(path=str(tmp_path))]), tok, [], tmp_path / "work").sources
    assert source.bad_fraction == pytest.approx(0.25)
    assert source.documents == pytest.approx(sum(3 + 3 * number for number in range(60)), rel=0.1)
    assert source.warning(0.3) is None
    assert source.warning(0.2) == (
        "about 25 % of its documents or files (by a sample) cannot be used (no field 'text'), and above "
        "data.max_bad_fraction=0.2 preparation fails; repair or remove them, or raise it"
    )


def test_a_file_in_ten_that_cannot_be_read_is_warned_of(tmp_path, tok, document):
    for number in range(10):
        (tmp_path / f"{number}.jsonl").write_text("\n".join(json.dumps({"text": document(row)}) for row in range(50)))
    (tmp_path / "9.jsonl").rename(tmp_path / "9.jsonl.gz")
    (source,) = look(DataConfig(sources=[Source(path=str(tmp_path))]), tok, [], tmp_path / "work").sources
    assert source.bad_fraction == pytest.approx(0.1) and "gzip" in str(source.warning(0.01))
