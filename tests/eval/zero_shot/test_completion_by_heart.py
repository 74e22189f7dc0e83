"""A causal model memorizes triples, from the texts to COMET's scores; CTC memorizes what follows its source."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_pairs import CHARACTERS, COMPLETED, recipe, shortened, write_jsonl

from multihop.data_prep.config import TokenizerConfig
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.tokenizers.tokenizer import load
from multihop.eval.inference.beam_search import Search
from multihop.eval.inference.generate import generate
from multihop.eval.inference.trained_model import TrainedModel
from multihop.eval.inference.translate import translate
from multihop.eval.metrics.bleu import mean_bleu_2
from multihop.eval.tasks.task import Example, Task
from multihop.eval.zero_shot.completion import evaluate_completion, novelty
from multihop.eval.zero_shot.translation import evaluate_translation
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.data.index import build_indexes
from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.optim.schedule import learning_rate

PARTS = ["wheel", "door", "roof", "wing", "engine", "seat", "lamp", "horn", "belt", "bell", "mast", "sail"]
WHOLES = ["car", "house", "ship", "bike", "plane", "train", "garden", "tower"]
TRIPLES = [
    (f"{WHOLES[w]} {PARTS[p]} <{relation}>", f"{PARTS[(w + p + r) % 12]} of a {WHOLES[(w * p + r) % 8]}")
    for w in range(8)
    for p in range(12)
    for r, relation in enumerate(("near", "has"))
]


def trained_on(
    pairs: list[tuple[str, str]], tokens: TokenizerConfig, settings: dict[str, Any], steps: int, folder: Path
) -> TrainedModel:
    data = recipe(write_jsonl(folder / "pairs.jsonl", pairs)).model_copy(update={"heldout_fraction": 0.02})
    prepare(data, tokens, folder / "set")
    phase = {"seq_len": 64, "global_batch_size": 64, "steps": steps, "lr": 5e-3, "warmup_ratio": 0.1}
    config = TrainingConfig.model_validate({**settings, "phases": [phase]})
    build_indexes(folder / "index", open_dataset(folder / "set"), config)
    builder = BatchBuilder.open(config, folder / "set", folder / "index", 0, 1, [64])
    info = builder.data.manifest.tokenizer
    model = build_model(config.model, info.vocab_size)
    init_weights(model, 1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    name = config.objective.name
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.phases, step)
        (batch,) = builder.step(step).micro_batches
        loss = model(**to_device(batch.inputs, torch.device("cpu")))[name] / batch.counts[name]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    tokenizer = load(folder / "set" / info.file)
    return TrainedModel("the model", model.eval(), tokenizer, info.special_ids, completes=name == "completion")


def test_triples_are_learned(tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    sizes = {"family": "gpt2", "layers": 2, "hidden": 64, "heads": 4, "max_positions": 64, "dropout": 0.0}
    tokens = COMPLETED.model_copy(update={"kind": "char", "added_tokens": ["<near>", "<has>"]})
    trained = trained_on(TRIPLES, tokens, {"model": sizes, "objective": {"name": "completion"}}, 300, tmp_path)
    known, unknown = TRIPLES[::3], [("car wheel <near>", "nothing of that kind")]
    task = Task(
        name="triples",
        kind="completion",
        metric="perplexity",
        higher_is_better=False,
        source="",
        train=tuple(map(Example, TRIPLES)),
        test=tuple(map(Example, known)),
        settings={"beams": 3, "length_penalty": 0.6},
    )
    row, predictions = evaluate_completion(trained, task)
    others = row["other_metrics"]
    assert row["value"] < 1.3 and others["BLEU-2"] > 85 and others["novel tuples"] < 0.2
    assert others["sources"] == len(known) == len(predictions["predicted"])
    nats, count = map(sum, zip(*predictions["statistics"], strict=True))
    assert torch.tensor(nats / count).exp().item() == pytest.approx(row["value"])
    dirty = tuple(Example((f" {source}\t", target.replace(" ", "  "))) for source, target in known)
    assert evaluate_completion(trained, replace(task, test=dirty)) == (row, predictions)
    worse, _ = evaluate_completion(trained, replace(task, test=tuple(map(Example, unknown))))
    assert worse["value"] > 20
    # Greedy search, step by step, and the command's own prompts are one thing.
    sources = [source for source, _ in known[:5]]
    greedy = generate(trained, sources, max_tokens=20)
    beam = translate(trained, sources, search=Search(beams=1))
    assert [one.strip() for one in greedy] == [two.text for two in beam]


def test_novelty_is_counted_among_tuples_and_objects() -> None:
    train = [("a", "x"), ("b", "y")]
    assert novelty([("a", "x"), ("a", "y"), ("b", "z"), ("c", "z"), ("d", "")], train) == {
        "novel tuples": 0.6,
        "novel objects": 0.4,
        "novel unique objects": 0.25,
        "empty completions": 0.2,
    }


def test_bleu_2_takes_the_best_of_all_references() -> None:
    pytest.importorskip("sacrebleu")
    assert mean_bleu_2(["to be happy"], [["to be sad", "to be happy"]]) == pytest.approx(100)
    assert mean_bleu_2(["happy"], [["happy"]]) == pytest.approx(100)
    half = mean_bleu_2(["to be happy", "dog"], [["to be happy"], ["cat"]])
    assert half == pytest.approx(50, abs=1)
    assert mean_bleu_2(["to be sad now"], [["to be happy now"]]) == pytest.approx(100 * (3 / 4 * 1 / 3) ** 0.5)


@pytest.mark.parametrize(
    ("encoder", "steps"), [({"encoder": "lstm"}, 400), ({"encoder": "transformer", "heads": 4}, 150)]
)
def test_ctc_learns_what_follows_its_source(encoder: dict[str, Any], steps: int, tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    sizes = {"family": "ctc-encoder", "layers": 1, "hidden": 64, "max_positions": 64, "dropout": 0.0, **encoder}
    pairs = [shortened(number) for number in range(300)]
    trained = trained_on(pairs, CHARACTERS, {"model": sizes}, steps, tmp_path)
    unseen = [each for each in (shortened(number) for number in range(1000, 1040)) if each not in pairs]
    task = Task(
        name="shortened",
        kind="translation",
        metric="exact match",
        higher_is_better=True,
        source="",
        test=tuple(map(Example, unseen)),
        settings={"beams": 4, "length_penalty": 0.0},
    )
    row, predictions = evaluate_translation(trained, task)
    assert row["value"] > 0.85 > 0.1 > row["other_metrics"]["exact match of the source"]
    assert predictions["statistics"] == [
        [float(text == target), 1.0] for text, (_, target) in zip(predictions["predicted"], unseen, strict=True)
    ]
    greedy, _ = evaluate_translation(trained, replace(task, settings={**task.settings, "beams": 1}))
    assert abs(greedy["value"] - row["value"]) < 0.15
