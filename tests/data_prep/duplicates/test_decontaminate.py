"""Overlaps with evaluation texts: they are found at their edges, cut as for GPT-3, and reported by name."""

import json
import random
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from read_splits import write_read_split

from multihop.common.errors import UserError
from multihop.data_prep.config import C4, CleanConfig, DecontaminateConfig
from multihop.data_prep.duplicates.decontaminate import (
    DecontaminateSplit,
    EvaluationNgrams,
    FindCommon,
    FindOverlaps,
    contaminated_rows,
    cut,
    decontaminate_split,
    evaluation_ngrams,
    evaluation_sets,
    find_common,
    find_overlaps,
)
from multihop.data_prep.rules import c4
from multihop.data_prep.rules.clean import clean
from multihop.data_prep.stages.documents import SCHEMA, content_hash, read_documents
from multihop.data_prep.stages.outputs import Output

NO_ROWS = np.empty(0, np.int64)
SPAN = np.dtype([("start", "<u4"), ("stop", "<u4")])


def words(number: int, count: int) -> list[str]:
    rng = random.Random(number)
    return [f"w{rng.getrandbits(30):x}" for _ in range(count)]


def evaluation_file(folder: Path, name: str, texts: list[str]) -> Path:
    path = folder / "evaluation" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text}) if path.suffix == ".jsonl" else text for text in texts]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def run_stage(
    folder: Path,
    evaluation: dict[str, list[str]],
    splits: list[list[str]],
    dropped: list[np.ndarray] | None = None,
    cleaning: CleanConfig = CleanConfig(),  # noqa: B008
    edits: C4 | None = None,
    **settings: object,
) -> tuple[list[np.ndarray], list[Output], list[Output]]:
    """Run the stage; returns, for each split, the rows to drop and the rest, and the table with the common n-grams."""
    paths = [evaluation_file(folder, name, texts) for name, texts in evaluation.items()]
    config = DecontaminateConfig.model_validate({"against": [str(path) for path in paths]} | settings)
    sets = evaluation_sets(config)
    table = evaluation_ngrams(EvaluationNgrams("table", str(folder / "table"), sets, config, cleaning, edits))
    read = [write_read_split(folder / f"read-{number}.arrow", texts, 3) for number, texts in enumerate(splits)]
    overlaps = [
        find_overlaps(
            FindOverlaps(str(number), str(folder / "found"), path, dropped[number] if dropped else NO_ROWS, table.path)
        )
        for number, path in enumerate(read)
    ]
    found = [output.path for output in overlaps]
    common = find_common(FindCommon("common", str(folder / "common"), found, config.common))
    left = [
        decontaminate_split(
            DecontaminateSplit(
                str(number),
                str(folder / "left"),
                path,
                found[number],
                common.path,
                table.path,
                list(sets),
                config.action,
            )
        )
        for number, path in enumerate(read)
    ]
    return [contaminated_rows(path, common.path) for path in found], left, [table, common]


def hit(folder: Path, evaluation: str, document: str, **settings: Any) -> bool:
    rows, _, _ = run_stage(folder, {"set.jsonl": [evaluation]}, [[document]], **settings)
    return rows[0].tolist() == [0]


@pytest.mark.parametrize("at", ["first", "middle", "last"])
@pytest.mark.parametrize("shared,is_hit", [(13, True), (12, False), (40, True)])
def test_thirteen_words_in_a_row_are_enough_and_twelve_are_not(
    tmp_path: Path, at: str, shared: int, is_hit: bool
) -> None:
    text = words(1, 60)
    index = {"first": 0, "middle": 20, "last": 60 - shared}[at]
    quoted = text[index : index + shared]
    for number, document in enumerate(
        (quoted, words(2, 30) + quoted, quoted + words(3, 30), words(4, 9) + quoted + words(5, 9))
    ):
        assert hit(tmp_path / str(number), " ".join(text), " ".join(document)) == is_hit


def test_case_punctuation_and_line_breaks_make_no_difference(tmp_path: Path) -> None:
    text = words(1, 30)
    document = "Before: \u201c" + "\n\n".join(text[5:11]).upper() + "\u201d \u2014 (" + ", ".join(text[11:18]) + ")!"
    assert hit(tmp_path / "a", " ".join(text), document)
    assert hit(tmp_path / "b", document, " ".join(text))
    assert not hit(tmp_path / "c", " ".join(text), document.replace(text[11], text[11] + "s"))


def spelled(form: str, inserted: str) -> Callable[[str], str]:
    """Return a function that writes a text in a Unicode form, with `inserted`, which cleaning removes, in each word."""
    return lambda text: " ".join(
        word[:1] + inserted + word[1:] for word in unicodedata.normalize(form, text).split(" ")
    )


spellings = st.builds(spelled, st.sampled_from(["NFC", "NFD"]), st.sampled_from(["", "\ufeff", "\x01", "\x9f", "\0"]))
letters = st.sampled_from(
    "abc\u00e9\u00fc\u1ec7\u01d6\u0958\u212b\u2126\ud55c\uae00\u3099\u304b\u0e33\u1100\u1161\u11a8\U0001d15e"
)
some_words = st.lists(st.text(letters, min_size=1, max_size=6), min_size=13, max_size=20)


@settings(max_examples=15, deadline=None)
@given(
    texts=st.lists(st.tuples(some_words, spellings, spellings), min_size=1, max_size=15), ngram=st.sampled_from([5, 13])
)
def test_a_text_is_found_in_any_unicode_form_on_either_side(
    texts: list[tuple[list[str], Callable[[str], str], Callable[[str], str]]], ngram: int
) -> None:
    exams = [spell_exam(" ".join(words)) for words, spell_exam, _ in texts]
    documents = [
        clean(f"Before {number}. {spell_document(' '.join(words))} After.")
        for number, (words, _, spell_document) in enumerate(texts)
    ]
    with TemporaryDirectory() as folder:
        (rows,), _, _ = run_stage(Path(folder), {"set.jsonl": exams}, [documents], ngram=ngram, common=None)
    assert rows.tolist() == list(range(len(texts)))


def test_edits_of_documents_hide_no_text(tmp_path: Path) -> None:
    edits = C4()
    text = f"{' '.join(words(1, 6))} in[1] it.\nmenu\n{' '.join(words(2, 7))} and ends so."
    document = c4.make_editor(edits)(clean(f"Here is what was said of it.\n{text}"))
    assert "[1]" not in document and "menu" not in document
    assert hit(tmp_path / "a", text, document, edits=edits)
    assert not hit(tmp_path / "b", text, document)
    title = " ".join(words(3, 14))  # a line of its own that edits would remove
    assert c4.make_editor(edits)(title) == ""
    assert hit(tmp_path / "c", title, f"It begins: {title}, and ends.", edits=edits)


def test_mojibake_is_repaired_on_both_sides(tmp_path: Path) -> None:
    pytest.importorskip("ftfy")
    good = "d\u00e9j\u00e0 vu, et cr\u00e9\u00e9 l'\u00e9t\u00e9 du pass\u00e9 par une h\u00f4tesse \u00e2g\u00e9e " * 2
    broken = good.encode().decode("latin-1")
    repairs = CleanConfig(fix_mojibake=True)
    for number, (exam, document) in enumerate([(broken, broken), (good, broken), (broken, good)]):
        cleaned = clean(f"Avant. {document} Apr\u00e8s.", fix_mojibake=True)
        assert hit(tmp_path / f"repaired-{number}", exam, cleaned, cleaning=repairs)
    # A character of another script keeps the document from being repaired.
    unrepaired = clean(f"\u4e2d {broken}", fix_mojibake=True)
    assert hit(tmp_path / "one side", broken, unrepaired, cleaning=repairs)


def test_byte_order_marks_and_broken_characters_hide_no_text(tmp_path: Path) -> None:
    text = " ".join(words(1, 13))
    path = evaluation_file(tmp_path, "set.jsonl", [text, "\ud800 " + text.upper()])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    config = DecontaminateConfig(against=[str(path)])
    table = evaluation_ngrams(
        EvaluationNgrams("t", str(tmp_path / "t"), evaluation_sets(config), config, CleanConfig(), None)
    )
    assert table.metadata == {"set": {"texts": 2, "too short": 0}}
    assert pa.ipc.open_file(table.path).read_all().num_rows == 1


def test_an_ngram_of_two_documents_or_two_evaluation_texts_is_none(tmp_path: Path) -> None:
    text = words(1, 24)
    halves = [" ".join(text[:12]), " ".join(text[12:])]
    rows, _, _ = run_stage(tmp_path / "a", {"set.txt": [" ".join(text)]}, [halves])
    assert rows[0].tolist() == []
    rows, _, _ = run_stage(tmp_path / "b", {"set.txt": halves}, [[" ".join(text)]])
    assert rows[0].tolist() == [0]  # each half is a text of fewer than 13 words, and is there whole


@pytest.mark.parametrize("count,is_hit", [(7, False), (8, True), (12, True)])
def test_a_short_evaluation_text_must_be_there_whole(tmp_path: Path, count: int, is_hit: bool) -> None:
    text = words(1, count)
    assert hit(tmp_path / "whole", " ".join(text), " ".join(words(2, 20) + text + words(3, 20))) == is_hit
    assert not hit(tmp_path / "but one", " ".join(text), " ".join(words(2, 20) + text[1:] + words(3, 20)))
    _, _, (table, _) = run_stage(tmp_path / "counted", {"set.txt": [" ".join(text), ""]}, [[]])
    assert table.metadata == {"set": {"texts": 1, "too short": int(not is_hit)}}


def test_a_smaller_ngram_may_be_requested(tmp_path: Path) -> None:
    text = words(1, 30)
    assert hit(tmp_path / "a", " ".join(text), " ".join(text[3:8]), ngram=5)
    assert not hit(tmp_path / "b", " ".join(text), " ".join(text[3:7]), ngram=5)
    assert hit(tmp_path / "c", " ".join(text[:5]), " ".join(text), ngram=5)


def test_rows_are_those_of_the_split_and_sets_are_reported_by_name(tmp_path: Path) -> None:
    one, other = words(1, 30), words(2, 30)
    evaluation = {"glue/dev.jsonl": [" ".join(one)], "squad/dev.txt": [" ".join(other), " ".join(one)]}
    clean = [" ".join(words(number, 25)) for number in range(10, 30)]
    splits = [clean[:10], clean[10:]]
    splits[0][4] += " " + " ".join(one)
    splits[0][7] = " ".join(other)
    splits[1][9] += " " + " ".join(one[2:])
    dropped = [np.array([0, 5, 7]), np.array([1])]
    rows, left, _ = run_stage(tmp_path, evaluation, splits, dropped)
    assert [each.tolist() for each in rows] == [[4], [9]]
    assert left[0].metadata == {
        "documents": 1,
        "sets": {"glue/dev": 1, "squad/dev": 1},
        "pieces": 0,
        "named": [[content_hash(splits[0][4])[0], "glue/dev", " ".join(one[:13])]],
    }
    assert sum(batch.num_rows for batch in read_documents(left[0].path, NO_ROWS)) == 0


def test_a_common_phrase_is_left_alone(tmp_path: Path) -> None:
    phrase, rare = words(1, 20), words(2, 20)
    documents = [" ".join(words(number, 10) + phrase) for number in range(10, 21)]
    documents[3] += " " + " ".join(rare)
    documents[5] += " " + " ".join(phrase)  # twice in a document is once
    splits = [documents[:6], documents[6:]]
    evaluation = {"set.txt": [" ".join(phrase), " ".join(rare)]}
    rows, left, (_, common) = run_stage(tmp_path / "default", evaluation, splits)
    assert [each.tolist() for each in rows] == [[3], []]
    assert common.metadata == {"found": 16, "common": 8}
    assert left[0].metadata["documents"] == 1
    rows, _, (_, common) = run_stage(tmp_path / "none", evaluation, splits, common=None)
    assert [len(each) for each in rows] == [6, 5]
    rows, _, _ = run_stage(tmp_path / "eleven", evaluation, splits, common=11)
    assert [len(each) for each in rows] == [6, 5]


def test_cutting_leaves_fragments_that_are_documents_of_their_own(tmp_path: Path) -> None:
    text = words(1, 40)
    before, behind = "\u00e9\U0001f600 " * 300 + "before", "behind" + " \u4e2d\u00e9" * 300
    document = f"{before} {' '.join(text[10:30])} {behind}"
    clean = " ".join(words(3, 50))
    _, (left,), _ = run_stage(tmp_path, {"set.txt": [" ".join(text)]}, [[clean, document, clean]], action="cut")
    (batch,) = read_documents(left.path, NO_ROWS)
    assert batch.schema == SCHEMA
    fragments = batch.column("text").to_pylist()
    assert fragments == [(before + " ")[:-200].strip(), (" " + behind)[200:].strip()]
    for row, fragment in zip(batch.to_pylist(), fragments, strict=True):
        expected = content_hash(fragment)[0], content_hash(document)[1], len(fragment.encode()), 0
        assert (row["first"], row["second"], row["bytes"], row["source"]) == expected
    assert left.metadata["pieces"] == 2


def spans_of(text: str, marks: str) -> np.ndarray:
    """Return the byte range of each run of characters of `marks` in `text`."""
    data, found = text.encode(), []
    for mark in marks:
        start = data.find(mark.encode())
        if start >= 0:
            found.append((start, start + data.count(mark.encode()) * len(mark.encode())))
    return np.array(sorted(found), SPAN)


@pytest.mark.parametrize(
    "text,fragments",
    [
        ("a" * 500 + "#" * 20 + "b" * 500, ["a" * 300, "b" * 300]),
        ("a" * 400 + "#" * 20 + "b" * 399, ["a" * 200]),  # a fragment of 199 characters goes
        ("a" * 300 + "#" * 20 + "b" * 300, []),
        ("#" * 20 + "b" * 500, ["b" * 300]),
        ("a" * 500 + "#" * 20, ["a" * 300]),
        ("#" * 20, []),
        ("a" * 500 + "#" * 20 + "c" * 350 + "%" * 20 + "b" * 500, ["a" * 300, "b" * 300]),  # the windows meet
        ("\u00df" * 500 + "#" * 20 + "\U0001f600" * 500, ["\u00df" * 300, "\U0001f600" * 300]),
        ("e\u0301" * 250 + "\u0130" * 20 + "b" * 500, ["e\u0301" * 150, "b" * 300]),
    ],
)
def test_what_is_cut(text: str, fragments: list[str]) -> None:
    assert cut(text, spans_of(text, "#%\u0130")) == fragments


@pytest.mark.parametrize("overlaps,fragments", [(9, 10), (10, 0)])
def test_a_document_in_more_than_ten_fragments_is_dropped(overlaps: int, fragments: int) -> None:
    text = "#".join("a" * 700 for _ in range(overlaps + 1))
    spans = np.array([(index, index + 1) for index, mark in enumerate(text) if mark == "#"], SPAN)
    assert len(cut(text, spans)) == fragments


def test_a_long_document_is_cut_at_the_right_offset(tmp_path: Path) -> None:
    text = words(1, 20)
    parts = [" ".join(words(number, 12_000)) for number in (2, 3)]
    document = f"{parts[0]} {' '.join(text)} {parts[1]}"
    assert len(document) > 2**17
    _, (left,), _ = run_stage(tmp_path, {"set.txt": [" ".join(text)]}, [[document]], action="cut")
    (batch,) = read_documents(left.path, NO_ROWS)
    assert batch.column("text").to_pylist() == [(parts[0] + " ")[:-200].strip(), (" " + parts[1])[200:].strip()]


def test_outputs_are_the_same_bytes_and_stay(tmp_path: Path) -> None:
    evaluation = {"one.txt": [" ".join(words(1, 40))], "two.jsonl": [" ".join(words(2, 40))]}
    splits = [[" ".join(words(number, 30)) for number in (3, 1, 2, 4)]]
    runs = [run_stage(tmp_path / name, evaluation, splits, action="cut") for name in ("a", "a", "b")]
    first, again, elsewhere = ([*left, *once] for _, left, once in runs)
    assert first == again
    assert [replace(output, path="") for output in first] == [replace(output, path="") for output in elsewhere]


def test_mistakes_are_reported(tmp_path: Path) -> None:
    def sets(*against: str) -> dict[str, str]:
        return evaluation_sets(DecontaminateConfig(against=list(against)))

    def table(path: Path, **settings: object) -> Output:
        config = DecontaminateConfig.model_validate({"against": [str(path)]} | settings)
        sets = evaluation_sets(config)
        return evaluation_ngrams(EvaluationNgrams("t", str(tmp_path / "t"), sets, config, CleanConfig(), None))

    with pytest.raises(UserError, match=r"against=.*none.*\.txt matches no file"):
        sets(str(tmp_path / "none*.txt"))
    with pytest.raises(UserError, match=r"matches .*dev\.tsv, expected \.jsonl, or \.txt"):
        sets(str(evaluation_file(tmp_path, "dev.tsv", ["a"])))
    with pytest.raises(UserError, match="has no text"):
        table(evaluation_file(tmp_path, "empty.txt", ["", " "]))
    good = evaluation_file(tmp_path, "good.jsonl", ["a b"])
    with pytest.raises(UserError, match="line 1 is not a JSON object with a text in 'question'"):
        table(good, field="question")
    good.write_text("{}\nnothing\n")
    with pytest.raises(UserError, match="line 1 is not a JSON object"):
        table(good)


def test_a_set_is_named_by_as_much_of_its_path_as_is_needed(tmp_path: Path) -> None:
    for name in ("a/x/dev.txt", "b/x/dev.txt", "a/test.jsonl"):
        evaluation_file(tmp_path, name, ["text"])
    folder = tmp_path / "evaluation"
    config = DecontaminateConfig(against=[f"{folder}/**/*.txt", f"{folder}/a/test.jsonl"])
    assert list(evaluation_sets(config)) == ["a/x/dev", "b/x/dev", "evaluation/a/test"]
    assert list(evaluation_sets(DecontaminateConfig(against=[f"{folder}/a/*.jsonl"]))) == ["test"]


def test_an_empty_table_and_an_empty_split(tmp_path: Path) -> None:
    rows, left, (table, common) = run_stage(tmp_path, {"set.txt": ["too short"]}, [[" ".join(words(1, 50))], []])
    assert [each.tolist() for each in rows] == [[], []]
    assert [output.metadata for output in left] == [{"documents": 0, "sets": {}, "pieces": 0, "named": []}] * 2
    assert pa.ipc.open_file(table.path).read_all().num_rows == 0
    assert common.metadata == {"found": 0, "common": 0}
