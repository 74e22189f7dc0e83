"""Reading, writing and refusing folders of transformers: names, files, precisions, damage."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface import (
    VOCABULARY,
    config_of,
    rough_model,
    save,
    specials_of,
    theirs_of,
)
from kinds_of_families import AT_HUGGING_FACE
from rank_jobs import refusal_at_start, weights_at_start
from rank_pool import RankPool
from safetensors.torch import load_file, save_file
from worker_runs import recipe

from multihop.common.errors import UserError
from multihop.data_prep.dataset.manifest import read_data_manifest, read_token_counts
from multihop.pretrain.checkpoint.huggingface_export import export_model
from multihop.pretrain.checkpoint.huggingface_import import content_hash, import_model
from multihop.pretrain.models.build import build_model, build_model_on_meta, init_weights
from multihop.pretrain.models.families import parse_model_config
from multihop.pretrain.models.huggingface_weights import from_huggingface, to_huggingface
from multihop.pretrain.run.heldout import unigram_log_probabilities

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.mark.parametrize("family", AT_HUGGING_FACE)
def test_what_is_exported_is_imported_again_bit_for_bit(family: str, tmp_path: Path) -> None:
    config = config_of(family, 2, 32, 4, 64)
    model = rough_model(config)
    export_model(save(model, tmp_path / "checkpoints", 3), config, VOCABULARY, specials_of(family), tmp_path / "out")
    again, vocab_size, weights = import_model(tmp_path / "out")
    assert (again, vocab_size) == (config, VOCABULARY)
    assert weights.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter), name
    files = {"config.json", "model.safetensors"} | (
        {"generation_config.json"} if AT_HUGGING_FACE[family].causal else set()
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == files


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_become_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = theirs_of(config_of("gpt2", 1, 16, 2, 8)).to(dtype)
    theirs.save_pretrained(tmp_path)
    _, _, weights = import_model(tmp_path)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert torch.equal(weights["word.weight"], theirs.transformer.wte.weight.float())


def test_several_files_are_one_model(tmp_path: Path) -> None:
    theirs = theirs_of(config_of("bert", 2, 32, 4, 64))
    theirs.save_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    _, _, one = import_model(tmp_path / "one")
    _, _, many = import_model(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    first = sorted((tmp_path / "many").glob("*.safetensors"))[0]
    first.unlink()
    with pytest.raises(UserError, match=f"{first.name} is missing"):
        import_model(tmp_path / "many")


def test_names_of_old_files_and_buffers_are_known(tmp_path: Path) -> None:
    theirs = theirs_of(config_of("bert", 2, 32, 4, 64))
    theirs.save_pretrained(tmp_path)
    _, _, expected = import_model(tmp_path)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(64)[None]
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].clone()
    old["cls.predictions.decoder.bias"] = old.pop("cls.predictions.bias")
    save_file(old, tmp_path / "model.safetensors")
    _, _, found = import_model(tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_an_activation_of_two_names_is_one(tmp_path: Path) -> None:
    theirs_of(config_of("gpt2", 1, 16, 2, 8)).save_pretrained(tmp_path)
    _, _, expected = import_model(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "activation_function": "gelu_pytorch_tanh"}))
    _, _, found = import_model(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_warning_names_dropout_rates_that_differ(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs_of(config_of("gpt2", 1, 16, 2, 8)).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    for attention, warnings in ((0.1, 0), (0.0, 1)):
        (tmp_path / "config.json").write_text(json.dumps({**content, **rates, "attn_pdrop": attention}))
        config, _, _ = import_model(tmp_path)
        assert config.dropout == 0.1
        assert len(caplog.records) == warnings
    assert "attn_pdrop=0.0; model.dropout=0.1 stands for all" in caplog.text


def test_eight_billion_parameters_have_their_names_without_memory() -> None:
    config = parse_model_config({"preset": "gpt2-8.3b"})
    outline = build_model_on_meta(config, 50257).state_dict()
    there = dict(to_huggingface(config, 0, outline))
    assert there["transformer.h.71.attn.c_attn.weight"].shape == (3072, 9216)
    again = from_huggingface(config, 0, there)
    assert {n: t.shape for n, t in again.items()} == {
        n: t.shape for n, t in build_model_on_meta(config, 50257).named_parameters()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives a folder of transformers for a family."""
    folders: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            theirs_of(config_of(family, 2, 32, 4, 64)).save_pretrained(folders[family])
        return folders[family]

    return of


@pytest.mark.parametrize(
    ("family", "changes", "complaint"),
    [
        (
            "bert",
            {"model_type": "electra"},
            "model_type='electra'; known are albert, bert, ",
        ),
        ("bert", {"model_type": None}, "model_type=None"),
        ("bert", {"hidden_act": "relu"}, "hidden_act='relu', and family bert needs 'gelu'"),
        ("albert", {"hidden_act": "gelu"}, "hidden_act='gelu', and family albert needs 'gelu_new'"),
        ("gpt", {"afn": "silu"}, "afn='silu'"),
        ("gpt2", {"activation_function": "gelu"}, "activation_function='gelu', and family gpt2 needs 'gelu_new'"),
        ("bert", {"layer_norm_eps": 1e-5}, "layer_norm_eps=1e-05, and family bert needs 1e-12"),
        ("roberta", {"layer_norm_eps": 1e-12}, "layer_norm_eps=1e-12, and family roberta needs 1e-05"),
        ("gpt2", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06"),
        ("bert", {"is_decoder": True}, "is_decoder=True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ("albert", {"num_hidden_groups": 2}, "num_hidden_groups=2"),
        ("albert", {"inner_group_num": 3}, "inner_group_num=3"),
        ("bert", {"type_vocab_size": 1}, "type_vocab_size=1, and family bert needs 2"),
        ("roberta", {"type_vocab_size": 2}, "type_vocab_size=2, and family roberta needs 1"),
        ("bert", {"num_attention_heads": 3}, "hidden=32 is not a multiple of heads=3"),
        ("bert", {"hidden_size": "wide"}, "hidden_size='wide'; it must be an integer from 1 to"),
        ("gpt2", {"n_layer": True}, "n_layer=True; it must be an integer from 1 to"),
        (
            "bert",
            {"vocab_size": 210},
            r"of shape \[211, 32\], and by config.json it is \[210, 32\]",
        ),
        ("gpt2", {"n_inner": 64}, r"of shape \[128\], and by config.json it is \[64\]"),
        ("bert", {"num_hidden_layers": 3}, "lacks bert.encoder.layer.2.attention.self.query.weight"),
        ("bert", {"num_hidden_layers": 1}, "bert.encoder.layer.1.* does not have"),
        ("roberta", {"pad_token_id": None}, "pad_token_id=None"),
        ("bert", {"hidden_dropout_prob": 2.0}, r"hidden_dropout_prob=2\.0: input should be less than 1; choose"),
        ("bert", {"hidden_dropout_prob": float("nan")}, "hidden_dropout_prob=nan: input should be a finite number"),
        ("bert", {"hidden_dropout_prob": "high"}, "hidden_dropout_prob='high': input should be a valid number"),
        ("bert", {"num_hidden_layers": 10_000}, "lacks bert.encoder.layer.2.*config.json has 10000 layers"),
        ("gpt2", {"n_layer": 9_999}, "lacks transformer.h.2.ln_1.weight, and config.json has 9999 layers"),
        ("albert", {"num_hidden_layers": 10**6}, "num_hidden_layers=1000000; it must be an integer from 1 to"),
        ("bert", {"num_hidden_layers": 10**30}, "it has an integer of more than 64 bits"),
        ("bert", {"vocab_size": 2**31}, "vocab_size=2147483648, which makes one matrix of 68,719,476,736 elements"),
        (
            "bert",
            {"max_position_embeddings": 2**62},
            "max_position_embeddings=4611686018427387904; it must be an integer from 1 to",
        ),
        ("bert", {"max_position_embeddings": 2**31}, "max_position_embeddings=2147483648, which makes one matrix of"),
        ("gpt2", {"n_embd": 2**30, "n_head": 2**30}, "vocab_size=211, which makes one matrix of"),
        ("bert", {"intermediate_size": 2**31}, "intermediate_size=2147483648, which makes one matrix of"),
        ("bert", {"type_vocab_size": [2]}, r"type_vocab_size=\[2\]"),
        ("bert", {"model_type": ["bert"] * 1000}, "model_type=.*known are"),
        ("roberta", {"pad_token_id": True}, "pad_token_id=True"),
        ("modernbert", {"norm_bias": True}, "norm_bias=True, and family modernbert needs False"),
        ("modernbert", {"hidden_activation": "silu"}, "hidden_activation='silu'"),
        (
            "modernbert",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type='yarn', and multihop supports only unscaled",
        ),
        ("modernbert", {"rope_scaling": {"type": "linear"}}, "rope_type='linear'"),
        (
            "modernbert-decoder",
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "rope_theta": 1e4}}},
            "rope_type='dynamic'",
        ),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
            r"partial_rotary_factor=0\.5, and multihop supports only .* over the whole head",
        ),
        (
            "modernbert",
            {"rope_parameters": {"sliding_attention": {"rope_theta": -1.0}}},
            r"local_rope_theta=-1\.0: input should be greater than or equal to 1; choose another model",
        ),
        (
            "modernbert",
            {"rope_parameters": {"rope_theta": 500.0, "rope_type": "yarn", "factor": 4.0}},
            r"has rope_parameters=\{.*\}, and family modernbert has them for full_attention and sliding_attention",
        ),
        ("modernbert-decoder", {"sliding_window": -1}, "sliding_window=-1; it must be an integer from 1 to"),
        ("modernbert", {"rope_parameters": [1]}, r"has rope_parameters=\[1\], which is not an object"),
        ("modernbert", {"rope_scaling": [1]}, r"has rope_scaling=\[1\], which is not an object"),
        ("modernbert", {"layer_types": ["sliding_attention", "full_attention"]}, "needs a global first layer and"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types=.* and multihop needs"),
        ("modernbert", {"layer_types": 3}, "layer_types=3, which is not a list"),
        ("modernbert", {"local_attention": 1}, "local_attention=1: input should be greater than or equal to 2"),
        ("modernbert-decoder", {"local_attention": None}, "local_attention=None; it must be an integer from 1 to"),
        ("modernbert", {"num_attention_heads": 32}, "rotary positions need an even width; choose another model$"),
        ("modernbert-decoder", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
    ],
)
def test_models_that_differ_are_refused(
    family: str, changes: dict[str, Any], complaint: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved(family), tmp_path / "model")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))
    with pytest.raises(UserError, match=complaint) as refused:
        import_model(folder)
    assert type(refused.value) is UserError
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"local_attention": 9}, {"local_attention": 8}),
        ({"local_attention": 9, "sliding_window": 3}, {"local_attention": 6}),
        ({"rope_parameters": None, "global_rope_theta": 5e4, "local_rope_theta": None}, {"local_rope_theta": 5e4}),
        ({"rope_parameters": None, "local_rope_theta": 2e4}, {"local_rope_theta": 2e4}),
    ],
)
def test_a_configuration_means_what_it_means_to_transformers_4(
    changes: dict[str, Any], expected: dict[str, Any], saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """Half of a window is rounded down, and without a base of their own local layers have that of the global ones."""
    folder = shutil.copytree(saved("modernbert"), tmp_path / "model")
    content = json.loads((folder / "config.json").read_text())
    before = import_model(folder)[0].model_dump()
    (folder / "config.json").write_text(json.dumps({**content, **changes}))
    after = import_model(folder)[0].model_dump()
    assert {key: after[key] for key in expected} == expected
    assert {key for key in after if after[key] != before[key]} <= {*expected, "global_rope_theta"}


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda f: (f / "config.json").write_text("{"), "config.json is not a JSON object"),
        (lambda f: (f / "config.json").write_text("[1]"), "it holds a list"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{"), "config.json is not a JSON object"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text('{"a":' * 980 + "1" + "}" * 980), "more than 64 deep"),
        (lambda f: replaced(f / "config.json", os.mkfifo), "config.json .*not a regular file"),
        (lambda f: replaced(f / "model.safetensors", os.mkfifo), "not a complete safetensors file .not a regular file"),
        (lambda f: replaced(f / "model.safetensors", endless), "not a complete safetensors file .not a regular file"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\0" * 7 + b"\1"), "its header has"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors; copy"),
        (lambda f: os.truncate(f / "model.safetensors", 5000), "is not a complete safetensors file"),
        (
            lambda f: os.truncate(f / "model.safetensors", (f / "model.safetensors").stat().st_size - 1),
            "is not a complete",
        ),
        (lambda f: os.truncate(f / "model.safetensors", 0), "is not a complete safetensors file"),
        (lambda f: (f / "model.safetensors").write_bytes(b"text" * 100), "is not a complete safetensors file"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "is a pickle, which could execute code"),
        (
            lambda f: rewrite(f, {"classifier.weight": torch.zeros(2, 32)}),
            "classifier.weight, which BertForPreTraining .* does not have",
        ),
        (lambda f: rewrite(f, {"cls.predictions.decoder.weight": torch.zeros(VOCABULARY, 32)}), "one tensor for both"),
        (lambda f: rewrite(f, {}, without="cls.predictions.bias"), "lacks cls.predictions.bias, 1 of the 46 tensors"),
        (lambda f: rewrite(f, {}, without="bert.embeddings.LayerNorm.bias"), "lacks bert.embeddings.LayerNorm.bias"),
        (lambda f: rewrite(f, {"embeddings.LayerNorm.bias": torch.zeros(32)}), "LayerNorm.bias of .* again"),
        (lambda f: rewrite(f, {"bert.pooler.dense.bias": torch.zeros(32, dtype=torch.int8)}), "in I8; supported are"),
        (
            lambda f: rewrite(f, {"bert.pooler.dense.bias": torch.full((32,), torch.nan)}),
            r"NaN or infinity in bert\.pooler\.dense\.bias",
        ),
        (
            lambda f: rewrite(f, {"bert.pooler.dense.bias": torch.full((32,), 1e5).half()}),
            r"NaN or infinity in bert\.pooler\.dense\.bias",
        ),
    ],
)
def test_damaged_folders_are_refused(
    damage: Callable[[Path], object], complaint: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved("bert"), tmp_path / "model")
    damage(folder)
    with pytest.raises(UserError, match=complaint) as refused:
        import_model(folder)
    assert "\n" not in str(refused.value)


def replaced(path: Path, by: Callable[[Path], object]) -> None:
    path.unlink()
    by(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def rewrite(folder: Path, more: dict[str, torch.Tensor], without: str = "") -> None:
    tensors = {**load_file(folder / "model.safetensors"), **more}
    tensors.pop(without, None)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("index", ['{"weight_map": {"a": "../b.safetensors"}}', '{"weight_map": 3}', "{}"])
def test_an_index_names_files_of_its_folder(index: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(saved("bert"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match="does not map tensors to files of its directory"):
        import_model(folder)


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    config = config_of("gpt", 1, 16, 2, 8, intermediate=32)
    checkpoint = save(rough_model(config), tmp_path / "checkpoints")
    with pytest.raises(UserError, match=r"4 \* hidden = 64, .* intermediate=32"):
        export_model(checkpoint, config, VOCABULARY, specials_of("gpt"), tmp_path / "out")
    config = config_of("gpt2", 1, 16, 2, 8, intermediate=32)
    with pytest.raises(UserError, match=r"\['end'\] are not among"):
        export_model(checkpoint, config, VOCABULARY, {"pad": 0}, tmp_path / "out")
    with pytest.raises(UserError, match=r"has final_norm.weight of shape None, .* a gpt2 has it of shape \[16\]"):
        export_model(checkpoint, config, VOCABULARY, specials_of("gpt2"), tmp_path / "out")
    with pytest.raises(UserError, match=r"has word.weight of shape \[211, 16\], .* \[212, 16\]"):
        export_model(checkpoint, config, VOCABULARY + 1, specials_of("gpt2"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.ranks
def test_a_run_begins_with_a_folder_of_theirs(bert_data: Path, tmp_path: Path, pool: Callable[[int], RankPool]) -> None:
    config = config_of("bert", 2, 32, 2, 64)
    vocab_size = read_data_manifest(bert_data).tokenizer.vocab_size

    def begin(
        size: int, job: Callable[..., Any] = weights_at_start, name: str = "BertForMaskedLM", **model: Any
    ) -> Any:
        source, run_dir = tmp_path / f"model-{size}", tmp_path / "run"
        shutil.rmtree(source, ignore_errors=True)
        theirs_of(config, name=name, vocab_size=size).save_pretrained(source)
        run_dir.mkdir(exist_ok=True)
        if not (run_dir / "data").exists():
            (run_dir / "data").symlink_to(bert_data)
        sizes = {"family": "bert", "layers": 2, "hidden": 32, "heads": 2, "max_positions": 64}
        content = recipe(model={**sizes, "init_from": str(source), **model})
        (run_dir / "recipe.json").write_text(json.dumps(content))
        (result,) = pool(1).run(job, run_dir)
        return result

    found, parent = begin(vocab_size)
    assert parent == content_hash(tmp_path / f"model-{vocab_size}")
    _, _, expected = import_model(tmp_path / f"model-{vocab_size}")
    fresh = build_model(config, vocab_size)
    init_weights(fresh, 5)
    lacking = set()
    for name, parameter in fresh.named_parameters():
        if name not in expected:
            lacking.add(name.split(".")[0])
        assert (torch.from_numpy(found[name]) == expected.get(name, parameter.detach()).flatten()).all(), name
    assert lacking == {"pooler", "next_sentence"}
    assert f"vocab_size={vocab_size + 1}, and this run vocab_size={vocab_size};" in begin(
        vocab_size + 1, refusal_at_start
    )
    padded = (vocab_size // 8 + 1) * 8  # rows without a token, which make products faster
    found, _ = begin(padded)
    _, _, expected = import_model(tmp_path / f"model-{padded}")
    assert (torch.from_numpy(found["word.weight"]) == expected["word.weight"][:vocab_size].flatten()).all()
    assert (torch.from_numpy(found["word_bias"]) == expected["word_bias"][:vocab_size]).all()
    assert "layers=2, max_positions=64, and this run layers=3, max_positions=80;" in begin(
        vocab_size, refusal_at_start, layers=3, max_positions=80
    )
    for key, value, default in (("output_bias", "unigram", "zeros"), ("word_init", "cooccurrences", "random")):
        said = begin(vocab_size, refusal_at_start, **{key: value})
        assert f"model.{key}={value} initializes new weights" in said
        assert f"set model.{key}={default}, or remove init_from" in said
    found, _ = begin(vocab_size, name="BertModel", output_bias="unigram")  # without the head that has the bias
    data = read_data_manifest(bert_data)
    assert found["word_bias"] == pytest.approx(unigram_log_probabilities(read_token_counts(bert_data, data)))


@pytest.mark.ranks
def test_a_model_with_rotary_positions_may_be_continued_with_more_of_them(
    bert_data: Path, tmp_path: Path, pool: Callable[[int], RankPool]
) -> None:
    sizes = {"family": "modernbert", "layers": 4, "hidden": 32, "heads": 2, "max_positions": 64, "local_attention": 16}
    vocab_size = read_data_manifest(bert_data).tokenizer.vocab_size
    source, run_dir = tmp_path / "model", tmp_path / "run"
    theirs_of(parse_model_config(sizes), vocab_size=vocab_size).save_pretrained(source)
    run_dir.mkdir()
    (run_dir / "data").symlink_to(bert_data)
    content = recipe(model={**sizes, "max_positions": 256, "init_from": str(source)}, objective={"name": "mlm"})
    (run_dir / "recipe.json").write_text(json.dumps(content))
    ((found, _),) = pool(1).run(weights_at_start, run_dir)
    for name, weight in import_model(source)[2].items():
        assert (torch.from_numpy(found[name]) == weight.flatten()).all(), name
