"""The scripts that make pairs of knowledge bases and of word forms, on made-up files in the official formats."""

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from multihop.common.errors import UserError

BENCH = Path(__file__).parents[3] / "bench"
LICENSE = "  1 This software and database is being provided to you\n"
NOUNS = [
    "00000001 03 n 01 entity 0 001 ~ 00000002 n 0000 | that which exists",
    "00000002 03 n 02 living_thing 0 animate_thing 0 002 @ 00000001 n 0000 + 00000003 v 0201 | a living entity",
    "00000004 03 n 01 hot(p) 0 002 ! 00000005 n 0101 @i 00000001 n 0000 | heat",
    "00000005 03 n 01 cold 0 001 ! 00000004 n 0101 | no heat",
]
VERBS = ["00000003 30 v 01 animate 0 001 + 00000002 n 0102 02 + 08 00 + 11 00 | give life"]


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


triples = script("triples")
word_forms = script("word_forms")


def wordnet(folder: Path, nouns: list[str] = NOUNS) -> Path:
    folder.mkdir(exist_ok=True)
    for name, lines in {"noun": nouns, "verb": VERBS, "adj": [], "adv": []}.items():
        (folder / f"data.{name}").write_text(LICENSE + "".join(line + "  \n" for line in lines))
    return folder


def test_wordnets_pointers_are_triples_without_their_inverses(tmp_path: Path) -> None:
    found = [each[:3] for each in triples.read_wordnet(wordnet(tmp_path / "dict"))]
    assert found == [
        ("living thing", "hypernym", "entity"),
        ("animate thing", "derivation", "animate"),
        ("hot", "antonym", "cold"),
        ("hot", "instance_of", "entity"),
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("00000006 03 n 01 lost 0 001 @ 00000009 n 0000 | x", "points to n 00000009, which is missing"),
        ("00000006 03 n 02 lost 0 001 @ 00000001 n 0000 | x", r"data\.noun, line 6: not a synset"),
        ("00000006 03 n 01 lost 0 001 @ 00000001 n 0009 | x", "points from and to words 0009, which are missing"),
        ("broken", r"data\.noun, line 6: not a synset"),
    ],
)
def test_a_damaged_file_of_wordnet_is_refused(line: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=complaint):
        list(triples.read_wordnet(wordnet(tmp_path / "dict", [*NOUNS, line])))
    with pytest.raises(UserError, match=r"data\.noun is missing; give the directory"):
        list(triples.read_wordnet(tmp_path))


def test_conceptnet_is_read_in_both_formats(tmp_path: Path) -> None:
    assertions = [
        "/a/[/r/IsA/,/c/en/dog/n/,/c/en/pet/]\t/r/IsA\t/c/en/dog/n\t/c/en/house_pet\t{}",
        "/a/[/r/IsA/,/c/fr/chien/,/c/en/pet/]\t/r/IsA\t/c/fr/chien\t/c/en/pet\t{}",
    ]
    with gzip.open(tmp_path / "assertions.csv.gz", "wt") as file:
        file.write("\n".join(assertions) + "\n")
    (tmp_path / "train100k.txt").write_text("IsA\tdog\thouse pet\t3.45\nIsA\tdog\thouse\t0\n")
    for name in ("assertions.csv.gz", "train100k.txt"):
        assert [each[:3] for each in triples.read_conceptnet(tmp_path / name)] == [("dog", "IsA", "house pet")]
    (tmp_path / "cut.csv.gz").write_bytes((tmp_path / "assertions.csv.gz").read_bytes()[:-12])
    with pytest.raises(UserError, match=r"cut\.csv\.gz cannot be read"):
        list(triples.read_conceptnet(tmp_path / "cut.csv.gz"))
    (tmp_path / "bad.txt").write_text("a line\n")
    with pytest.raises(UserError, match=r"bad\.txt, line 1: expected five columns"):
        list(triples.read_conceptnet(tmp_path / "bad.txt"))


def test_atomic_has_its_own_parts(tmp_path: Path) -> None:
    header = "event,oEffect,xIntent,prefix,split\n"
    rows = '"PersonX eats, alone","[]","[""to eat"", ""to rest""]","[""eats""]",trn\n'
    rows += 'PersonX runs,"[""none""]","[]","[]",tst\n'
    (tmp_path / "atomic.csv").write_text(header + rows)
    assert [tuple(each) for each in triples.read_atomic(tmp_path / "atomic.csv")] == [
        ("PersonX eats, alone", "xIntent", "to eat", "train"),
        ("PersonX eats, alone", "xIntent", "to rest", "train"),
        ("PersonX runs", "oEffect", "none", "test"),
    ]
    cut = gzip.compress((header + rows).encode())[:-12]
    (tmp_path / "cut.csv.gz").write_bytes(cut)
    with pytest.raises(UserError, match=r"cut\.csv\.gz cannot be read"):
        list(triples.read_atomic(tmp_path / "cut.csv.gz"))
    no_event = header.replace("event", "text") + "PersonX runs,[],[],[],tst\n"
    cells = ("none", '"""none"""', "[1]", "3")  # neither a text nor a list of numbers is a list of texts
    for content in (no_event, *(f"{header}PersonX runs,{cell},[],[],tst\n" for cell in cells)):
        (tmp_path / "bad.csv").write_text(content)
        with pytest.raises(UserError, match=r"bad\.csv, row 2: expected the columns event and split, and JSON lists"):
            list(triples.read_atomic(tmp_path / "bad.csv"))


def test_the_triples_of_a_head_are_in_one_part(tmp_path: Path) -> None:
    made = [triples.Triple(f"head {number % 150}", f"r{number % 3}", f"tail {number}") for number in range(600)]
    counts = triples.write_triples(iter(made), tmp_path / "out")
    heads, rows = {}, []
    for part in ("train", "dev", "test"):
        lines = gzip.decompress((tmp_path / "out" / f"{part}.jsonl.gz").read_bytes()).decode().splitlines()
        assert len(lines) == counts[part].total() > 0
        rows += [json.loads(line) for line in lines]
        heads[part] = {json.loads(line)["head"] for line in lines}
    assert not heads["train"] & heads["test"] and not heads["train"] & heads["dev"] and not heads["dev"] & heads["test"]
    assert sorted((row["head"], row["relation"], row["tail"]) for row in rows) == sorted(each[:3] for each in made)
    assert json.loads((tmp_path / "out" / "relations.json").read_text()) == ["<r0>", "<r1>", "<r2>"]
    from multihop.eval.tasks.known_tasks import load_task

    task = load_task(str(tmp_path / "out" / "completion.yaml"), None)
    assert len(task.test) == counts["test"].total() and task.test[0].texts[0].endswith((" <r0>", " <r1>", " <r2>"))


@pytest.mark.parametrize(("triple", "what"), [(("a", "r", " "), "tail"), (("a", "", "b"), "relation")])
def test_a_triple_without_a_part_is_refused(triple: tuple[str, str, str], what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"triple 1 has no {what}"):
        triples.write_triples(iter([triples.Triple(*triple)]), tmp_path / "out")


def test_word_forms_have_lemmas_that_fit(tmp_path: Path) -> None:
    for name in word_forms.FILES:
        (tmp_path / name).write_text("")
    (tmp_path / "noun.exc").write_text("abaci abacus\nmen man\ngeese goose\nbest good well\nwas be\noxen ox\n")
    pairs = word_forms.read_word_forms(tmp_path)
    assert pairs == [("abaci", "abacus"), ("men", "man"), ("geese", "goose"), ("was", "be"), ("oxen", "ox")]
    # One more than the form has letters fits, by the state of the end; two equal neighbors need a blank between them.
    assert [pair for pair in pairs if not word_forms.is_alignable(*pair)] == []
    assert not word_forms.is_alignable("wet", "weeed") and word_forms.is_alignable("goo", "good") is False
    counts = word_forms.write_pairs(pairs, tmp_path / "out")
    assert sum(counts.values()) == 5 and (tmp_path / "out" / "lemmas.yaml").is_file()
    (tmp_path / "verb.exc").write_bytes(b"caf\xe9s caf\xe9\n")
    with pytest.raises(UserError, match=r"verb\.exc cannot be read"):
        word_forms.read_word_forms(tmp_path)
    (tmp_path / "verb.exc").write_text("alone\n")
    with pytest.raises(UserError, match=r"verb\.exc, line 1: expected a form and its lemma"):
        word_forms.read_word_forms(tmp_path)
