"""Running a trial: one trial in, one row of results.jsonl and the predictions behind it out.

Torch and what needs it are imported where they are used: the driver imports this to send trials to workers.
"""

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multihop.common.errors import UserError
from multihop.common.files import atomic_replace, make_folder, sha256_file, sha256_json
from multihop.common.json_lines import Row
from multihop.eval.config import TrialSettings
from multihop.eval.evaluated import open_tokenizer
from multihop.eval.known_tasks import HELDOUT, load_task, shown_name
from multihop.eval.tasks.task import Kind, Task
from multihop.eval.trial import Trial, hyperparameters, trial_key, weights_file
from multihop.pretrain.models.families import FAMILIES, parse_model_config

if TYPE_CHECKING:
    import torch

    from multihop.data_prep.dataset.shards import TokenDataset
    from multihop.data_prep.tokenizers.info import TokenizerInfo
    from multihop.data_prep.tokenizers.tokenizer import Tokenizer
    from multihop.eval.finetune import History
    from multihop.eval.heads import TaskModel
    from multihop.pretrain.checkpoint.manifest import CheckpointManifest
    from multihop.pretrain.models.layers.model import Model


@dataclass(frozen=True)
class Outcome:
    """What a trial leaves."""

    row: Row
    predictions: dict[str, Any] | None
    """What `multihop.eval.predictions.predictions_of` returns; None for a failed trial and for a zero-shot task."""


def run_trial(trial: Trial) -> Outcome:
    """Run a trial on this machine: on its GPU where torch finds one, else on `trial.threads` cores.

    Returns:
        The row's status is "failed", with the reason, when a loss or a score became non-finite: the same trial would
        fail again.

    Raises:
        UserError: the data, the task's files or the checkpoint are missing, or differ from those of the plan.
    """
    import torch

    from multihop.eval.finetune import NonFiniteLossError

    started = time.monotonic()
    torch.set_num_threads(trial.threads)
    try:
        found, predictions = _run_of(trial.kind)(trial)
        _check_finite(found)
    except NonFiniteLossError as error:
        return Outcome(failed_row(trial, str(error), time.monotonic() - started), None)
    seconds = round(time.monotonic() - started, 3)
    return Outcome({**_described(trial), **found, "status": "ok", "seconds": seconds}, predictions)


def _check_finite(row: Row) -> None:
    """Raise NonFiniteLossError for numbers that JSON cannot represent."""
    from multihop.eval.finetune import NonFiniteLossError

    numbers = {"value": row["value"], "dev_value": row["dev_value"], **row["other_metrics"]}
    for name, number in numbers.items():
        if number is not None and not math.isfinite(number):
            raise NonFiniteLossError(f"{name} is {number}")


def _run_of(kind: Kind) -> Callable[[Trial], tuple[Row, dict[str, Any] | None]]:
    match kind:
        case "zero-shot":
            return _zero_shot
        case "translation":
            return _translation
    return _finetuned


def failed_row(trial: Trial, error: str, seconds: float, retry: bool = False) -> Row:
    """The row of a trial that has no result.

    Args:
        error: the reason, in one sentence.
        retry: whether the trial is tried again when the command is rerun, because the reason was not in the trial.
    """
    empty: Row = {"value": None, "dev_value": None, "other_metrics": {}, "examples": {}}
    failure = {"status": "failed", "error": error, "retry": retry, "seconds": round(seconds, 3)}
    return {**_described(trial), **empty, **failure}


def _described(trial: Trial) -> Row:
    """The part of a row that is known before the trial runs."""
    return {
        **trial.described,
        "seed": trial.seed,
        "init": trial.init,
        "checkpoint_step": trial.checkpoint_step,
        "checkpoint_sha256": trial.checkpoint_sha256,
        "tokenizer_sha256": trial.tokenizer_sha256,
        "hyperparameters": hyperparameters(trial),
        "key": trial_key(trial),
        **({"start_from": shown_name(trial.start_from), "source_key": trial.source_key} if trial.start_from else {}),
    }


def _finetuned(trial: Trial) -> tuple[Row, dict[str, Any]]:
    from multihop.eval.frames import frame_of
    from multihop.eval.input_cache import task_inputs

    [(tokenizer, info)] = _tokenizers(trial)
    encoder = _model(trial)
    settings = TrialSettings.model_validate(trial.settings)
    family = encoder.config.family
    features, causal = settings.features, FAMILIES[family].causal
    frame = frame_of(family, info.special_ids, trial.vocab_size, frozen=features is not None)
    if trial.kind == "spans":
        from multihop.eval.spans.finetune import finetune_spans
        from multihop.eval.spans.inputs import span_inputs

        cut = span_inputs(
            lambda: _planned(trial), trial.task_fingerprint, tokenizer, info.sha256, frame, causal, settings
        )
        model = _with_head(encoder, cut.task, trial, settings)
        spans = finetune_spans(model, cut, settings, trial.seed)
        row = _row(spans.value, spans.other_metrics, spans.history, cut.sizes, cut.reported_on)
        return row | _keep_weights(trial, model), spans.predictions

    from multihop.eval.predictions import predictions_of
    from multihop.eval.supervised import finetune_labelled

    inputs = task_inputs(
        lambda: _planned(trial), trial.task_fingerprint, tokenizer, info.sha256, frame, causal, settings
    )
    task, sets = inputs.task, inputs.sets
    model = _with_head(encoder, task, trial, settings)
    result = finetune_labelled(model, task, sets, settings, trial.seed)
    added = set(info.special_ids.values())
    predictions = predictions_of(
        task, inputs, result, lambda ids: tokenizer.decode([i for i in ids if i not in added and i < info.vocab_size])
    )
    sizes = {name: len(part) for name, part in sets.items()}
    row = _row(result.value, result.other_metrics, result.history, sizes, inputs.reported_on)
    return row | _keep_weights(trial, model), predictions


def _with_head(encoder: "Model", task: Task, trial: Trial, settings: TrialSettings) -> "TaskModel":
    """The encoder with a new head; with the weights of the source's trial if it starts from one.

    Raises:
        UserError: those weights are missing or damaged.
    """
    from multihop.eval.heads import TaskModel

    model = TaskModel(encoder, task, trial.seed, settings.head_dropout, settings.features, settings.pooling)
    if trial.source_key is not None:
        from safetensors.torch import load

        assert trial.weights_dir is not None and trial.start_from is not None
        path = weights_file(trial.weights_dir, trial.source_key)
        content = path.read_bytes() if path.exists() else None
        if content is None or hashlib.sha256(content).hexdigest() != trial.source_sha256:
            raise UserError(
                f"{path}, the weights of {shown_name(trial.start_from)} that the trial starts from, is "
                f"{'missing' if content is None else 'damaged'}; rerun the same command to have them trained again"
            )
        model.encoder.load_state_dict(load(content))
    return model.to(_device())


def _keep_weights(trial: Trial, model: "TaskModel") -> Row:
    """Keep the encoder's weights, if other trials may start from them; returns what the row says of them."""
    if trial.weights_dir is None or trial.start_from is not None:
        return {}
    from safetensors.torch import save_file

    path = weights_file(trial.weights_dir, trial_key(trial))
    make_folder(path.parent)
    with atomic_replace(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in model.encoder.state_dict().items()}, temporary)
        sha256 = sha256_file(temporary)
    return {"weights_sha256": sha256}


def _row(
    value: float, other_metrics: dict[str, float], history: "History", sizes: Mapping[str, int], reported_on: str
) -> Row:
    return {
        "value": value,
        "dev_value": history.dev_value,
        "best_epoch": history.best_epoch,
        "other_metrics": other_metrics,
        "examples": dict(sizes),
        "reported_on": reported_on,
        "curve": {"loss": history.loss_curve, "dev": history.dev_curve},
    }


def _tokenizers(trial: Trial) -> "list[tuple[Tokenizer, TokenizerInfo]]":
    """The tokenizer of the trial, and the target's if there are two.

    Raises:
        UserError: The files are not those that the trial was planned with.
    """
    paths = [path for path in (trial.tokenizer_path, trial.target_tokenizer_path) if path is not None]
    opened = [open_tokenizer(path, pairs=trial.kind == "translation") for path in paths]
    hashes = [info.sha256 for _, info in opened]
    if (hashes[0] if len(hashes) == 1 else sha256_json(hashes)) != trial.tokenizer_sha256:
        raise UserError(
            f"{' or '.join(paths)} is not the tokenizer that the trials were planned with; run the command again"
        )
    return opened


def _planned(trial: Trial) -> Task:
    """The task as the trial was planned with it."""
    task = load_task(trial.task, trial.task_dir)
    if task.fingerprint != trial.task_fingerprint:
        raise UserError(
            f"the files of task {task.name} on this machine differ from those that the trials were planned with; "
            "install the same files on every machine"
        )
    return task


def _zero_shot(trial: Trial) -> tuple[Row, dict[str, Any] | None]:
    if trial.task == HELDOUT:
        return _perplexity(trial)
    from multihop.eval.zero_shot import tasks as zero_shot
    from multihop.eval.zero_shot.perplexity import evaluate_perplexity, text_of

    task = _planned(trial)
    [(tokenizer, info)] = _tokenizers(trial)
    model = _model(trial).to(_device()).eval()
    seq_len = min(TrialSettings.model_validate(trial.settings).seq_len, model.config.max_positions)
    if task.test:
        text = text_of([example.texts[0] for example in task.test], "text", False)
        result = evaluate_perplexity(model, tokenizer, info.special_ids, text, seq_len)
    else:
        declared = zero_shot.ZERO_SHOT_TASKS[trial.task]
        content = declared.read(zero_shot.find(trial.task, trial.task_dir))
        result = declared.evaluate(model, tokenizer, info.special_ids, content, seq_len)
    row = {
        "value": result.value,
        "dev_value": None,
        "other_metrics": result.other_metrics,
        "examples": {"test": len(result.statistics)},
        "reported_on": "test",
    }
    return row, {"statistics": result.statistics.tolist()}


def _translation(trial: Trial) -> tuple[Row, dict[str, Any]]:
    from multihop.eval.inference.trained_model import TrainedModel
    from multihop.eval.translation.evaluate import evaluate_translation

    task = _planned(trial)
    (tokenizer, info), *rest = _tokenizers(trial)
    target = rest[0][0] if rest else None
    trained = TrainedModel(trial.task, _model(trial).to(_device()).eval(), tokenizer, info.special_ids, target)
    return evaluate_translation(trained, task)


def _perplexity(trial: Trial) -> tuple[Row, None]:
    from multihop.data_prep.dataset.manifest import read_token_counts
    from multihop.eval.finetune import NonFiniteLossError
    from multihop.eval.zero_shot.heldout import cross_entropy, unigram_cross_entropy

    data = _open_data(trial)
    tokenizer = data.manifest.tokenizer
    model = _model(trial).to(_device())
    assert FAMILIES[model.config.family].causal, "check_tasks refuses other models"
    seq_len = min(TrialSettings.model_validate(trial.settings).seq_len, model.config.max_positions)
    if not len(data.heldout):
        raise UserError("task heldout-perplexity needs held-out documents; raise data.heldout_fraction")
    loss, tokens = cross_entropy(model, data.heldout, tokenizer.special_ids["end"], seq_len)
    if not math.isfinite(loss):
        raise NonFiniteLossError(f"the cross-entropy on held-out text is {loss}")
    assert trial.data_path is not None
    counts = read_token_counts(trial.data_path, data.manifest)
    row = {
        "value": math.exp(loss),
        "dev_value": None,
        "other_metrics": {
            "cross-entropy": loss,
            "unigram perplexity": math.exp(unigram_cross_entropy(data.heldout, counts)),
            "uniform perplexity": float(tokenizer.vocab_size),
            "tokens": tokens,
        },
        "examples": {"test": len(data.heldout)},
        "reported_on": "test",
    }
    return row, None


def _open_data(trial: Trial) -> "TokenDataset":
    from multihop.data_prep.dataset.shards import open_dataset

    assert trial.data_path is not None, "check_tasks refuses it"
    # A node may have no shards for training: they are not read here.
    data = open_dataset(trial.data_path, _needs_no_training_shard)
    if data.manifest.fingerprint != trial.data_fingerprint:
        raise UserError(f"the data in {trial.data_path} is not the run's data; run `multihop prep` again")
    for shard in data.manifest.of_split("heldout"):
        # `multihop prep` does not hash files whose size and modification time are unchanged.
        path = Path(trial.data_path) / shard.file
        if sha256_file(path) != shard.sha256:
            raise UserError(f"{path} is damaged: its SHA-256 is not the manifest's; run `multihop prep --verify`")
    return data


def _needs_no_training_shard(path: Path) -> None:
    raise AssertionError(path)


def _model(trial: Trial) -> "Model":
    """With the checkpoint's weights, or random ones drawn with the trial's seed."""
    from multihop.pretrain.checkpoint.reader import CheckpointReader
    from multihop.pretrain.models.build import build_model, init_parameter, init_weights

    config, dropout = parse_model_config(trial.model), TrialSettings.model_validate(trial.settings).dropout
    if dropout is not None:
        config = config.model_copy(update={"dropout": dropout})
    model = build_model(config, trial.vocab_size, trial.source_vocab_size)
    if trial.checkpoint_dir is None:
        init_weights(model, trial.seed)
        return model
    assert trial.checkpoint_sha256 is not None
    if trial.checkpoint_step is not None:
        manifest = _verified(trial.checkpoint_dir, trial.checkpoint_sha256)
        with CheckpointReader(trial.checkpoint_dir, manifest) as reader:
            model.load_state_dict(dict(reader.weights()))
        return model
    weights = _huggingface_weights(trial.checkpoint_dir, trial.checkpoint_sha256)
    for name, parameter in model.named_parameters():
        if name in weights:
            parameter.data.copy_(weights[name])
        else:  # a head that the files lack
            init_parameter(model, name, parameter, trial.seed)
    return model


@lru_cache(maxsize=1)
def _verified(checkpoint: str, sha256: str) -> "CheckpointManifest":
    """The checkpoint's manifest, after verifying its files once per process for all its trials.

    Raises:
        UserError: a file is missing or damaged, or it is not the checkpoint that the trial was planned with.
    """
    from multihop.pretrain.checkpoint.verify import verify

    manifest = verify(checkpoint)
    if manifest.content_hash() != sha256:
        raise UserError(f"{checkpoint} is not the checkpoint that the trials were planned with; run the command again")
    return manifest


@lru_cache(maxsize=1)
def _huggingface_weights(folder: str, sha256: str) -> "dict[str, torch.Tensor]":
    """The weights by our names, hashed and mapped once per process for all its trials.

    Raises:
        UserError: the files are not those that the trial was planned with.
    """
    from multihop.pretrain.checkpoint.huggingface_import import content_hash, import_model

    if content_hash(Path(folder)) != sha256:
        raise UserError(f"{folder} is not the model that the trials were planned with; run the command again")
    return import_model(Path(folder))[2]


def _device() -> "torch.device":
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
