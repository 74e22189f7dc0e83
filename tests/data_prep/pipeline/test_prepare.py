import json
import random
from pathlib import Path

import numpy as np
import pytest
from prepared_data import already_prepared, bytes_of

from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.dataset.manifest import read_data_manifest
from multihop.data_prep.dataset.shards import Documents, open_dataset
from multihop.data_prep.dataset.verify import verify_dataset
from multihop.data_prep.pipeline import encode, shards
from multihop.data_prep.pipeline import prepare as pipeline
from multihop.data_prep.pipeline.identity import resolve_inputs, sources_key
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.reading.sources import list_files
from multihop.data_prep.rules.clean import clean
from multihop.data_prep.rules.sentences import split_sentences
from multihop.data_prep.stages.documents import content_hash
from multihop.data_prep.stages.runner import map_in_process
from multihop.data_prep.tokenizers import tokenizer
from multihop.data_prep.tokenizers.training import train


def rows(documents: Documents) -> dict[int, tuple[int, list[int], list[int]]]:
    return {
        int(documents.ids[i]): (
            documents.source(i),
            documents.tokens(i).tolist(),
            documents.sentence_ends(i).tolist(),
        )
        for i in range(len(documents))
    }


def test_every_document_is_there_once_with_its_tokens_and_sentences(tmp_path, data, tok, document):
    manifest = prepare(data, tok, tmp_path / "out")
    dataset = open_dataset(tmp_path / "out")
    assert verify_dataset(tmp_path / "out") == []
    assert dataset.manifest == manifest
    processor = tokenizer.load(tmp_path / "out" / manifest.tokenizer.file)
    result = rows(dataset.train) | rows(dataset.heldout)
    assert len(dataset.train) + len(dataset.heldout) == len(result) == 120
    assert 0 < len(dataset.heldout) < 40
    for number in range(120):
        text = clean(document(number))
        source, tokens, ends = result[content_hash(text)[0]]
        sentences = split_sentences(text)
        assert tokens == [token for sentence in sentences for token in processor.encode([sentence])[0].tolist()]
        assert np.diff([0, *ends]).tolist() == processor.encode(sentences)[1].tolist()
        assert source == 0


def test_totals_and_token_counts_are_those_of_the_shards(tmp_path, data, tok):
    manifest = prepare(data, tok, tmp_path / "out")
    dataset = open_dataset(tmp_path / "out")
    for name, documents in (("train", dataset.train), ("heldout", dataset.heldout)):
        totals = manifest.totals[name]
        assert totals.documents == len(documents) == len(documents.ids)
        assert totals.documents == sum(s.documents for s in manifest.of_split(name))
        assert totals.tokens == documents.lengths.sum() == sum(s.tokens for s in manifest.of_split(name))
        assert totals.sentences == sum(len(documents.sentence_ends(i)) for i in range(len(documents)))
        assert totals.text_bytes > 0
    counts = np.load(tmp_path / "out" / manifest.token_counts.file, allow_pickle=False)
    assert counts.dtype == np.int64 and counts.shape == (tok.vocab_size,)
    train = np.concatenate([dataset.train.tokens(i) for i in range(len(dataset.train))])
    assert counts.tolist() == np.bincount(train, minlength=tok.vocab_size).tolist()
    special = [i for name, i in manifest.tokenizer.special_ids.items() if name != "unk"]
    assert not counts[special].any(), "objectives add the special tokens"


def test_sentence_ends_climb_to_the_length_and_tokens_are_views(tmp_path, data, tok):
    prepare(data, tok, tmp_path / "out")
    documents = open_dataset(tmp_path / "out").train
    for i in range(len(documents)):
        tokens, ends = documents.tokens(i), documents.sentence_ends(i)
        assert tokens.dtype == np.uint16 and ends.dtype == np.uint32
        assert len(tokens) == documents.lengths[i] == ends[-1]
        assert (np.diff(ends.astype(int), prepend=0) > 0).all()
        assert not tokens.flags.owndata and not tokens.flags.writeable
    for i in (-1, len(documents)):
        with pytest.raises(IndexError):
            documents.tokens(i)


def test_the_order_of_the_work_changes_no_byte(tmp_path, data, tok, monkeypatch):
    monkeypatch.setattr("multihop.data_prep.reading.sources.group_into_splits.__defaults__", (3_000,))

    def shuffled(seed):
        def run(function, items):
            order = list(items)
            random.Random(seed).shuffle(order)
            results = [function(item) for item in order]
            return iter(results[::-1])

        return run

    prepare(data, tok, tmp_path / "0")
    assert len(list((tmp_path / "0" / "work" / "read").glob("*.arrow"))) > 3
    for seed in (1, 2):
        prepare(data, tok, tmp_path / str(seed), shuffled(seed))
        assert bytes_of(tmp_path / str(seed)) == bytes_of(tmp_path / "0")


def test_what_is_done_is_not_done_again(tmp_path, data, tok):
    prepare(data, tok, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.*") if path.name != "inputs.json"}
    stages = []
    prepare(data, tok, tmp_path / "out", report=lambda stage, done, total: stages.append((stage, done, total)))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not {stage for stage, _, total in stages if total}
    assert already_prepared(data, tok, tmp_path / "out") == read_data_manifest(tmp_path / "out")


def test_only_what_hangs_on_a_changed_file_is_done_again(tmp_path, data, tok, corpus, document, monkeypatch):
    monkeypatch.setattr("multihop.data_prep.reading.sources.group_into_splits.__defaults__", (3_000,))
    old = prepare(data, tok, tmp_path / "out")
    read = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out/work/read").iterdir()}
    (corpus / "b.jsonl").write_text(json.dumps({"text": document(999)}) + "\n")
    assert already_prepared(data, tok, tmp_path / "out") is None
    new = prepare(data, tok, tmp_path / "out")
    assert new.fingerprint != old.fingerprint
    assert content_hash(document(999))[0] in rows(open_dataset(tmp_path / "out").train) | rows(
        open_dataset(tmp_path / "out").heldout
    )
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out/work/read").iterdir()}
    kept = read.keys() & after.keys()
    assert kept and all(after[name] == read[name] for name in kept)
    assert read.keys() - after.keys(), "outputs that nothing refers to are swept"
    prepare(data, tok, tmp_path / "fresh")
    assert bytes_of(tmp_path / "fresh") == bytes_of(tmp_path / "out")


def test_touching_a_file_changes_nothing_and_the_same_size_is_not_the_same_content(tmp_path, data, tok, corpus):
    old = prepare(data, tok, tmp_path / "out")
    path = corpus / "books" / "00.txt"
    text = path.read_text()
    path.write_text(text)
    assert prepare(data, tok, tmp_path / "out") == old
    path.write_text(text[:-2] + "x.")
    assert prepare(data, tok, tmp_path / "out").fingerprint != old.fingerprint


def test_the_held_out_documents_are_chosen_by_their_text_alone(tmp_path, data, tok, corpus):
    prepare(data, tok, tmp_path / "one")
    lines = [json.dumps({"text": path.read_text()}) for path in (corpus / "books").iterdir()]
    lines += [line for name in "ba" for line in reversed((corpus / f"{name}.jsonl").read_text().splitlines())]
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "z.jsonl").write_text("\n".join(lines))
    other = DataConfig(sources=[Source(path=str(tmp_path / "again"))], heldout_fraction=0.1)
    prepare(other, tok, tmp_path / "two")
    one, two = open_dataset(tmp_path / "one"), open_dataset(tmp_path / "two")
    assert set(one.heldout.ids) == set(two.heldout.ids)
    assert set(one.train.ids) == set(two.train.ids)


def test_the_fingerprint_is_of_the_content_not_of_the_location(tmp_path, data, tok, corpus, monkeypatch):
    first = prepare(data, tok, tmp_path / "out")
    moved = corpus.rename(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    second = prepare(data.model_copy(update={"sources": [Source(path=moved.name)]}), tok, Path("out2"))
    assert second.fingerprint == first.fingerprint
    assert second.settings != first.settings


def test_copies_are_dropped_and_the_first_source_keeps_them(tmp_path, data, tok, corpus, document):
    twice = tmp_path / "twice"
    twice.mkdir()
    (twice / "0.txt").write_text("  " + document(3).replace(" ", "\t ") + "\r\n")
    (twice / "1.txt").write_text(document(500))
    both = DataConfig(sources=[*data.sources, Source(path=str(twice)), *data.sources], heldout_fraction=0.1)
    manifest = prepare(both, tok, tmp_path / "out")
    assert manifest.counts["read"] == {"kept": 242}
    assert manifest.counts["copies"] == {"kept": 121, "copy of another": 121}
    dataset = open_dataset(tmp_path / "out")
    result = rows(dataset.train) | rows(dataset.heldout)
    assert result[content_hash(document(3))[0]][0] == 0
    assert result[content_hash(document(500))[0]][0] == 1
    assert {source for source, *_ in result.values()} == {0, 1}


def test_several_shards_are_seen_as_one(tmp_path, data, tok, monkeypatch):
    monkeypatch.setattr("multihop.data_prep.stages.documents.BATCH_BYTES", 800)
    one = prepare(data, tok, tmp_path / "one")
    monkeypatch.setattr(shards, "SHARD_BYTES", 2_000)
    many = prepare(data, tok, tmp_path / "many")
    assert len(one.of_split("train")) == 1 and len(many.of_split("train")) > 3
    a, b = open_dataset(tmp_path / "one").train, open_dataset(tmp_path / "many").train
    assert a.ids.tolist() == b.ids.tolist() and a.lengths.tolist() == b.lengths.tolist()
    assert rows(a) == rows(b)


def test_a_large_vocabulary_is_written_with_four_bytes(tmp_path, data, tok, monkeypatch):
    monkeypatch.setattr(encode, "token_dtype", lambda vocab_size: "uint32")
    monkeypatch.setattr(pipeline, "token_dtype", lambda vocab_size: "uint32")
    manifest = prepare(data, tok, tmp_path / "wide")
    monkeypatch.undo()
    narrow = prepare(data, tok, tmp_path / "narrow")
    assert manifest.token_dtype == "uint32" and manifest.fingerprint != narrow.fingerprint
    wide = open_dataset(tmp_path / "wide").train
    assert wide.tokens(0).dtype == np.uint32
    assert rows(wide) == rows(open_dataset(tmp_path / "narrow").train)


def test_nothing_held_out_when_nothing_is_requested(tmp_path, data, tok):
    manifest = prepare(data.model_copy(update={"heldout_fraction": 0.0}), tok, tmp_path / "out")
    dataset = open_dataset(tmp_path / "out")
    assert len(dataset.heldout) == 0 == len(dataset.heldout.ids) == len(dataset.heldout.lengths)
    assert len(dataset.train) == 120 and manifest.totals["heldout"].documents == 0


def test_the_tokenizer_never_sees_held_out_text_and_a_smaller_sample_less(tmp_path, tok, document):
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = [document(number) for number in range(200)]
    held = [text for text in texts if content_hash(text)[1] < 0.1 * 2**64]
    marked = [text if text not in held else "" for text in texts]
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_text(text)
    data = DataConfig(sources=[Source(path=str(folder))], heldout_fraction=0.1)
    whole = prepare(data, tok, tmp_path / "whole")
    direct = train([s for text in marked for s in split_sentences(clean(text))], tok)
    assert (tmp_path / "whole" / "tokenizer.model").read_bytes() == direct
    small = prepare(data, tok.model_copy(update={"sample_mb": 0.005}), tmp_path / "small")
    assert small.tokenizer.sha256 != whole.tokenizer.sha256


def test_progress_counts_every_stage_up_to_its_end(tmp_path, data, tok):
    reports: dict[str, list[tuple[int, int]]] = {}

    def report(stage: str, done: int, total: int) -> None:
        reports.setdefault(stage, []).append((done, total))

    prepare(data, tok, tmp_path / "out", map_in_process, report)
    assert list(reports) == [
        "hash",
        "read",
        "sort",
        "copies",
        "sample",
        "draw",
        "tokenizer",
        "encode",
        "shards",
        "count",
    ]
    for steps in reports.values():
        total = steps[0][1]
        assert steps == [(done, total) for done in range(total + 1)]


def test_the_name_of_a_data_set_says_its_settings_and_its_input(tmp_path, data, tok, corpus):
    work = tmp_path / "work"

    def identify(data: DataConfig, tok: TokenizerConfig, work: Path) -> str:
        return resolve_inputs(data, tok, list_files(data.sources), work).identity

    name = identify(data, tok, work)
    assert identify(data.model_copy(deep=True), TokenizerConfig(**tok.model_dump()), work) == name
    assert identify(data, tok.model_copy(update={"vocab_size": 151}), work) != name
    assert identify(data.model_copy(update={"heldout_fraction": 0.2}), tok, work) != name
    assert sources_key(data) == sources_key(data.model_copy(update={"heldout_fraction": 0.2}))
    with open(corpus / "a.jsonl", "a") as file:
        file.write("\n")
    assert identify(data, tok, work) != name


def test_another_setting_redoes_only_what_depends_on_it(tmp_path, data, tok):
    work = tmp_path / "work"

    def written():
        return {path: path.stat().st_mtime_ns for path in work.glob("*/*") if path.is_file()}

    first = prepare(data, tok, tmp_path / "one", work=work)
    before = written()
    second = prepare(data, tok.model_copy(update={"vocab_size": 151}), tmp_path / "two", work=work)
    after = written()
    assert second.fingerprint != first.fingerprint and verify_dataset(tmp_path / "one") == []
    kept = {path.parent.name for path in before if after.get(path) == before[path]}
    assert kept == {"read", "sort", "copies", "draw"}
    assert {path.parent.name for path in after if after[path] != before.get(path)} == {"tokenizer", "encode", "shards"}


def test_the_tokenizer_does_not_depend_on_the_order_of_the_documents(tmp_path, data, tok, document):
    some = tok.model_copy(update={"sample_mb": 0.01})
    first = prepare(data, some, tmp_path / "one")
    texts = [{"text": document(number)} for number in reversed(range(120))]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    other = data.model_copy(update={"sources": [Source(path=str(tmp_path / "all.jsonl"))]})
    second = prepare(other, some, tmp_path / "two")
    assert first.tokenizer == second.tokenizer and first.fingerprint != second.fingerprint
    assert first.totals == second.totals
