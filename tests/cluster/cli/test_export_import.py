"""`multihop checkpoints export` and `import`: transformers computes the same, and an import gives equal weights."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_texts import packed
from safetensors.torch import load_file
from tiny_runs import CAUSAL, IN_MASKED_PIPELINE, MASKED, SIZES, make_run
from typer.testing import CliRunner, Result

from multihop.cluster.cli.main import app
from multihop.pretrain.checkpoint.manifest import folder_of_step
from multihop.pretrain.checkpoint.verify import load_weights
from multihop.pretrain.models.build import build_model
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import FAMILIES, parse_model_config

pytest.importorskip("transformers")
os.environ["HF_HUB_OFFLINE"] = "1"


def checkpoints(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["checkpoints", *map(str, arguments)], catch_exceptions=True)


def refusal(*arguments: str | Path) -> str:
    """Return the sentence that main() prints before it ends with code 2."""
    result = checkpoints(*arguments)
    assert isinstance(result.exception, ValueError), result.exception
    return str(result.exception)


@pytest.fixture
def run(tmp_path: Path, bert_data: Path) -> Path:
    return make_run(tmp_path / "run", bert_data, "bert")


def our_logits(checkpoint: str, config: ModelConfig, ids: list[int], token_type_ids: list[int]) -> torch.Tensor:
    weights = load_weights(checkpoint)
    model: Any = build_model(config, len(weights["word.weight"]))
    model.load_state_dict(weights)
    model.eval()
    types = torch.tensor(token_type_ids) if FAMILIES[config.family].has_token_types else None
    with torch.no_grad():
        return model.lm_head(model.encode(packed(torch.tensor(ids), [len(ids)], types)))


@pytest.mark.parametrize("family", [*MASKED, *CAUSAL])
def test_what_was_exported_opens_answers_and_comes_back(
    family: str, tmp_path: Path, bert_data: Path, gpt2_data: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, pipeline

    data = bert_data if family in MASKED else gpt2_data
    run, out = make_run(tmp_path / "run", data, family), tmp_path / "out"
    result = checkpoints("export", run, "--to", "hf", "--out", out)
    assert result.exit_code == 0, result.exception
    assert "step-00000007" in result.stdout and "AutoTokenizer.from_pretrained" in result.stdout

    tokenizer = AutoTokenizer.from_pretrained(out)
    auto_class = AutoModelForMaskedLM if family in IN_MASKED_PIPELINE else AutoModelForCausalLM
    model = auto_class.from_pretrained(out).eval()
    given = tokenizer("River stone.", "The window of light") if family in MASKED else tokenizer("River stone. The wind")
    with torch.no_grad():
        theirs = model(**{key: torch.tensor([value]) for key, value in given.items()}).logits[0]
    checkpoint = folder_of_step(str(run / "checkpoints"), 7)
    config = parse_model_config({"family": family, **SIZES, **({"embedding": 16} if family == "albert" else {})})
    ours = our_logits(checkpoint, config, given["input_ids"], given.get("token_type_ids", []))
    assert ((ours - theirs).abs().max() / theirs.abs().max()).item() < 1e-5

    if family in IN_MASKED_PIPELINE:
        answers = pipeline("fill-mask", model=str(out))("The river [MASK] stone.")
        assert len(answers) == 5 and all(answer["score"] > 0 for answer in answers)
    elif family in CAUSAL:
        ids = tokenizer("The river", return_tensors="pt")["input_ids"]
        made = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
        assert made.shape == (1, ids.shape[1] + 5) and made[0, : ids.shape[1]].tolist() == ids[0].tolist()

    result = checkpoints("import", out, "--out", tmp_path / "second" / "checkpoints")
    assert result.exit_code == 0, result.exception
    assert f"family: {family}" in result.stdout and "at random" not in result.stdout
    back = load_weights(folder_of_step(str(tmp_path / "second" / "checkpoints"), 0))
    assert back.keys() == load_weights(checkpoint).keys()
    assert all(torch.equal(tensor, back[name]) for name, tensor in load_weights(checkpoint).items())
    (tmp_path / "second" / "data").symlink_to(data)
    assert checkpoints("export", tmp_path / "second" / "checkpoints", "--out", tmp_path / "again").exit_code == 0
    for path in out.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_which_checkpoint_is_exported(run: Path, tmp_path: Path) -> None:
    word = {step: load_weights(folder_of_step(str(run / "checkpoints"), step))["word.weight"] for step in (3, 7)}
    locations = {
        "step": (run, "--step", "3"),
        "folder": (run / "checkpoints" / "step-00000003",),
        "newest": (run / "checkpoints",),
    }
    for name, arguments in locations.items():
        assert checkpoints("export", *arguments, "--out", tmp_path / name).exit_code == 0
    (damaged,) = (run / "checkpoints" / "step-00000007").glob("*.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x55")
    shown = checkpoints("export", run, "--out", tmp_path / "good")
    assert shown.exit_code == 0 and "skipped: " in shown.stdout and "is damaged" in shown.stdout
    for name, step in (("step", 3), ("folder", 3), ("newest", 7), ("good", 3)):
        tensors = load_file(tmp_path / name / "model.safetensors")
        assert torch.equal(tensors["bert.embeddings.word_embeddings.weight"], word[step])
    assert "is damaged" in refusal("export", run, "--step", "7", "--out", tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_an_encoder_without_heads_gets_fresh_ones(run: Path, tmp_path: Path) -> None:
    from transformers import AutoModel

    assert checkpoints("export", run, "--out", tmp_path / "out").exit_code == 0
    AutoModel.from_pretrained(tmp_path / "out", add_pooling_layer=False).save_pretrained(tmp_path / "bare")
    result = checkpoints("import", tmp_path / "bare", "--out", tmp_path / "ours")
    assert result.exit_code == 0, result.exception
    (line,) = [line for line in result.stdout.splitlines() if "at random" in line]
    assert "next_sentence.weight" in line and "pooler.weight" in line and "layers.0" not in line
    weights = load_weights(folder_of_step(str(tmp_path / "ours"), 0))
    known = load_weights(folder_of_step(str(run / "checkpoints"), 7))
    assert weights.keys() == known.keys() and torch.equal(weights["word.weight"], known["word.weight"])
    assert weights["pooler.weight"].std() > 0 and not torch.equal(weights["pooler.weight"], known["pooler.weight"])


def test_mistakes_are_reported_in_a_sentence(run: Path, tmp_path: Path, bert_data: Path, gpt2_data: Path) -> None:
    out = tmp_path / "out"
    assert "and no directory of that name" in refusal("export", tmp_path / "nothing", "--out", out)
    assert "never committed" in refusal("export", run, "--step", "5", "--out", out)
    assert "omit --step" in refusal("export", run / "checkpoints" / "step-00000003", "--step", "3", "--out", out)
    assert checkpoints("export", run, "--to", "onnx", "--out", out).exit_code == 2
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    for command in (("export", run), ("import", tmp_path / "full")):
        assert "absent or empty" in refusal(*command, "--out", tmp_path / "full")
    (run / "data").unlink()
    assert "which has the tokenizer" in refusal("export", run, "--out", out)
    (run / "data").symlink_to(gpt2_data)
    assert "a different tokenizer" in refusal("export", run, "--out", out)
    (run / "data").unlink()
    (run / "data").symlink_to(bert_data)
    assert "not a Hugging Face model" in refusal("import", tmp_path / "nothing", "--out", out)
    assert checkpoints("export", run, "--out", tmp_path / "theirs").exit_code == 0
    (tmp_path / "theirs" / "model.safetensors").rename(tmp_path / "theirs" / "pytorch_model.bin")
    assert "could execute code" in refusal("import", tmp_path / "theirs", "--out", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "run", "theirs"]
