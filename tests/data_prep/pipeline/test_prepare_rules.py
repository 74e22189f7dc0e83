"""All rules of a recipe's preparation together: filters, near duplicates, evaluation texts."""

from pathlib import Path

import numpy as np
import pytest
from prepared_data import already_prepared

from multihop.data_prep.config import CleanConfig, DataConfig, FilterConfig
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.stages.documents import content_hash


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
    assert counts["copies after cutting"] == {"kept": 32, "copy of another": 0}
    assert counts["near duplicates after cutting"] == {"kept": 31, "near duplicate of another": 1}  # of plain 5
    result = ids_in(tmp_path / "out")
    ids = {name: content_hash(text)[0] for name, text in texts.items()}
    assert len(result) == 31 and {number for name, number in ids.items() if name.startswith("plain")} - result == {
        ids["plain 4"]  # the longer of the two is kept
    }
    assert ids["near"] in result and not {ids["contaminated"], ids["filtered"]} & result
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
    stricter = data.near_duplicates.model_copy(update={"threshold": 0.99})
    loose = drop.model_copy(update={"near_duplicates": stricter})
    after = redone(loose, "loose")
    assert "near" in after and not {"read", "sort", "copies"} & after
    assert {"read", "sort", "decontaminate"} <= redone(
        loose.model_copy(update={"filters": FilterConfig()}), "unfiltered"
    )


def test_changed_cleaning_prepares_the_evaluation_texts_again(tmp_path, planted, tok):
    """Documents that the new cleaning does not change are compared with these texts again, and nothing else is."""
    pytest.importorskip("ftfy")
    data, _ = planted
    work = tmp_path / "work"
    first = prepare(data, tok, tmp_path / "first", work=work)
    before = set(work.glob("*/*.arrow"))
    repaired = prepare(
        data.model_copy(update={"clean": CleanConfig(fix_mojibake=True)}), tok, tmp_path / "repaired", work=work
    )
    made = [path.parent.name for path in set(work.glob("*/*.arrow")) - before]
    assert sorted(made) == ["decontaminate", "read", "read"]
    assert repaired.fingerprint == first.fingerprint and repaired.inputs != first.inputs


def test_other_evaluation_texts_make_another_data_set(tmp_path, planted, tok):
    data, texts = planted
    first = prepare(data, tok, tmp_path / "out")
    (tmp_path / "exam.txt").write_text(" ".join(texts["plain 7"].split()[:20]) + "\n")
    assert already_prepared(data, tok, tmp_path / "out") is None
    second = prepare(data, tok, tmp_path / "out")
    assert first.inputs != second.inputs and second.counts["decontaminate"]["contaminated"] == 1
    assert content_hash(texts["contaminated"])[0] in ids_in(tmp_path / "out")
