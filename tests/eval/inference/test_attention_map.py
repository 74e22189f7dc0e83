"""The attention map of a translation has the weights that the model itself applies, token by token."""

from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from huggingface import save
from made_up_pairs import pair
from packed_texts import packed
from pairs import SIZES, VARIANTS

from multihop.common.errors import UserError
from multihop.data_prep.dataset.manifest import read_data_manifest
from multihop.data_prep.tokenizers.tokenizer import load
from multihop.eval.inference.attention_map import attention_map, cross_attention_module
from multihop.eval.inference.trained_model import TrainedModel
from multihop.eval.inference.translate import Translation, translate
from multihop.eval.report.attention_picture import draw_map
from multihop.eval.report.plot_style import as_png
from multihop.pretrain.checkpoint.huggingface_export import export_model
from multihop.pretrain.models.build import build_model
from multihop.pretrain.models.families import parse_model_config
from multihop.pretrain.models.layers.encoder_decoder import EncoderDecoder

ATTENDING = [variant for variant in VARIANTS if variant.get("attention") != "none"]
NAMES = ["-".join(map(str, variant.values())) for variant in ATTENDING]


def trained(data: Path, variant: dict[str, Any]) -> TrainedModel:
    """Return a model with weights under which attention is not uniform."""
    info = read_data_manifest(data).tokenizer
    config = parse_model_config({**SIZES, "max_positions": 128, **variant})
    model = build_model(config, info.vocab_size)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4 + name.endswith("norm.weight"))
    return TrainedModel("the model", model.eval(), load(data / info.file), info.special_ids)


def found_of(model: TrainedModel) -> Translation:
    """Return a sentence with a translation that another model might have found."""
    source, target = pair(3)
    ids = [model.tokenizer.encode([side])[0].tolist() for side in (source, target)]
    return Translation(target, 0.0, False, *([*each, model.special_ids["end"]] for each in ids))


@pytest.mark.parametrize("variant", ATTENDING, ids=NAMES)
def test_each_token_has_the_weights_of_the_context_that_it_was_predicted_from(
    variant: dict[str, Any], pairs_data: Path
) -> None:
    model = trained(pairs_data, variant)
    result = found_of(model)
    weights = attention_map(model, result)
    assert weights.shape == (len(result.tokens), len(result.source))
    torch.testing.assert_close(weights.sum(1), torch.ones(len(weights)))
    assert weights.max() > 1.05 / len(result.source), "they are not even"

    contexts: list[torch.Tensor] = []
    hook = cross_attention_module(model).register_forward_hook(
        lambda module, given, out: contexts.append(out.reshape(-1, 16))
    )
    other = attention_map(model, Translation(result.text, 0.0, False, result.source, result.tokens[:-2]))
    hook.remove()
    torch.testing.assert_close(other, weights[:-2])  # later tokens have no say
    if variant["family"] == "seq2seq":
        assert isinstance(model.model, EncoderDecoder)
        ids = torch.tensor(result.source)
        with torch.inference_mode():
            source = model.model.encode_source(packed(ids, [len(ids)]))[:, :16]
            torch.testing.assert_close(torch.cat(contexts), other @ source)


def test_those_of_a_transformer_are_the_ones_that_transformers_returns(pairs_data: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = trained(pairs_data, {"family": "transformer", "heads": 4})
    result, config = found_of(model), model.model.config
    out = tmp_path / "hf"
    out.mkdir()
    export_model(save(model.model, tmp_path / "ours"), config, model.model.word.num_embeddings, model.special_ids, out)
    theirs = transformers.MarianMTModel.from_pretrained(out, attn_implementation="eager").eval()
    begun = torch.tensor([[model.special_ids["pad"], *result.tokens[:-1]]])
    with torch.no_grad():
        reference = theirs(torch.tensor([result.source]), decoder_input_ids=begun, output_attentions=True)
    torch.testing.assert_close(
        attention_map(model, result), reference.cross_attentions[-1][0].mean(0), atol=1e-5, rtol=0
    )


def test_a_picture_has_a_row_for_each_token(pairs_data: Path, tmp_path: Path) -> None:
    model = trained(pairs_data, {"family": "seq2seq", "attention": "general"})
    result, blank = translate(model, [pair(3)[0], " "])
    assert result.source == found_of(model).source and result.tokens and not blank.tokens
    sizes = []
    for length in (4, 12):
        made = Translation("", 0.0, False, result.source, [5] * length)
        (tmp_path / "map.png").write_bytes(as_png(draw_map(model, made)))
        sizes.append(matplotlib.image.imread(tmp_path / "map.png").shape)
    assert sizes[0][0] < sizes[1][0] and sizes[0][1] == sizes[1][1]


def test_a_model_without_attention_is_refused(pairs_data: Path) -> None:
    model = trained(pairs_data, {"family": "seq2seq", "attention": "none"})
    with pytest.raises(UserError, match="the model is a seq2seq with attention=none: its decoder attends to nothing"):
        attention_map(model, found_of(model))
