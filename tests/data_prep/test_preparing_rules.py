"""All that a recipe can ask of the preparation at once: filters, near duplicates, evaluation texts."""

import json
from pathlib import Path

import numpy as np
import pytest

from data_prep.config import C4, DataConfig, DecontaminateConfig, FilterConfig, NearDuplicatesConfig, Source
from data_prep.content import content_hash
from data_prep.pipeline import already_prepared, prepare
from data_prep.shards import open_dataset

NEAR = NearDuplicatesConfig(shingle_words=2, threshold=0.7)


def sentences(document, numbers) -> str:
    """A text long enough for signatures and for pieces of 200 characters."""
    return " ".join(document(number) for number in numbers)


@pytest.fixture
def planted(tmp_path: Path, document) -> tuple[DataConfig, dict[str, str]]:
    """A corpus in two sources with documents of each fate, by name."""
    texts = {f"plain {n}": sentences(document, range(10 * n, 10 * n + 10)) for n in range(30)}
    texts["copy"] = texts["plain 3"]
    texts["near"] = texts["plain 4"] + " Bamo."
    exam = sentences(document, range(1_000, 1_004))
    texts["contaminated"] = sentences(document, range(2_000, 2_030)) + " " + exam + " " + texts["plain 5"][:900].strip()
    texts["filtered"] = sentences(document, range(3_000, 3_010)) + " Lorem ipsum."
    (tmp_path / "exam.txt").write_text(exam + "\n")
    folder = tmp_path / "texts"
    folder.mkdir()
    rows = [json.dumps({"text": text}) + "\n" for text in texts.values()]
    (folder / "a.jsonl").write_text("".join(rows[:17]))
    (folder / "b.jsonl").write_text("".join(rows[17:]))
    config = DataConfig(
        sources=[Source(path=str(folder / "a.jsonl")), Source(path=str(folder / "b.jsonl"))],
        heldout_fraction=0.1,
        filters=FilterConfig(c4=C4(terminal_punctuation=False)),
        near_duplicates=NEAR,
        decontaminate=DecontaminateConfig(against=[str(tmp_path / "exam.txt")], action="cut"),
    )
    return config, texts


def ids_in(folder: Path) -> set[int]:
    dataset = open_dataset(folder)
    return {int(number) for split in (dataset.train, dataset.heldout) for number in split.ids}


def test_each_document_has_the_fate_that_the_recipe_gives_it(tmp_path, planted, tok):
    data, texts = planted
    manifest = prepare(data, tok, tmp_path / "out")
    counts = manifest.counts
    assert counts["read"] == {"kept": 34}
    assert counts["filter"] == {"kept": 33, "holds lorem ipsum": 1}
    assert counts["copies"] == {"kept": 32, "copy of another": 1}
    assert counts["near duplicates"] == {"kept": 31, "near duplicate of another": 1}
    assert counts["decontaminate"] == {
        "kept": 32,
        "contaminated": 1,
        "pieces of contaminated ones, kept": 2,
        "contaminated by exam": 1,
    }
    found = ids_in(tmp_path / "out")
    ids = {name: content_hash(text)[0] for name, text in texts.items()}
    assert len(found) == 32 and {number for name, number in ids.items() if name.startswith("plain")} - found == {
        ids["plain 4"]  # the longer of the two is kept
    }
    assert ids["near"] in found and not {ids["contaminated"], ids["filtered"]} & found
    for split in (open_dataset(tmp_path / "out").train, open_dataset(tmp_path / "out").heldout):
        assert (np.diff(split.sources.astype(int)) >= 0).all(), "documents of one source stand together"
    again = prepare(data, tok, tmp_path / "out")
    assert again == manifest == already_prepared(data, tok, tmp_path / "out")
    assert prepare(data, tok, tmp_path / "fresh").fingerprint == manifest.fingerprint


def test_a_changed_rule_redoes_only_what_follows_it(tmp_path, planted, tok):
    data, _ = planted
    work = tmp_path / "work"

    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in work.glob("*/*") if path.is_file()}

    def redone(changed: DataConfig, name: str) -> set[str]:
        before = written()
        prepare(changed, tok, tmp_path / name, work=work)
        return {path.parent.name for path, time in written().items() if before.get(path) != time}

    prepare(data, tok, tmp_path / "first", work=work)
    drop = data.model_copy(update={"decontaminate": data.decontaminate.model_copy(update={"action": "drop"})})
    assert redone(drop, "drop") <= {"decontaminate", "draw", "tokenizer", "encode", "shards"}
    loose = drop.model_copy(update={"near_duplicates": NEAR.model_copy(update={"threshold": 0.99})})
    after = redone(loose, "loose")
    assert "near" in after and not {"read", "sort", "copies"} & after
    assert {"read", "sort"} <= redone(loose.model_copy(update={"filters": FilterConfig()}), "unfiltered")


def test_other_evaluation_texts_make_another_data_set(tmp_path, planted, tok):
    data, texts = planted
    first = prepare(data, tok, tmp_path / "out")
    (tmp_path / "exam.txt").write_text(" ".join(texts["plain 7"].split()[:20]) + "\n")
    assert already_prepared(data, tok, tmp_path / "out") is None
    second = prepare(data, tok, tmp_path / "out")
    assert first.inputs != second.inputs and second.counts["decontaminate"]["contaminated"] == 1
    assert content_hash(texts["contaminated"])[0] in ids_in(tmp_path / "out")
