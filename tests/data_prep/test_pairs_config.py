"""Recipes of pairs: what is refused and how; recipes of documents keep the hashes that they had before pairs."""

from typing import Any

import pytest
from pydantic import ValidationError

from multihop.common.errors import UserError
from multihop.common.files import sha256_json
from multihop.data_prep.config import DataConfig, TokenizerConfig, check_tokenizer
from multihop.data_prep.dataset.manifest import Manifest, Shard, TokenCounts, Totals, data_fingerprint, manifest_sha256
from multihop.data_prep.pipeline.identity import dataset_settings, sources_key
from multihop.data_prep.tokenizers.info import TokenizerInfo

FIELDS = {"source": "en", "target": "es"}
PAIRS = {"path": "a.jsonl", "fields": FIELDS}


def refused(data: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as refusal:
        DataConfig.model_validate(data)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({**PAIRS, "target_path": "b"}, "target_path=b is for two line files, and fields for files that hold both"),
        ({**PAIRS, "field": "body"}, "field=body is for documents, but the source has pairs"),
        ({**PAIRS, "documents": "line"}, "documents=line is for documents, but the source has pairs"),
        ({**PAIRS, "language": "de"}, "language=de is for documents, but the source has pairs"),
        ({"path": "a", "target_path": "b", "documents": "line"}, "documents=line is for documents"),
        ({"path": "a", "target_path": "a"}, "target_path=a is the file of path"),
        ({"path": "a.tsv", "field": "body"}, "field=body is for documents"),
        ({"path": "a.tsv.gz", "fields": FIELDS}, "fields has source=en, but a.tsv.gz is a .tsv file; give numbers"),
        ({"path": "a", "fields": {"source": "en", "target": 2}}, "expected two names of fields, or two column numbers"),
        ({"path": "a", "fields": {"source": 2, "target": 2}}, "expected two different fields"),
        ({"path": "a", "fields": {"source": 0, "target": 2}}, "columns are counted from 1"),
        ({"path": "a", "fields": {"source": "en"}}, "fields.target"),
    ],
)
def test_a_source_that_cannot_be_is_refused_by_its_key(source: dict[str, Any], expected: str) -> None:
    message = refused({"sources": [source]})
    assert expected in message and "sources.0" in message


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"sources": [{"path": "a/"}, PAIRS]}, "data.sources[1] has pairs and data.sources[0] has documents"),
        ({"sources": [{"path": "a/"}, {"path": "b.tsv"}]}, "data.sources[1] has pairs"),
        ({"sources": [PAIRS], "filters": {"c4": {}}}, "data.filters.c4 is for documents, but data.sources have pairs"),
        ({"sources": [PAIRS], "filters": {"gopher_quality": {}}}, "data.filters.gopher_quality is for documents"),
        ({"sources": [PAIRS], "filters": {"language": {"keep": ["en"]}}}, "use data.filters.pairs.languages"),
        ({"sources": [{"path": "a/"}], "filters": {"pairs": {}}}, "data.filters.pairs is set, but data.sources have"),
        ({"sources": [PAIRS], "decontaminate": {"against": ["a.txt"], "action": "cut"}}, "action=cut would cut one"),
    ],
)
def test_rules_that_make_no_sense_for_pairs_are_refused(data: dict[str, Any], expected: str) -> None:
    assert expected in refused(data)


def test_columns_one_and_two_of_tsv_files_are_meant_without_fields() -> None:
    data = DataConfig.model_validate({"sources": [{"path": "a/*.tsv.zst"}, {"path": "a", "target_path": "b"}]})
    assert data.holds_pairs and data.sources[0].pair_fields is not None
    assert data.sources[0].pair_fields.are_columns and data.sources[1].pair_fields is None
    assert DataConfig.model_validate(data.model_dump(mode="json")) == data


def test_the_tokenizer_suits_pairs_or_documents() -> None:
    pairs = DataConfig.model_validate({"sources": [PAIRS]})
    documents = DataConfig.model_validate({"sources": [{"path": "a/"}]})
    check_tokenizer(pairs, TokenizerConfig(special_tokens="t5", separate_vocabularies=True))
    check_tokenizer(pairs, TokenizerConfig(path="a.model"))
    with pytest.raises(UserError, match="special_tokens=bert lacks tokens that pairs need"):
        check_tokenizer(pairs, TokenizerConfig())
    with pytest.raises(UserError, match="separate_vocabularies=true is for pairs"):
        check_tokenizer(documents, TokenizerConfig(separate_vocabularies=True))
    with pytest.raises(ValidationError, match=r"tokenizer\.separate_vocabularies is a setting of training"):
        TokenizerConfig(path="a.model", separate_vocabularies=True)


def test_data_sets_of_documents_that_were_prepared_before_pairs_keep_their_hashes() -> None:
    """The expected hashes are those of the version before pairs."""
    data = DataConfig.model_validate(
        {
            "sources": [{"path": "texts/", "weight": 1.0}, {"path": "more.jsonl", "field": "body", "weight": 2.0}],
            "filters": {"c4": {}, "language": {"keep": ["en"]}},
            "near_duplicates": {},
            "decontaminate": {"against": ["exam.txt"]},
        }
    )
    assert sources_key(data) == "bab9a52dbd31b2c5"
    assert [
        sha256_json(dataset_settings(data, tok)) for tok in (TokenizerConfig(), TokenizerConfig(path="vocab.txt"))
    ] == [
        "d50c3f5d4b3a4458ec9db96f797c282217cbc2f9fb66e58392124d349ac17ca2",
        "192acb7171d4af69aeee77b23cf6ec25e1d72c206e1615ee326d759499805045",
    ]
    recipe = [data.model_dump(mode="json"), TokenizerConfig().model_dump(mode="json")]
    assert sha256_json(recipe) == "33bba14e916da36f129410f51a53c90359d10a9402ebfc22ad936a0c19af5982"

    ones, twos, threes, fours = ("1234"[number] * 64 for number in range(4))
    shard = Shard(file="train-00000.arrow", split="train", documents=3, tokens=9, bytes=100, sha256=ones)
    fingerprint = data_fingerprint(twos, "uint16", [shard])
    assert fingerprint == "dc250eddb1007539cec53a290d6f1e069361c6e6eef94051f147a8cfdbb714b0"
    special_ids = {"end": 0, "unk": 1}
    totals = Totals(documents=3, sentences=3, tokens=9, text_bytes=30)
    manifest = Manifest(
        fingerprint=fingerprint,
        inputs=threes,
        tokenizer=TokenizerInfo(kind="unigram", vocab_size=8, sha256=twos, special_ids=special_ids, word_start="3f"),
        token_dtype="uint16",
        shards=[shard],
        token_counts=TokenCounts(sha256=fours),
        totals={"train": totals, "heldout": totals},
        settings={},
        sources=["texts/"],
    )
    assert manifest_sha256(manifest) == "63d9b2bd36526208a2613f66f68df3687a91ccbbd4b97d99627a97eb42f865f2"
    assert data_fingerprint(twos, "uint16", [shard], pairs=True) != fingerprint
