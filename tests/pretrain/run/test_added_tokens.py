"""A model with added tokens begins with the parent's weights, and each added token with the mean of its parts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_pairs import recipe as pairs_recipe
from made_up_pairs import write_jsonl
from rank_jobs import refusal_at_start, run_worker
from rank_pool import RankPool
from tiny_runs import SIZES, make_run
from worker_runs import recipe

from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.dataset.manifest import read_data_manifest
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.tokenizers.export import export_tokenizer
from multihop.eval.model.load_model import load_model
from multihop.pretrain.checkpoint.huggingface_export import export_model
from multihop.pretrain.checkpoint.manifest import folder_of_step
from multihop.pretrain.checkpoint.verify import load_weights, verify
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.run.find_checkpoint import find_checkpoint

pytestmark = [pytest.mark.ranks]
Pool = Callable[[int], RankPool]
WORDS = 7


def prepared(texts: Path, tokenizer: Path, words: int, out: Path) -> Path:
    data = DataConfig(sources=[Source(path=str(texts))], heldout_fraction=0.1)
    prepare(data, TokenizerConfig(path=str(tokenizer), add_words=words, sample_mb=0.1 if words else 100.0), out)
    return out


@pytest.fixture(scope="module")
def extended(texts: Path, bert_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documents of `bert_data`, whose vocabulary of 100 tokens cuts most words, with some of them added."""
    return prepared(texts, bert_data / "tokenizer.model", WORDS, tmp_path_factory.mktemp("extended") / "set")


def begin(folder: Path, data: Path, parent: Path, stage: int = 1, **model: Any) -> Path:
    """Make a run of one step that changes no weight."""
    content = recipe(phases__0__steps=1, phases__0__lr=1e-12, engine__zero_stage=stage, engine__data_workers=0)
    content["model"] |= {**SIZES, "init_from": str(parent), **model}
    content["checkpoint"]["save_interval"] = 1
    (folder / "logs").mkdir(parents=True)
    (folder / "data").symlink_to(data)
    (folder / "recipe.json").write_text(json.dumps(content))
    return folder


def extended_by_hand(weights: dict[str, torch.Tensor], data: Path) -> dict[str, torch.Tensor]:
    info = read_data_manifest(data).tokenizer
    assert info.added is not None and len(info.added.parts) == WORDS
    found = dict(weights)
    for name in ("word.weight", "word_bias"):
        rows = [weights[name][parts].double().mean(0).float() for parts in info.added.parts]
        found[name] = torch.cat([weights[name], torch.stack(rows)])
    return found


def test_the_data_set_says_what_was_added(extended: Path, bert_data: Path) -> None:
    before, after = read_data_manifest(bert_data), read_data_manifest(extended)
    assert after.tokenizer.vocab_size == before.tokenizer.vocab_size + WORDS
    assert after.tokenizer.base_vocab_size == before.tokenizer.vocab_size
    assert after.tokenizer.added is not None and after.tokenizer.added.base_sha256 == before.tokenizer.sha256
    assert after.tokenizer.added.tokens_after < after.tokenizer.added.tokens_before
    assert after.totals["train"].tokens < before.totals["train"].tokens
    assert after.totals["train"].text_bytes == before.totals["train"].text_bytes


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (3, 1), (2, 3)])
def test_a_run_begins_with_the_means(
    pool: Pool, extended: Path, bert_data: Path, tmp_path: Path, ranks: int, stage: int
) -> None:
    parent = make_run(tmp_path / "parent", bert_data, "bert")
    child = begin(tmp_path / "child", extended, parent, stage)
    assert pool(ranks).run(run_worker, child) == [0] * ranks
    found = load_weights(folder_of_step(str(child / "checkpoints"), 1))
    expected = extended_by_hand(load_weights(folder_of_step(str(parent / "checkpoints"), 7)), extended)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-9)


def test_so_does_one_from_a_folder_of_theirs(pool: Pool, extended: Path, bert_data: Path, tmp_path: Path) -> None:
    parent = make_run(tmp_path / "parent", bert_data, "bert", steps=(7,))
    weights = load_weights(folder_of_step(str(parent / "checkpoints"), 7))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    found, info = find_checkpoint(str(parent)), read_data_manifest(bert_data).tokenizer
    export_model(found.location, found.model, info.vocab_size, info.special_ids, theirs)
    export_tokenizer(bert_data / info.file, info, True, 64, theirs)
    child = begin(tmp_path / "child", extended, theirs)
    assert pool(2).run(run_worker, child) == [0, 0]
    saved = load_weights(folder_of_step(str(child / "checkpoints"), 1))
    for name, weight in extended_by_hand(weights, extended).items():
        torch.testing.assert_close(saved[name], weight, rtol=0, atol=1e-9)


def test_the_parent_is_evaluated_with_the_means(extended: Path, bert_data: Path, tmp_path: Path) -> None:
    parent = make_run(tmp_path / "parent", bert_data, "bert", steps=(7,))
    location = folder_of_step(str(parent / "checkpoints"), 7)
    info = read_data_manifest(extended).tokenizer
    config = TrainingConfig.model_validate(json.loads((parent / "recipe.json").read_text())).model
    checkpoint = location, verify(location).content_hash()
    model = load_model(config, info.vocab_size, None, checkpoint, 7, 1, info)
    for name, weight in extended_by_hand(load_weights(location), extended).items():
        torch.testing.assert_close(model.get_parameter(name).detach(), weight, rtol=0, atol=0)


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 3)])
def test_completion_begins_with_a_causal_model_and_the_relations_with_means(
    pool: Pool, gpt2_data: Path, texts: Path, tmp_path: Path, ranks: int, stage: int
) -> None:
    words = [path.read_text().replace(".", "").split() for path in sorted(texts.glob("*.txt"))[:80]]
    triples = write_jsonl(
        tmp_path / "triples.jsonl", [(" ".join([*each[:4], "<is_a>"]), " ".join(each[4:7])) for each in words]
    )
    tokens = TokenizerConfig(path=str(gpt2_data / "tokenizer.model"), added_tokens=["<is_a>"])
    added = prepare(pairs_recipe(triples), tokens, tmp_path / "set").tokenizer.added
    parent = make_run(tmp_path / "parent", gpt2_data, "gpt2", steps=(7,))
    child = begin(tmp_path / "child", tmp_path / "set", parent, stage, family="gpt2")
    content = json.loads((child / "recipe.json").read_text())
    (child / "recipe.json").write_text(json.dumps({**content, "objective": {"name": "completion"}}))
    assert pool(ranks).run(run_worker, child) == [0] * ranks
    before = load_weights(folder_of_step(str(parent / "checkpoints"), 7))
    after = load_weights(folder_of_step(str(child / "checkpoints"), 1))
    assert added is not None and before.keys() == after.keys()
    mean = before["word.weight"][added.parts[0]].double().mean(0).float()
    expected = {**before, "word.weight": torch.cat([before["word.weight"], mean[None]])}
    for name, weight in expected.items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-9)


def test_other_vocabularies_are_refused(
    pool: Pool, extended: Path, bert_data: Path, gpt2_data: Path, texts: Path, tmp_path: Path
) -> None:
    parent = make_run(tmp_path / "parent", bert_data, "bert", steps=(7,))

    def refusal(data: Path, start: Path) -> str:
        shutil.rmtree(tmp_path / "child", ignore_errors=True)
        (said,) = pool(1).run(refusal_at_start, begin(tmp_path / "child", data, start))
        return str(said)

    twice = prepared(texts, extended / "tokenizer.model", 2, tmp_path / "twice")
    said = refusal(twice, parent)
    assert "of shape [100], this model has [109]" in said
    assert "tokenizer.path to its tokenizer, and tokenizer.add_words for words of your texts" in said
    child = make_run(tmp_path / "middle", extended, "bert", steps=(7,))
    assert refusal(twice, child) == ""
    other = tmp_path / "other"
    prepare(
        DataConfig(sources=[Source(path=str(texts))], heldout_fraction=0.1),
        TokenizerConfig(vocab_size=100, special_tokens="bert", kind="bpe"),
        other,
    )
    assert "was trained with a different tokenizer" in refusal(other, parent)
    added = prepared(texts, other / "tokenizer.model", 0, tmp_path / "same")
    assert "set tokenizer.path to the tokenizer of that run" in refusal(added, parent)
