"""The transformer and transformers' MarianMTModel give the same outputs with the same weights, in both directions."""

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece as spm
import torch
from huggingface import largest_error, roughen, save
from pairs import padded, pairs_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from multihop.common.errors import UserError
from multihop.data_prep.tokenizers.export_marian import export_marian_tokenizers
from multihop.data_prep.tokenizers.info import TokenizerInfo, pack_flags
from multihop.pretrain.checkpoint.huggingface_export import export_model
from multihop.pretrain.checkpoint.huggingface_import import import_model
from multihop.pretrain.engine.inputs import packed_to_device
from multihop.pretrain.models.build import build_model
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import parse_model_config
from multihop.pretrain.models.huggingface_weights import from_huggingface
from multihop.pretrain.packed_tokens import pack_sequences

os.environ["HF_HUB_OFFLINE"] = "1"

VOCABULARY, SOURCE_VOCABULARY = 211, 190
SPECIALS = {"pad": 0, "end": 1, "unk": 2}
BOUND = 1e-5
SOURCES, TARGETS = [30, 1, 33, 2, 33, 17], [3, 40, 31, 1, 2, 17]


def config_of(**changes: Any) -> ModelConfig:
    sizes = {"family": "transformer", "layers": 2, "hidden": 32, "heads": 4, "max_positions": 64, "dropout": 0.0}
    return parse_model_config({**sizes, **changes})


def theirs_of(config: ModelConfig, source_vocabulary: int | None = None) -> Any:
    """Return a model of transformers with random weights, configured by hand as its documentation says."""
    transformers = pytest.importorskip("transformers")
    made = transformers.MarianConfig(
        vocab_size=source_vocabulary or VOCABULARY, decoder_vocab_size=VOCABULARY, d_model=config.hidden,
        encoder_layers=config.layers, decoder_layers=config.layers, encoder_attention_heads=config.heads,
        decoder_attention_heads=config.heads, encoder_ffn_dim=config.intermediate, decoder_ffn_dim=config.intermediate,
        max_position_embeddings=config.max_positions, dropout=0.0, activation_function="relu", scale_embedding=True,
        share_encoder_decoder_embeddings=source_vocabulary is None, pad_token_id=0, eos_token_id=1,
        decoder_start_token_id=0, forced_eos_token_id=None,
    )  # fmt: skip
    model = transformers.MarianMTModel(made)
    fixed = {name: part.clone() for name, part in model.named_parameters() if "embed_positions" in name}
    roughen(model)
    with torch.no_grad():
        for name, part in fixed.items():
            model.get_parameter(name).copy_(part)
        model.final_logits_bias.copy_(torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(3)))
    return model.eval()


def answers(ours: Any, theirs: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the logits, the losses, and the worst gradient of the mean loss, as pairs of ours and theirs."""
    source_vocabulary = SOURCE_VOCABULARY if ours.source_word is not None else VOCABULARY
    pairs = pairs_of(SOURCES, TARGETS, min(VOCABULARY, source_vocabulary))
    pairs["label_smoothing"] = 0.0
    real, asked = (torch.arange(max(each)) < torch.tensor(each)[:, None] for each in (SOURCES, TARGETS))
    found = theirs(
        input_ids=padded(pairs["source"].input_ids, SOURCES),
        attention_mask=real.long(),
        decoder_input_ids=padded(pairs["target"].input_ids, TARGETS),
        labels=padded(pairs["labels"], TARGETS, -100),
    )
    logits = ours.lm_head(ours.decode_targets(pairs["source"], pairs["target"]))
    assert logits.std() > 0.1
    loss = ours(**pairs)["translation"] / sum(TARGETS)
    for model, each in ((ours, loss), (theirs, found.loss)):
        model.zero_grad()
        each.backward()
    there = {name: part.grad for name, part in theirs.named_parameters() if part.grad is not None}
    renamed = from_huggingface(ours.config, 0, there, ours.source_word is not None)
    mine = {name: part.grad for name, part in ours.named_parameters()}
    # Their bias of the logits is not trained, and no score depends on a key's bias.
    names = [name for name in mine if name != "word_bias" and not name.endswith("key.bias")]
    assert set(names) <= renamed.keys()
    worst = max(names, key=lambda name: largest_error(mine[name], renamed[name]))
    logits, loss = logits.detach(), loss.detach()
    return [(logits, found.logits[asked].detach()), (loss, found.loss.detach()), (mine[worst], renamed[worst])]


@pytest.mark.parametrize("source_vocabulary", [None, SOURCE_VOCABULARY])
@pytest.mark.parametrize("direction", ["export", "import"])
def test_the_answers_are_theirs(direction: str, source_vocabulary: int | None, tmp_path: Path) -> None:
    transformers, config, out = pytest.importorskip("transformers"), config_of(), tmp_path / "out"
    if direction == "export":
        ours = build_model(config, VOCABULARY, source_vocabulary)
        roughen(ours)
        checkpoint = save(ours, tmp_path / "checkpoints")
        export_model(checkpoint, config, VOCABULARY, SPECIALS, out, source_vocabulary)
        theirs, report = transformers.MarianMTModel.from_pretrained(out, output_loading_info=True)
        assert not any(report.values()), report
    else:
        theirs = theirs_of(config, source_vocabulary)
        theirs.save_pretrained(out)
        model, vocab_size, weights = import_model(out)
        assert (model, vocab_size) == (config, VOCABULARY)
        ours = build_model(model, vocab_size, source_vocabulary)
        ours.load_state_dict(weights)
    *values, gradients = answers(ours.eval(), theirs.eval())
    errors = [largest_error(one, other) for one, other in values]
    print(f"{direction}, {source_vocabulary or 'joint'}: {errors}, gradients {largest_error(*gradients):.1e}")
    assert max(errors) < BOUND
    assert largest_error(*gradients) < 10 * BOUND


@pytest.mark.parametrize("source_vocabulary", [None, SOURCE_VOCABULARY])
def test_what_is_exported_is_imported_again_bit_for_bit(source_vocabulary: int | None, tmp_path: Path) -> None:
    config = config_of(intermediate=48, dropout=0.3)
    model = build_model(config, VOCABULARY, source_vocabulary)
    roughen(model)
    export_model(save(model, tmp_path / "in", 3), config, VOCABULARY, SPECIALS, tmp_path / "out", source_vocabulary)
    again, vocab_size, weights = import_model(tmp_path / "out")
    assert (again, vocab_size) == (config, VOCABULARY)
    assert weights.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(weights[name], parameter) for name, parameter in model.named_parameters())
    names = {"config.json", "model.safetensors", "generation_config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names


def test_greedy_translations_are_theirs(tmp_path: Path) -> None:
    transformers, config = pytest.importorskip("transformers"), config_of()
    ours: Any = build_model(config, VOCABULARY)
    roughen(ours)
    export_model(save(ours, tmp_path / "checkpoints"), config, VOCABULARY, SPECIALS, tmp_path / "out")
    theirs = transformers.MarianMTModel.from_pretrained(tmp_path / "out").eval()
    pairs = pairs_of(SOURCES, [1] * len(SOURCES), VOCABULARY)
    real = torch.arange(max(SOURCES)) < torch.tensor(SOURCES)[:, None]
    ways = {"num_beams": 1, "do_sample": False, "max_length": 21}
    expected = theirs.generate(padded(pairs["source"].input_ids, SOURCES), attention_mask=real.long(), **ways)
    ours.eval()
    tokens, ids = torch.zeros(len(SOURCES), dtype=torch.int64), []
    done = torch.zeros(len(SOURCES), dtype=torch.bool)
    with torch.no_grad():
        state = ours.init_decoder_state(ours.encode_source(pairs["source"]), pairs["source"], beams=1)
        for _ in range(expected.shape[1] - 1):
            tokens = ours.lm_head(ours.decode_step(state, tokens)).argmax(1).masked_fill(done, 0)
            done |= tokens == 1
            ids.append(tokens)
    assert torch.equal(torch.stack(ids, 1), expected[:, 1:])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"norm": "pre"}, "MarianMTModel has norm=post, and this model has norm=pre; it cannot be exported"),
        ({"positions": "learned"}, "has positions=sinusoidal, and this model has positions=learned"),
        ({"family": "seq2seq", "heads": None, "intermediate": None}, "transformers has no class for family seq2seq"),
    ],
)
def test_what_has_no_counterpart_is_refused(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    config = config_of(**changes)
    model = build_model(config, VOCABULARY)
    roughen(model)
    with pytest.raises(UserError, match=complaint):
        export_model(save(model, tmp_path / "in"), config, VOCABULARY, SPECIALS, tmp_path / "out")
    with pytest.raises(UserError, match=r"needs the special tokens \['end', 'pad'\]"):
        export_model(str(tmp_path / "in"), config_of(), VOCABULARY, {"end": 0, "unk": 1}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"activation_function": "swish"}, "activation_function='swish', and family transformer needs 'relu'"),
        ({"scale_embedding": False}, "scale_embedding=False, and family transformer needs True"),
        ({"decoder_layers": 3}, "decoder_layers=3 and encoder_layers=2, and family transformer needs the same"),
        ({"decoder_vocab_size": 7}, "vocabularies of 211 and 7 tokens"),
        ({"encoder_layers": 9, "decoder_layers": 9}, "lacks model.encoder.layers.2"),
        ({"share_encoder_decoder_embeddings": False}, "has the tensor model.shared.weight"),
    ],
)
def test_other_equations_are_refused(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    theirs_of(config_of()).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, **changes}))
    with pytest.raises(UserError, match=complaint):
        import_model(tmp_path)


def test_stored_positions_must_be_sinusoids(tmp_path: Path) -> None:
    theirs = theirs_of(config_of())
    theirs.save_pretrained(tmp_path)
    _, _, expected = import_model(tmp_path)
    name = "model.encoder.embed_positions.weight"
    stored = {**load_file(tmp_path / "model.safetensors"), name: theirs.get_parameter(name).detach().clone()}
    save_file(stored, tmp_path / "model.safetensors")
    _, _, found = import_model(tmp_path)
    assert found.keys() == expected.keys()
    stored[name][3, 4] += 0.5
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"has {name} with other values than sinusoids"):
        import_model(tmp_path)


def test_a_bias_of_the_logits_may_be_missing(tmp_path: Path) -> None:
    theirs_of(config_of()).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored.pop("final_logits_bias", None)
    save_file(stored, tmp_path / "model.safetensors")
    _, _, weights = import_model(tmp_path)
    assert dict(build_model(config_of(), VOCABULARY).named_parameters()).keys() - weights.keys() == {"word_bias"}


def test_the_loss_with_smoothed_labels_is_theirs(tmp_path: Path) -> None:
    """The reference is the LabelSmoother of transformers."""
    transformers = pytest.importorskip("transformers")
    ours: Any = build_model(config_of(), VOCABULARY)
    roughen(ours)
    pairs = pairs_of(SOURCES, TARGETS, VOCABULARY)
    logits = ours.lm_head(ours.decode_targets(pairs["source"], pairs["target"]))
    smoother = transformers.trainer_pt_utils.LabelSmoother(epsilon=0.1)
    expected = smoother({"logits": logits}, pairs["labels"])
    found = ours.train()(**pairs)["translation"] / sum(TARGETS)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found, F.cross_entropy(logits, pairs["labels"], label_smoothing=0.1))


WORDS = ["a", "ship", "sails", "over", "the", "calm", "sea", "at", "night", "and", "nobody", "knows", "its", "captain"]
OTHERS = ["ein", "Schiff", "fährt", "über", "das", "ruhige", "Meer", "bei", "Nacht", "und", "keiner", "kennt", "ihn"]


def tokenizer_of(words: list[str], size: int, folder: Path, ids: tuple[int, int, int] = (0, 1, 2)) -> Any:
    """Return a SentencePiece model with T5's special tokens, and its description."""
    rng, out = np.random.default_rng(len(words)), io.BytesIO()
    lines = [" ".join(rng.choice(words, 6)) for _ in range(300)]
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, vocab_size=size, hard_vocab_limit=False, bos_id=-1,
        pad_id=ids[0], eos_id=ids[1], unk_id=ids[2], minloglevel=2,
    )  # fmt: skip
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(out.getvalue())
    vocab_size = spm.SentencePieceProcessor(model_proto=out.getvalue()).get_piece_size()
    info = TokenizerInfo(
        kind="unigram", vocab_size=vocab_size, sha256=hashlib.sha256(out.getvalue()).hexdigest(),
        special_ids=dict(zip(("pad", "end", "unk"), ids, strict=True)), 
        word_start=pack_flags(np.zeros(vocab_size, bool)),
    )  # fmt: skip
    return folder / "tokenizer.model", info


@pytest.mark.parametrize("joint", [True, False])
def test_the_auto_classes_open_an_export(joint: bool, tmp_path: Path) -> None:
    transformers, out = pytest.importorskip("transformers"), tmp_path / "out"
    source = tokenizer_of(WORDS + OTHERS if joint else WORDS, 60, tmp_path / "source")
    target = None if joint else tokenizer_of(OTHERS, 50, tmp_path / "target")
    sizes = [source[1].vocab_size, (target or source)[1].vocab_size]
    model: Any = build_model(config_of(), sizes[1], None if joint else sizes[0])
    roughen(model)
    export_model(save(model, tmp_path / "in"), config_of(), sizes[1], SPECIALS, out, None if joint else sizes[0])
    export_marian_tokenizers(source, target, 64, out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    texts = ["a ship sails over the  sea", "nobody knows its Kapitän", "", "at night"]
    processors = [spm.SentencePieceProcessor(model_file=str(each[0])) for each in (source, target or source)]
    wanted = [[*ids, 1] for ids in processors[0].encode(texts)]
    assert tokenizer(texts)["input_ids"] == wanted
    assert tokenizer(text_target=OTHERS)["input_ids"] == [[*ids, 1] for ids in processors[1].encode(OTHERS)]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(out).generate(**batch, max_length=12)
    translations = tokenizer.batch_decode(theirs, skip_special_tokens=True)
    model.eval()
    for translation, ids in zip(translations, wanted, strict=True):
        packed = packed_to_device(pack_sequences([ids]), torch.device("cpu"))
        tokens, generated = torch.tensor([0]), list[int]()
        with torch.no_grad():
            state = model.init_decoder_state(model.encode_source(packed), packed, 1)
            while len(generated) < 11 and 1 not in generated:
                tokens = model.lm_head(model.decode_step(state, tokens)).argmax(1)
                generated.append(int(tokens))
        assert translation == tokenizer.decode(generated, skip_special_tokens=True)


def test_tokenizers_that_marian_cannot_have_are_refused(tmp_path: Path) -> None:
    source, target = tokenizer_of(WORDS, 60, tmp_path / "source"), tokenizer_of(OTHERS, 50, tmp_path / "a", (2, 1, 0))
    with pytest.raises(UserError, match="special tokens under other ids"):
        export_marian_tokenizers(source, target, 64, tmp_path)
    with pytest.raises(UserError, match=r"lacks the special tokens \['pad'\]"):
        info = source[1].model_copy(update={"special_ids": {"end": 1, "unk": 2}})
        export_marian_tokenizers((source[0], info), None, 64, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="MarianTokenizer reads SentencePiece models"):
        export_marian_tokenizers((tmp_path / "tokenizer.json", source[1]), None, 64, tmp_path)
