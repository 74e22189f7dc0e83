"""The peers of bench/fine_tune.py, each a process: `fine_tune_peers.py NAME CASE` fine-tunes once per seed it reads."""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from multihop.eval.config import EvalConfig, TrialSettings, settings_of
from multihop.eval.finetune.input_cache import selected
from multihop.eval.metrics.score import score
from multihop.eval.tasks.known_tasks import load_task

Case = dict[str, Any]
FineTune = Callable[[int], float]
"""Fine-tunes with a seed and returns the task's metric on the test examples."""


def config_of(case: Case) -> EvalConfig:
    return EvalConfig.model_validate(
        {"tasks": [case["task"]], "data_dir": case["data_dir"], "cpus": case["threads"], "checkpoint": case["model"]}
    )


def ours(case: Case) -> FineTune:
    """Return a function that runs a trial as a Ray worker does."""
    from pathlib import Path

    import multihop.eval.finetune.labeled  # imported before the first trial, as the other's libraries are  # noqa: F401
    from multihop.common.machine import disable_malloc_trim
    from multihop.eval.model.model_under_test import of_huggingface
    from multihop.eval.trials.list_trials import plan_trials
    from multihop.eval.trials.run_trial import run_trial

    disable_malloc_trim()
    config = config_of(case)

    def fine_tune(seed: int) -> float:
        planned = plan_trials(config.model_copy(update={"seeds": [seed]}), of_huggingface(Path(case["model"])))
        row = run_trial(next(trial for trial in planned if trial.init == "pretrained")).row
        assert row["status"] == "ok", row
        return float(row["value"])

    return fine_tune


def trainer(case: Case, by_length: bool = False) -> FineTune:
    """Return a function that runs Hugging Face's Trainer as its GLUE example does: batches padded to the longest."""
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    config = config_of(case)

    def fine_tune(seed: int) -> float:
        task = load_task(case["task"]["name"], case["data_dir"])
        settings: TrialSettings = settings_of(config, config.tasks[0], task.kind)[0]
        parts, _ = selected(task, settings)
        tokenizer = AutoTokenizer.from_pretrained(case["model"])

        def encoded(name: str) -> list[dict[str, Any]]:
            texts = list(zip(*(example.texts for example in parts[name]), strict=True))
            rows = tokenizer(*map(list, texts), truncation=True, max_length=settings.seq_len)
            labels = [
                example.targets[0] if task.kind == "regression" else int(example.targets[0]) for example in parts[name]
            ]
            return [
                {**{key: values[i] for key, values in rows.items()}, "labels": labels[i]} for i in range(len(labels))
            ]

        model = AutoModelForSequenceClassification.from_pretrained(
            case["model"], num_labels=len(task.labels) or 1, ignore_mismatched_sizes=True
        )

        def value(predicted: Any) -> float:
            outputs = predicted.predictions
            answers = outputs.argmax(-1) if task.kind == "classification" else outputs.squeeze(-1)
            return score(
                task, [np.array([float(a)]) for a in answers], [np.array([float(t)]) for t in predicted.label_ids]
            )[0]

        arguments = TrainingArguments(
            output_dir="/nonexistent",
            seed=seed,
            num_train_epochs=settings.epochs,
            per_device_train_batch_size=settings.batch_size,
            per_device_eval_batch_size=64,
            learning_rate=settings.lr,
            weight_decay=settings.weight_decay,
            lr_scheduler_type="linear",
            warmup_steps=settings.warmup_ratio,
            max_grad_norm=1.0,
            eval_strategy="epoch",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            train_sampling_strategy="group_by_length" if by_length else "random",
        )
        fitted = Trainer(
            model=model,
            args=arguments,
            train_dataset=encoded("train"),
            eval_dataset=encoded("dev"),
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=lambda predicted: {"value": value(predicted)},
        )
        fitted.train()
        return value(fitted.predict(encoded("test")))

    return fine_tune


def trainer_by_length(case: Case) -> FineTune:
    """Return `trainer` with batches of examples of similar length."""
    return trainer(case, by_length=True)


PEERS = {"ours": ours, "trainer": trainer, "trainer_by_length": trainer_by_length}


def peer_process(name: str, case: Case) -> None:
    """Read a seed per line, fine-tune with it, and print seconds and score."""
    out = os.fdopen(os.dup(1), "w")
    import torch

    torch.set_num_threads(case["threads"])
    fine_tune = PEERS[name](case)
    print(json.dumps({"peer": name}), file=out, flush=True)
    for line in sys.stdin:
        before = time.perf_counter()
        value = fine_tune(int(line))
        seconds = round(time.perf_counter() - before, 3)
        print(json.dumps({"peer": name, "seconds": seconds, "value": round(value, 4)}), file=out, flush=True)


if __name__ == "__main__":
    peer_process(sys.argv[1], json.loads(sys.argv[2]))
