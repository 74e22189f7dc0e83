"""`fill-mask`, `generate` and `embed` give the output of transformers' pipelines on the exported checkpoint."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_up_pairs import pair
from tiny_runs import CAUSAL, IN_MASKED_PIPELINE, MASKED, make_run
from typer.testing import CliRunner

from multihop.cluster.cli.main import app
from multihop.cluster.runs.checkpoints import export_checkpoint
from multihop.common.errors import UserError
from multihop.eval.inference.generate import encode_prompt, generate_tokens
from multihop.eval.inference.trained_model import load_model

pytest.importorskip("transformers")
os.environ["HF_HUB_OFFLINE"] = "1"

TEXTS = ["The river [MASK] stone.", "[MASK] of light, [MASK]ing and [MASK].", "Summer[MASK]"]
PROMPTS = ["The river", "Stone", "The window of light is a garden in the winter. A letter", "Morning evening"]

RunOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory, bert_data: Path, gpt2_data: Path) -> RunOf:
    """A function from a family to a run, with its export next to it in the directory `exported`."""

    @cache
    def of(family: str) -> Path:
        folder = tmp_path_factory.mktemp("runs") / family
        run = make_run(folder, bert_data if family in MASKED else gpt2_data, family)
        export_checkpoint(str(run), folder / "exported")
        return run

    return of


def answer(*arguments: str | Path, given: str | bytes = "") -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)), input=given, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def refusal(*arguments: str | Path, given: str | bytes = "") -> str:
    """Return the sentence that main() prints before it ends with code 2."""
    with pytest.raises(UserError) as actual:
        CliRunner().invoke(app, list(map(str, arguments)), input=given, catch_exceptions=False)
    return str(actual.value)


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("family", IN_MASKED_PIPELINE)
def test_filled_masks_are_those_of_the_pipeline(run_of: RunOf, family: str) -> None:
    from transformers import pipeline

    run = run_of(family)
    filler = pipeline("fill-mask", model=str(run / "exported"), top_k=7)
    for row in rows(answer("fill-mask", run, *TEXTS, "--top-k", "7", "--json")):
        theirs = filler(row["text"])
        theirs = theirs if isinstance(theirs[0], list) else [theirs]
        assert [[each["id"] for each in mask] for mask in row["masks"]] == [[e["token"] for e in m] for m in theirs]
        for own_rank, other in zip(row["masks"], theirs, strict=True):
            scores = [each["score"] for each in other]
            np.testing.assert_allclose([each["probability"] for each in own_rank], scores, atol=1e-5)
            assert [each["token"].strip() for each in own_rank] == [each["token_str"].strip() for each in other]


@pytest.mark.parametrize("family", [name for name in MASKED if name not in IN_MASKED_PIPELINE])
def test_masks_are_filled_by_the_query_stream(run_of: RunOf, family: str) -> None:
    """No token sees a masked one, and each is predicted from the query stream at its position."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = run_of(family)
    tokenizer = AutoTokenizer.from_pretrained(run / "exported")
    model = AutoModelForCausalLM.from_pretrained(run / "exported").eval()
    for row in rows(answer("fill-mask", run, *TEXTS, "--top-k", "7", "--json")):
        given = tokenizer(row["text"], return_tensors="pt")
        ids = given["input_ids"][0]
        assert [tokenizer.sep_token_id, tokenizer.cls_token_id] == ids[-2:].tolist()
        assert given["token_type_ids"][0].tolist() == [0] * (len(ids) - 1) + [2]
        hidden = (ids == tokenizer.mask_token_id).float().expand(1, len(ids), -1)
        mapping = torch.eye(len(ids))[ids == tokenizer.mask_token_id][None]
        with torch.no_grad():
            logits = model(**given, perm_mask=hidden, target_mapping=mapping).logits[0]
        best = logits.softmax(-1).topk(7)
        assert [[each["id"] for each in mask] for mask in row["masks"]] == best.indices.tolist()
        found = [[each["probability"] for each in mask] for mask in row["masks"]]
        np.testing.assert_allclose(found, best.values, atol=1e-5)


@pytest.mark.parametrize("family", CAUSAL)
def test_greedy_continuations_are_those_of_the_pipeline(run_of: RunOf, family: str) -> None:
    """The pipeline continues one prompt after the other; we also continue a batch of prompts of different lengths."""
    from transformers import pipeline

    run, made = run_of(family), list[list[int]]()
    generator = pipeline("text-generation", model=str(run / "exported"))
    for prompt in PROMPTS:
        (actual,) = generator(prompt, max_new_tokens=24, do_sample=False, return_tensors=True)
        made.append(actual["generated_token_ids"])
    trained = load_model(str(run))
    prompts = [encode_prompt(trained, prompt) for prompt in PROMPTS]
    columns = zip(*generate_tokens(trained, prompts, 24), strict=True)
    own_rank = [
        [*prompt, *(t for t in column if t is not None)] for prompt, column in zip(prompts, columns, strict=True)
    ]
    end = trained.special_ids["end"]
    assert own_rank == [ids[:-1] if ids[-1] == end else ids for ids in made]
    # The pipeline's own text lacks the space between the prompt and a word that begins after it, and unknown tokens.
    texts = [generator.tokenizer.decode(ids, skip_special_tokens=True) for ids in made]
    together = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    printed = answer("generate", run, "--max-tokens", "24", *together).replace(" \u2047 ", "")
    assert printed == "\n\n".join(texts) + "\n"
    for prompt, text in zip(PROMPTS[:2], texts[:2], strict=True):
        printed = answer("generate", run, "--max-tokens", "24", "--prompt", prompt)
        assert printed.replace(" \u2047 ", "") == text + "\n"


@pytest.mark.parametrize("family", [*MASKED, *CAUSAL])
def test_mean_embeddings_are_those_of_the_pipeline(run_of: RunOf, family: str) -> None:
    from transformers import pipeline

    run = run_of(family)
    extract = pipeline("feature-extraction", model=str(run / "exported"))
    actual = rows(answer("embed", run, given="\n".join(PROMPTS) + "\n"))
    assert [row["text"] for row in actual] == PROMPTS
    for row in actual:
        (states,) = extract(row["text"])
        assert row["tokens"] == len(states)
        np.testing.assert_allclose(row["embedding"], np.mean(states, 0), atol=1e-5)


@pytest.mark.parametrize("family", MASKED)
def test_mean_embeddings_are_those_of_sentence_transformers(run_of: RunOf, family: str) -> None:
    """sentence-transformers opens an export without changes, and pads its batches."""
    from sentence_transformers import SentenceTransformer

    run = run_of(family)
    actual = rows(answer("embed", run, given="\n".join(PROMPTS) + "\n"))
    expected = SentenceTransformer(str(run / "exported"), device="cpu").encode(PROMPTS)
    np.testing.assert_allclose([row["embedding"] for row in actual], expected, atol=1e-5)


def test_a_familys_own_embedding(run_of: RunOf) -> None:
    """The embeddings are BERT's pooler, RoBERTa's first token and GPT-2's last token."""
    import torch
    from transformers import AutoModel, AutoTokenizer, pipeline

    for family, at in (("roberta", 0), ("gpt2", -1)):
        extract = pipeline("feature-extraction", model=str(run_of(family) / "exported"))
        for row in rows(answer("embed", run_of(family), "--pooling", "family", given="\n".join(PROMPTS))):
            np.testing.assert_allclose(row["embedding"], extract(row["text"])[0][at], atol=1e-5)
    exported = run_of("bert") / "exported"
    model, tokenizer = AutoModel.from_pretrained(exported).eval(), AutoTokenizer.from_pretrained(exported)
    (row,) = rows(answer("embed", run_of("bert"), "--pooling", "family", given="The river stone"))
    with torch.no_grad():
        pooled = model(**tokenizer("The river stone", return_tensors="pt")).pooler_output[0]
    np.testing.assert_allclose(row["embedding"], pooled, atol=1e-5)


def test_where_a_model_may_be(run_of: RunOf) -> None:
    """A run's name, its directory, its checkpoints, one of them and an export give the same output."""
    run = run_of("bert")
    of_step = run / "checkpoints" / "step-00000007"
    locations = [(run.name, "--runs", run.parent), (run,), (run / "checkpoints",), (of_step,), (run, "--step", "7")]
    answers = {answer("fill-mask", location, TEXTS[0], "--json", *options) for location, *options in locations}
    assert len(answers) == 1
    (exported,), (ours,) = rows(answer("fill-mask", run / "exported", TEXTS[0], "--json")), rows(answers.pop())
    assert exported["masks"] == ours["masks"]
    assert answer("fill-mask", run, TEXTS[0], "--json", "--step", "3") != answer("fill-mask", run, TEXTS[0], "--json")


def test_maps_are_drawn_of_lines_that_are_translated(pairs_data: Path, tmp_path: Path) -> None:
    run, maps = make_run(tmp_path / "pairs", pairs_data, "transformer"), tmp_path / "maps"
    lines = f"{pair(1)[0]}\n\n{pair(2)[0]}\n"
    assert answer("translate", run, "--attention-maps", maps, given=lines) == answer("translate", run, given=lines)
    assert sorted(path.name for path in maps.iterdir()) == ["1.png", "3.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in maps.iterdir())
    deaf = make_run(tmp_path / "deaf", pairs_data, "seq2seq", heads=None, attention="none")
    assert "attention=none" in refusal("translate", deaf, "--attention-maps", tmp_path / "none", given=lines)
    assert not (tmp_path / "none").exists()


def test_lines_end_only_at_line_feeds_and_a_byte_order_mark_is_dropped(run_of: RunOf) -> None:
    actual = rows(answer("embed", run_of("gpt2"), given="\ufeffriver\nstone\rlight\r\nwinter"))
    assert [row["text"] for row in actual] == ["river", "stone\rlight", "winter"]


def test_input_that_a_shell_has_consumed_is_not_read_again(pairs_data: Path, tmp_path: Path) -> None:
    run, texts = make_run(tmp_path / "pairs", pairs_data, "transformer"), tmp_path / "texts.txt"
    first, second = f"{pair(1)[0]}\n", f"{pair(2)[0]}\n"
    texts.write_text(first + second)
    with texts.open("rb", buffering=0) as file:
        file.seek(len(first.encode()))
        command = [sys.executable, "-m", "multihop.cluster.cli.main", "translate", str(run)]
        made = subprocess.run(command, stdin=file, capture_output=True, text=True, check=True)
    assert made.stdout == answer("translate", run, given=second)


def test_closed_standard_input_is_reported_in_one_sentence(run_of: RunOf) -> None:
    command = [
        "sh",
        "-c",
        'exec "$@" <&-',
        "sh",
        sys.executable,
        "-m",
        "multihop.cluster.cli.main",
        "embed",
        run_of("gpt2"),
    ]
    made = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert made.returncode == 2
    assert made.stderr.splitlines()[-1].startswith("multihop: standard input is closed; pass one text per line")


def test_answers_are_shown_as_text(run_of: RunOf) -> None:
    lines = answer("fill-mask", run_of("bert"), TEXTS[1], "--top-k", "2").splitlines()
    assert lines[0] == TEXTS[1] and lines[1::3] == ["mask 1", "mask 2", "mask 3"] and len(lines) == 10
    assert all("%" in line for line in lines[2:4])
    sampled = ("generate", run_of("gpt2"), "--prompt", "Stone", "--top-k", "20", "--temperature", "2", "--seed")
    assert answer(*sampled, "1") == answer(*sampled, "1") != answer(*sampled, "2")


def test_a_text_ends_where_the_models_positions_do(run_of: RunOf) -> None:
    run = run_of("gpt2")
    long = "river " * 20
    assert answer("generate", run, "--max-tokens", "500", "--prompt", long).startswith(long)
    assert "max_positions=64" in refusal("generate", run, "--prompt", long * 4)
    result = CliRunner().invoke(app, ["embed", str(run)], input=long * 4)
    assert rows(result.stdout)[0]["tokens"] == 64 and "1 texts were truncated" in result.stderr


def test_mistakes_are_reported_in_a_sentence(run_of: RunOf, tmp_path: Path) -> None:
    bert, gpt2 = run_of("bert"), run_of("gpt2")
    assert "is a GPT-2, which fills no masks; use `multihop generate`" in refusal("fill-mask", gpt2, TEXTS[0])
    assert "is a BERT, which does not continue texts" in refusal("generate", bert, "--prompt", "The")
    assert "is a BERT, which does not translate; use `multihop fill-mask`" in refusal("translate", bert)
    assert "is a GPT-2, which does not translate; use `multihop generate`" in refusal("translate", gpt2)
    assert "has no mask token; write [MASK]" in refusal("fill-mask", bert, "The river")
    assert "max_positions=64" in refusal("fill-mask", bert, "[MASK] river" * 60)
    assert "existing runs: albert" in refusal("fill-mask", "ghost", TEXTS[0], "--runs", run_of("albert").parent)
    for before in (1, 70):
        message = refusal("embed", bert, given="river\n" * before + "\nstone\n")
        assert f"standard input, line {before + 1}: '' has no tokens; remove the line" in message
    assert "standard input, line 2: byte 3 of the line is not UTF-8" in refusal(
        "embed", bert, given=b"river\nsto\xffne\n"
    )
    assert "omit --step" in refusal("fill-mask", bert / "exported", TEXTS[0], "--step", "3")
    for option, value in (("--temperature", "0"), ("--temperature", "1e-38"), ("--top-k", "0"), ("--top-p", "1.5")):
        assert option[2:].replace("-", "_") + "=" in refusal("generate", gpt2, "--prompt", "The", option, value)


def test_a_model_without_its_head_is_refused_where_the_head_is_needed(run_of: RunOf, tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    exported, bare = run_of("bert") / "exported", tmp_path / "bare"
    AutoModel.from_pretrained(exported, add_pooling_layer=False).save_pretrained(bare)
    AutoTokenizer.from_pretrained(exported).save_pretrained(bare)
    (bare / "sentencepiece.model").write_bytes((exported / "sentencepiece.model").read_bytes())
    assert "no weights for predicting masked tokens" in refusal("fill-mask", bare, TEXTS[0])
    assert "use mean pooling" in refusal("embed", bare, "--pooling", "family", given="river")
    assert rows(answer("embed", bare, given="river")) == rows(answer("embed", exported, given="river"))
