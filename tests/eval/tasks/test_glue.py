"""Made-up files of GLUE in their official format: what is read from them, and the errors for wrong ones."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihop.common.errors import UserError
from multihop.eval.tasks import glue
from multihop.eval.tasks.task import Example, Task
from multihop.eval.tasks.text_files import columns_of, tsv_rows

Lay = Callable[..., Path]
_STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
_PARSES = "sentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
_MNLI = f"index\tpromptID\tpairID\tgenre\t{_PARSES}\tsentence1\tsentence2"
_MSR = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
_QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"


@pytest.fixture
def lay(tmp_path: Path) -> Lay:
    """A function from (folder, file=[line, ...], ...) to the directory with glue/FOLDER/FILE.tsv."""

    def make(folder: str, **files: list[str]) -> Path:
        (tmp_path / "glue" / folder).mkdir(parents=True, exist_ok=True)
        for name, lines in files.items():
            (tmp_path / "glue" / folder / f"{name}.tsv").write_text("".join(f"{line}\n" for line in lines))
        return tmp_path

    return make


def _named(task: Task) -> list[str]:
    return [task.labels[int(example.targets[0])] for example in task.train]


def test_cola_has_no_header_but_its_test_set_has(lay: Lay) -> None:
    data = lay(
        "CoLA",
        train=['a01\t1\t\t"The letter, lay there.', "a01\t0\t*\tLetter the lay."],
        dev=["a02\t1\t\tStones roll."],
        test=["index\tsentence", "0\tIt rolls.", "1\tRolls it?"],
    )
    task = glue.read("glue/cola", str(data))
    assert task.train == (Example(('"The letter, lay there.',), (1,)), Example(("Letter the lay.",), (0,)))
    assert (task.metric, task.kind, task.labels) == ("Matthews", "classification", ("unacceptable", "acceptable"))
    assert task.test == () and task.notes == ""
    assert task.unlabeled == {"CoLA.tsv": (Example(("It rolls.",), id="0"), Example(("Rolls it?",), id="1"))}


def test_sst2_has_no_index_and_quotation_marks_are_text(lay: Lay) -> None:
    data = lay(
        "SST-2", train=["sentence\tlabel", '"a fine \t1', 'tale" of stone \t0'], dev=["sentence\tlabel", "dull\t0"]
    )
    task = glue.read("glue/sst2", str(data))
    assert [example.texts for example in task.train] == [('"a fine ',), ('tale" of stone ',)]
    assert _named(task) == ["positive", "negative"] and task.metric == "accuracy" and not task.unlabeled


@pytest.mark.parametrize(
    ("name", "folder", "columns", "values"),
    [
        ("glue/qnli", "QNLI", "question\tsentence", ["entailment", "not_entailment"]),
        ("glue/rte", "RTE", "sentence1\tsentence2", ["entailment", "not_entailment"]),
        ("glue/wnli", "WNLI", "sentence1\tsentence2", ["0", "1"]),
    ],
)
def test_pairs_keep_their_official_index(lay: Lay, name: str, folder: str, columns: str, values: list[str]) -> None:
    rows = [f"{40 + number}\tone\ttwo\t{value}" for number, value in enumerate(values)]
    header = f"index\t{columns}"
    data = lay(folder, train=[f"{header}\tlabel", *rows], dev=[f"{header}\tlabel", rows[0]], test=[header, "7\tx\ty"])
    task = glue.read(name, str(data))
    assert task.train == tuple(Example(("one", "two"), (number,), str(40 + number)) for number in range(2))
    assert task.unlabeled == {f"{folder}.tsv": (Example(("x", "y"), id="7"),)}
    assert set(task.labels) == {"entailment", "not_entailment"}
    assert (task.labels[0] == "entailment") == (name != "glue/wnli")


def test_sts_b_is_a_score_from_0_to_5(lay: Lay) -> None:
    row = "3\tgenre\tfile\t2012\t7\tnone\tnone\tA river.\tA stone."
    data = lay(
        "STS-B", train=[f"{_STSB}\tscore", f"{row}\t4.750"], dev=[f"{_STSB}\tscore", f"{row}\t0.0"], test=[_STSB, row]
    )
    task = glue.read("glue/stsb", str(data))
    assert task.train == (Example(("A river.", "A stone."), (4.75,), "3"),)
    assert (task.kind, task.metric, task.other_metrics, task.labels) == ("regression", "Spearman", ("Pearson",), ())
    assert task.unlabeled["STS-B.tsv"] == (Example(("A river.", "A stone."), id="3"),)
    for wrong in ("5.1", "nan", "high"):
        lay("STS-B", dev=[f"{_STSB}\tscore", f"{row}\t{wrong}"])
        with pytest.raises(UserError, match=rf"dev\.tsv, line 2: expected a number from 0 to 5, got '{wrong}'"):
            glue.read("glue/stsb", str(data))


def test_mnli_has_two_development_and_two_test_sets(lay: Lay) -> None:
    def row(text: str) -> str:
        return f"5\tp\tq\tgenre\t(a)\t(b)\t(c)\t(d)\t{text}\tso {text}"

    more = "\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5"
    data = lay(
        "MNLI",
        train=[f"{_MNLI}\tlabel1\tgold_label", f"{row('t')}\tneutral\tneutral", f"{row('u')}\tneutral\tcontradiction"],
        dev_matched=[f"{_MNLI}{more}\tgold_label", row("m") + "\tneutral" * 5 + "\tentailment"],
        dev_mismatched=[f"{_MNLI}{more}\tgold_label", row("mm") + "\tneutral" * 5 + "\tneutral"],
        test_matched=[_MNLI, row("x")],
        test_mismatched=[_MNLI, row("y")],
    )
    task = glue.read("glue/mnli", str(data))
    assert task.labels == ("entailment", "neutral", "contradiction") and _named(task) == ["neutral", "contradiction"]
    assert task.dev == (Example(("m", "so m"), (0,), "5"),)
    assert task.other_sets == {"mismatched": (Example(("mm", "so mm"), (1,), "5"),)}
    assert {name: part[0].texts[0] for name, part in task.unlabeled.items()} == {"MNLI-m.tsv": "x", "MNLI-mm.tsv": "y"}
    (data / "glue" / "MNLI" / "dev_mismatched.tsv").unlink()
    with pytest.raises(UserError, match=r"dev_mismatched\.tsv is missing"):
        glue.find("glue/mnli", str(data))


def test_lines_of_qqp_with_too_few_columns_are_skipped_and_counted(lay: Lay) -> None:
    whole = "9\t1\t2\tWhy?\tHow?\t1"
    data = lay(
        "QQP",
        train=[_QQP, whole, "10\t3\t4\tWhy does", "this?\t0", whole],
        dev=[_QQP, whole],
        test=["id\tquestion1\tquestion2", "0\tA?\tB?"],
    )
    task = glue.read("glue/qqp", str(data))
    assert task.train == (Example(("Why?", "How?"), (1,), "9"),) * 2
    assert task.notes == "train.tsv: 2 lines with too few columns skipped"
    assert (task.metric, task.other_metrics, task.labels[1]) == ("F1", ("accuracy",), "duplicate")
    assert task.unlabeled["QQP.tsv"][0].id == "0"


def _msr(data: Path, name: str, pairs: int) -> None:
    rows = "".join(f'{n % 2}\t{n}\t{n + 1000}\tone {n}\t"two" {n}\r\n' for n in range(pairs))
    (data / "glue" / "MRPC" / name).write_bytes(f"\ufeff{_MSR}\r\n{rows}".encode())


def test_mrpc_in_the_files_of_glue(lay: Lay) -> None:
    row = "1\t11\t12\tone\ttwo"
    data = lay("MRPC", train=[_MSR, row], dev=[_MSR, row], test=[_MSR.replace("Quality", "index"), "0\t21\t22\tx\ty"])
    _msr(data, "msr_paraphrase_train.txt", 50)
    task = glue.read("glue/mrpc", str(data))
    assert task.train == task.dev == (Example(("one", "two"), (1,)),)
    assert (task.labels[1], task.metric, task.other_metrics) == ("equivalent", "F1", ("accuracy",))
    assert task.unlabeled == {"MRPC.tsv": (Example(("x", "y"), id="0"),)} and task.notes == ""


def test_mrpc_in_its_own_files_with_the_official_development_set(lay: Lay) -> None:
    data = lay("MRPC", dev_ids=["3\t1003", "8\t1008"])
    _msr(data, "msr_paraphrase_train.txt", 10)
    _msr(data, "msr_paraphrase_test.txt", 4)
    task = glue.read("glue/mrpc", str(data))
    assert task.dev == (Example(("one 3", '"two" 3'), (1,)), Example(("one 8", '"two" 8'), (0,)))
    assert len(task.train) == 8 and [example.targets for example in task.test] == [(0,), (1,), (0,), (1,)]
    assert [(e.id, e.texts[0], e.targets) for e in task.unlabeled["MRPC.tsv"]][3] == ("3", "one 3", ())
    lay("MRPC", dev_ids=["1003\t3"])
    with pytest.raises(UserError, match=r"dev_ids\.tsv: expected pairs of ids of msr_paraphrase_train\.txt"):
        glue.read("glue/mrpc", str(data))


def test_mrpc_without_the_list_has_a_development_set_by_hash_and_says_so(lay: Lay) -> None:
    data = lay("MRPC")
    _msr(data, "msr_paraphrase_train.txt", 400)
    task = glue.read("glue/mrpc", str(data))
    assert len(task.train) + len(task.dev) == 400 and 20 < len(task.dev) < 60
    assert f"dev_ids.tsv is missing: {len(task.dev)} of the 400 training pairs, chosen by a hash" in task.notes
    assert not task.test and not task.unlabeled


def test_a_missing_directory_and_a_missing_file_are_named(lay: Lay, tmp_path: Path) -> None:
    for name in glue.NAMES:
        with pytest.raises(
            UserError, match=rf"task {name} reads .*, where the directory.* is missing; get .* from https"
        ):
            glue.find(name, str(tmp_path))
    data = lay("RTE", train=["index\tsentence1\tsentence2\tlabel"])
    with pytest.raises(UserError, match=r"RTE, where dev\.tsv is missing"):
        glue.find("glue/rte", str(data))
    assert glue.find("glue/rte", str(lay("RTE", dev=["x"]))) == data / "glue" / "RTE"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["sentence\tlabel", "fine\t1"], r"line 1: expected a header with .* sentence1, .* found 'sentence, label'"),
        ([], "is empty"),
        (["index\tsentence1\tsentence2\tlabel"], "no examples"),
        (
            ["index\tsentence1\tsentence2\tlabel", "0\ta\tb\tentailment", "1\ta\tentailment"],
            "line 3: expected 4 columns",
        ),
        (["index\tsentence1\tsentence2\tlabel", "0\ta\tb\tc\tentailment"], "line 2: expected 4 columns .* got 5"),
        (["index\tsentence1\tsentence2\tlabel", "0\ta\tb\tneutral"], "line 2: expected one of .* got 'neutral'"),
    ],
)
def test_a_file_of_another_task_and_a_broken_line_are_named(lay: Lay, lines: list[str], message: str) -> None:
    good = ["index\tsentence1\tsentence2\tlabel", "0\ta\tb\tentailment"]
    with pytest.raises(UserError, match=rf"RTE/train\.tsv.*{message}"):
        glue.read("glue/rte", str(lay("RTE", train=lines, dev=good)))
    with pytest.raises(UserError, match=rf"RTE/dev\.tsv.*{message}"):
        glue.read("glue/rte", str(lay("RTE", train=good, dev=lines)))


def test_a_file_with_a_header_in_place_of_colas_and_bytes_that_are_not_utf8_are_named(lay: Lay) -> None:
    data = lay("CoLA", train=["index\tsentence1\tsentence2\tlabel"], dev=["a\t1\t\tb"])
    with pytest.raises(UserError, match=r"train\.tsv, line 1: expected the four columns of CoLA .* and no header"):
        glue.read("glue/cola", str(data))
    (data / "glue" / "CoLA" / "train.tsv").write_bytes("a\t1\t\tfine\na\t1\t\tcafé\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"train\.tsv, line 2: byte 8 of the line is not UTF-8"):
        glue.read("glue/cola", str(data))


_cells = st.text(st.characters(exclude_characters="\t\n\r", exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(st.lists(st.lists(_cells, min_size=3, max_size=3), min_size=1, max_size=8), st.sampled_from(["\n", "\r\n"]))
def test_any_text_without_tabs_and_line_ends_is_read_as_it_stands(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], end: str
) -> None:
    path = tmp_path_factory.mktemp("tsv") / "file.tsv"
    path.write_bytes(end.join("\t".join(row) for row in [["a", "b", "c"], *rows]).encode())
    read = [values for _, values in columns_of(path, tsv_rows(path), ("c", "a"))]
    assert read == [[c, a] for a, _, c in rows]
