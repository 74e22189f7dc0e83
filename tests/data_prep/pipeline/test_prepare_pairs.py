"""Pairs from files to shards: the format of rows, the same bytes however the work is divided, and all refusals."""

import gzip
import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_up_pairs import TOKENS, pair, recipe, write_jsonl
from prepared_data import already_prepared, bytes_of

from multihop.common.errors import UserError
from multihop.data_prep.config import DataConfig
from multihop.data_prep.dataset.manifest import Manifest, read_data_manifest, read_token_counts
from multihop.data_prep.dataset.shards import Documents, open_dataset
from multihop.data_prep.dataset.statistics import compute_statistics
from multihop.data_prep.dataset.verify import dataset_files, verify_dataset
from multihop.data_prep.pipeline.forecast import forecast
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.reading.sources import list_files
from multihop.data_prep.rules.pairs import join_sides
from multihop.data_prep.stages.documents import content_hash
from multihop.data_prep.tokenizers import tokenizer
from multihop.data_prep.tokenizers.existing import check_objective
from multihop.data_prep.tokenizers.training import train

PAIRS = [pair(number) for number in range(150)]
SEPARATE = TOKENS.model_copy(update={"separate_vocabularies": True, "vocab_size": 90})
FILTERED = {"filters": {"pairs": {"max_words": 60}}}


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    return recipe(write_jsonl(tmp_path / "a.jsonl", PAIRS))


def sides(documents: Documents) -> dict[int, tuple[list[int], list[int]]]:
    """Return the token ids of the source and of the target side, by document."""
    found = {}
    for i in range(len(documents)):
        first, last = documents.sentence_ends(i).tolist()
        tokens = documents.tokens(i).tolist()
        assert last == len(tokens) and documents.source_lengths[i] == first
        found[int(documents.ids[i])] = (tokens[:first], tokens[first:])
    return found


@pytest.mark.parametrize("tok", [TOKENS, SEPARATE], ids=["joint", "separate"])
def test_a_row_has_the_tokens_of_both_sides_and_their_ends(tmp_path: Path, data: DataConfig, tok: Any) -> None:
    manifest = prepare(data, tok, tmp_path / "out")
    dataset = open_dataset(tmp_path / "out")
    assert manifest.pairs and dataset.manifest == manifest and verify_dataset(tmp_path / "out") == []
    files = [info.file for info in manifest.tokenizers]
    assert files == ["tokenizer.model", "target_tokenizer.model"][: 1 + tok.separate_vocabularies]
    assert {*files, manifest.token_counts.file} < dataset_files(manifest).keys()
    source_tok, target_tok = (tokenizer.load(tmp_path / "out" / file) for file in (files[0], files[-1]))
    for info, loaded in zip(manifest.tokenizers, (source_tok, target_tok), strict=False):
        assert info.special_ids == {"pad": 0, "end": 1, "unk": 2} and info.vocab_size == tok.vocab_size
        assert [loaded.id_to_token(i) for i in range(3)] == ["<pad>", "</s>", "<unk>"]
    found = sides(dataset.train) | sides(dataset.heldout)
    assert len(found) == len(dataset.train) + len(dataset.heldout) == len(PAIRS) and 0 < len(dataset.heldout) < 50
    for source, target in PAIRS:
        expected = source_tok.encode([source])[0].tolist(), target_tok.encode([target])[0].tolist()
        assert found[content_hash(join_sides(source, target))[0]] == expected

    train = dataset.train
    counts = read_token_counts(tmp_path / "out", manifest)
    targets = np.concatenate([target for _, target in sides(train).values()])
    assert counts.tolist() == np.bincount(targets, minlength=tok.vocab_size).tolist()
    assert train.source_lengths.dtype == np.int64 and train.of_source(0)[1].source_lengths.tolist() == (
        train.source_lengths.tolist()
    )
    totals = manifest.totals["train"]
    assert (totals.documents, totals.sentences, totals.tokens) == (len(train), 2 * len(train), train.lengths.sum())
    statistics = compute_statistics(tmp_path / "out")
    part = next(part for part in statistics.groups if part.split == "train")
    assert part.sides is not None and part.sides["source"].tokens + part.sides["target"].tokens == part.tokens
    assert part.sides["target"].tokens == counts.sum() and part.sides["source"].mean == train.source_lengths.mean()


def test_a_tokenizer_is_trained_on_both_sides_or_on_one(tmp_path: Path, data: DataConfig) -> None:
    prepare(data, TOKENS, tmp_path / "joint")
    prepare(data, SEPARATE, tmp_path / "separate")
    held = {*open_dataset(tmp_path / "joint").heldout.ids.tolist()}
    assert held == {*open_dataset(tmp_path / "separate").heldout.ids.tolist()}
    by_id = sorted((content_hash(join_sides(*each)), each) for each in PAIRS)
    seen = [each for (first, _), each in by_id if first not in held]
    assert (tmp_path / "joint/tokenizer.model").read_bytes() == train([side for each in seen for side in each], TOKENS)
    for number, name in enumerate(("tokenizer.model", "target_tokenizer.model")):
        expected = train([each[number] for each in seen], SEPARATE)
        assert (tmp_path / "separate" / name).read_bytes() == expected


def shuffled(seed: int) -> Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]:
    def run(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterable[Any]:
        order = list(items)
        random.Random(seed).shuffle(order)
        return iter([function(item) for item in order][::-1])

    return run


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1_500, 9_000), st.integers(0, 99), st.booleans())
def test_no_byte_depends_on_splits_order_format_or_workers(
    tmp_path_factory: pytest.TempPathFactory, split_bytes: int, seed: int, separate: bool
) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    tok = SEPARATE if separate else TOKENS
    write_jsonl(folder / "a.jsonl", PAIRS)
    (folder / "a.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    for side, name in enumerate(("a.en", "a.es")):
        (folder / name).write_text("".join(each[side] + "\n" for each in PAIRS))
    plain = bytes_of_all(prepare(recipe(folder / "a.jsonl"), tok, folder / "0"), folder / "0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("multihop.data_prep.reading.sources.group_into_splits.__defaults__", (split_bytes,))
        prepare(recipe(folder / "a.jsonl"), tok, folder / "1", shuffled(seed))
        assert bytes_of(folder / "1") == bytes_of(folder / "0")
        columns = prepare(recipe(folder / "a.tsv", fields=None), tok, folder / "2", shuffled(seed))
        lines = prepare(recipe(folder / "a.en", target_path=str(folder / "a.es")), tok, folder / "3", shuffled(seed))
    assert bytes_of_all(columns, folder / "2") == bytes_of_all(lines, folder / "3") == plain
    assert columns.fingerprint == lines.fingerprint == read_data_manifest(folder / "0").fingerprint


def bytes_of_all(manifest: Manifest, folder: Path) -> dict[str, bytes]:
    """Return the content of all files except the manifest, which has the settings."""
    return {name: (folder / name).read_bytes() for name in dataset_files(manifest)}


def test_an_interrupted_preparation_ends_with_the_same_bytes(tmp_path: Path, data: DataConfig) -> None:
    prepare(data, SEPARATE, tmp_path / "whole")
    for stop in range(1, 60, 4):
        left = stop

        def stopping(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterable[Any]:
            nonlocal left
            for item in items:
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
                yield function(item)

        try:
            prepare(data, SEPARATE, tmp_path / "out", stopping)
        except KeyboardInterrupt:
            continue
        break
    else:
        raise AssertionError("it never came to an end")
    assert stop > 8 and bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
    assert already_prepared(data, SEPARATE, tmp_path / "out") == read_data_manifest(tmp_path / "whole")


def test_a_change_of_the_second_file_is_another_data_set(tmp_path: Path) -> None:
    for side, name in enumerate(("a.en", "a.es")):
        (tmp_path / name).write_text("".join(each[side] + "\n" for each in PAIRS))
    data = recipe(tmp_path / "a.en", target_path=str(tmp_path / "a.es"))
    first = prepare(data, TOKENS, tmp_path / "out")
    assert already_prepared(data, TOKENS, tmp_path / "out") == first
    text = (tmp_path / "a.es").read_text()
    (tmp_path / "a.es").write_text("x" + text[1:])
    assert already_prepared(data, TOKENS, tmp_path / "out") is None
    assert prepare(data, TOKENS, tmp_path / "out").fingerprint != first.fingerprint


def test_the_fingerprint_covers_both_tokenizers_and_damage_of_each_is_found(tmp_path: Path, data: DataConfig) -> None:
    manifest = prepare(data, SEPARATE, tmp_path / "out")
    other = prepare(data, SEPARATE.model_copy(update={"vocab_size": 91}), tmp_path / "other")
    assert other.fingerprint != manifest.fingerprint != prepare(data, TOKENS, tmp_path / "joint").fingerprint
    path = tmp_path / "out" / "target_tokenizer.model"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    (complaint,) = verify_dataset(tmp_path / "out")
    assert "target_tokenizer.model is damaged" in complaint
    assert prepare(data, SEPARATE, tmp_path / "out") == manifest and path.read_bytes() == content


def test_what_is_dropped_is_counted_by_its_reason(tmp_path: Path) -> None:
    rows = list(PAIRS)
    exam = "bakeli doru fani gemo lanu tireba zuki moda felo gani rupe solu vamo zeta"
    rows += [PAIRS[3], ("  " + PAIRS[4][0].replace(" ", " \t\n"), PAIRS[4][1])]  # copies once they are clean
    rows += [("word " * 81, "drow " * 81), ("same", "same"), ("one", "two " * 10)]
    rows += [(exam, "afi moku " * 3), ("lode rati " * 3, exam.title() + "!")]
    near = " ".join(pair(number)[0] for number in range(900, 905)), " ".join(pair(number)[1] for number in range(5))
    rows += [near, (near[0] + " bamo", near[1])]
    rows += [("one", ""), (" ", "uno"), ("", "")]
    (tmp_path / "dev.jsonl").write_text(json.dumps({"en": "a few words", "es": exam}) + "\n")
    data = recipe(
        write_jsonl(tmp_path / "a.jsonl", rows),
        filters={"pairs": {"max_ratio": 5}},
        near_duplicates={"threshold": 0.7, "shingle_words": 2},
        decontaminate={"against": [str(tmp_path / "dev.jsonl")], "field": ["en", "es"]},
        max_bad_fraction=0.05,
    )
    manifest = prepare(data, TOKENS, tmp_path / "out")
    assert manifest.counts["read"] == {"kept": len(rows) - 2, "empty target": 1, "empty source": 1}
    assert [(each.path, each.reason) for each in manifest.set_aside] == [
        (f"{tmp_path}/a.jsonl:{len(rows) - 2}", "empty target"),
        (f"{tmp_path}/a.jsonl:{len(rows) - 1}", "empty source"),
    ]
    assert manifest.counts["filter"] == {
        "kept": len(rows) - 2 - 4,
        "a side of more than 80 words": 1,
        "equal sides": 1,
        "a side more than 5 times as long as the other": 1,
        "both sides empty": 1,
    }
    assert manifest.counts["copies"] == {"kept": len(PAIRS) + 4, "copy of another": 2}
    assert manifest.counts["near duplicates"] == {"kept": len(PAIRS) + 3, "near duplicate of another": 1}
    assert manifest.counts["decontaminate"] == {
        "kept": len(PAIRS) + 1, "contaminated": 2, "contaminated by dev": 2
    }  # fmt: skip


def test_a_pair_is_dropped_if_either_side_has_an_evaluation_text(tmp_path: Path) -> None:
    exams = [" ".join(pair(number)[0].strip(".") for number in (start, start + 1, start + 2)) for start in (800, 810)]
    (tmp_path / "exam.txt").write_text("\n".join(exams) + "\n")
    rows = [*PAIRS, (exams[0], pair(700)[1] * 3), (pair(701)[0] * 3, exams[1].upper())]
    data = recipe(write_jsonl(tmp_path / "a.jsonl", rows), decontaminate={"against": [str(tmp_path / "exam.txt")]})
    manifest = prepare(data, TOKENS, tmp_path / "out")
    assert manifest.counts["decontaminate"] == {
        "kept": len(PAIRS), "contaminated": 2, "contaminated by exam": 2
    }  # fmt: skip


def test_too_many_bad_pairs_or_files_end_the_preparation(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [*PAIRS, *[("one", "")] * 5])
    with pytest.raises(UserError, match=r"5 of 155 pairs cannot be used.*a\.jsonl:151: empty target"):
        prepare(recipe(tmp_path / "a.jsonl"), TOKENS, tmp_path / "out")
    (tmp_path / "a.en").write_text("one\n" * 30)
    (tmp_path / "a.es").write_text("uno\n" * 29)
    with pytest.raises(UserError, match=r"1 of 1 files.*a\.en has 30 lines and \S*a\.es 29"):
        prepare(recipe(tmp_path / "a.en", target_path=str(tmp_path / "a.es")), TOKENS, tmp_path / "out")
    for name in ("b.en.gz", "b.es.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"one two\n" * 99)[:-9])
    with pytest.raises(UserError, match=r"1 of 1 files.*b\.en\.gz: broken gzip"):
        prepare(recipe(tmp_path / "b.en.gz", target_path=str(tmp_path / "b.es.gz")), TOKENS, tmp_path / "out")


def test_an_existing_tokenizer_serves_both_sides_or_is_refused(tmp_path: Path, data: DataConfig) -> None:
    whole = prepare(data, TOKENS, tmp_path / "whole")
    (tmp_path / "t5.model").write_bytes((tmp_path / "whole/tokenizer.model").read_bytes())
    given = TOKENS.model_validate({"path": str(tmp_path / "t5.model")})
    manifest = prepare(data, given, tmp_path / "out")
    assert manifest.fingerprint == whole.fingerprint and manifest.target_tokenizer is None
    check_objective(tmp_path / "t5.model", True, "translation", {"pad", "end"})

    for tokens in ("gpt2", "bert"):
        other = TOKENS.model_copy(update={"special_tokens": tokens})
        (tmp_path / f"{tokens}.model").write_bytes(train([side for each in PAIRS for side in each], other))
    gpt2, bert = tmp_path / "gpt2.model", tmp_path / "bert.model"
    for call in (
        lambda: prepare(data, TOKENS.model_validate({"path": str(bert)}), tmp_path / "no"),
        lambda: check_objective(bert, True, "translation", {"pad", "end"}),
    ):
        with pytest.raises(UserError, match=r"cannot be used: its vocabulary lacks <\|endoftext\|> or </s> for an enc"):
            call()
    with pytest.raises(
        UserError, match=r"special tokens of a decoder alone, but objective\.name=translation needs <pad>"
    ):
        check_objective(gpt2, True, "translation", {"pad", "end"})
    # A causal model completes pairs without padding.
    check_objective(gpt2, True, "completion", {"end", "unk"})
    completed = prepare(data, TOKENS.model_validate({"path": str(gpt2)}), tmp_path / "causal")
    assert completed.tokenizer.special_ids == {"end": 0, "unk": 1} and completed.pairs


def test_a_vocabulary_without_the_script_of_a_side_is_refused_before_encoding(tmp_path: Path) -> None:
    cyrillic = {ord(letter): chr(0x430 + number) for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    (tmp_path / "latin.model").write_bytes(train([side for each in PAIRS for side in each], TOKENS))
    given = TOKENS.model_validate({"path": str(tmp_path / "latin.model")})
    data = recipe(write_jsonl(tmp_path / "a.jsonl", [(source, target.translate(cyrillic)) for source, target in PAIRS]))
    stages: list[str] = []
    pattern = (
        r"[1-9]\d\.\d% of the target side's tokens are unknown to tokenizer\.path=\S*latin\.model, at most 1% can be"
    )
    with pytest.raises(UserError, match=pattern):
        prepare(data, given, tmp_path / "out", report=lambda stage, done, total: stages.append(stage))
    assert "unknown tokens" in stages and "encode" not in stages
    assert prepare(data, TOKENS, tmp_path / "trained").totals["train"].documents > 100


def test_rows_of_documents_have_no_source_lengths(tmp_path: Path, data: DataConfig) -> None:
    documents = DataConfig.model_validate(
        {"sources": [{"path": data.sources[0].path, "field": "en"}], "heldout_fraction": 0.1}
    )
    prepare(documents, TOKENS.model_copy(update={"vocab_size": 80}), tmp_path / "out")
    with pytest.raises(UserError, match="has documents, not pairs"):
        _ = open_dataset(tmp_path / "out").train.source_lengths


def test_a_forecast_counts_pairs_and_both_files(tmp_path: Path, data: DataConfig) -> None:
    for side, name in enumerate(("a.en", "a.es")):
        (tmp_path / name).write_text("".join(each[side] + "\n" for each in PAIRS))
    size = sum((tmp_path / name).stat().st_size for name in ("a.en", "a.es"))
    lines = recipe(tmp_path / "a.en", target_path=str(tmp_path / "a.es"), **FILTERED)
    found = forecast(lines, TOKENS, list_files(lines.sources), [], tmp_path / "work")
    (source,) = found.sources
    assert (source.files, source.bytes, source.documents, source.text_bytes) == (2, size, 150, size - 300)
    assert found.splits_read == 0 and not found.is_prepared
    prepare(lines, TOKENS, tmp_path / "out", work=tmp_path / "work")
    again = forecast(lines, TOKENS, list_files(lines.sources), [tmp_path / "out"], tmp_path / "work")
    assert again.is_prepared and again.splits_read == again.splits == 1
    with pytest.raises(UserError, match="lacks tokens that pairs need"):
        forecast(data, TOKENS.model_copy(update={"special_tokens": "bert"}), list_files(data.sources), [], tmp_path)
