"""Opens the task, tokenizers and model of a trial on the worker, and compares them with the plan."""

from multihop.common.errors import UserError
from multihop.common.files import sha256_json
from multihop.data_prep.dataset.manifest import read_data_manifest
from multihop.data_prep.tokenizers.info import TokenizerInfo
from multihop.data_prep.tokenizers.tokenizer import Tokenizer
from multihop.eval.config import TrialSettings
from multihop.eval.model.load_model import huggingface_weights, load_model
from multihop.eval.model.model_under_test import open_tokenizer
from multihop.eval.tasks.known_tasks import load_task
from multihop.eval.tasks.task import Task
from multihop.eval.trials.trial import Trial
from multihop.pretrain.models.families import parse_model_config
from multihop.pretrain.models.layers.model import Model


def trial_task(trial: Trial) -> Task:
    """Read the files of the trial's task.

    Raises:
        UserError: the files are missing, or differ from those that the trial was planned with.
    """
    task = load_task(trial.task, trial.task_dir)
    if task.fingerprint != trial.task_fingerprint:
        raise UserError(
            f"the files of task {task.name} on this machine differ from those that the trials were planned with; "
            "install the same files on every machine"
        )
    return task


def trial_tokenizers(trial: Trial) -> list[tuple[Tokenizer, TokenizerInfo]]:
    """Return the tokenizer of the model; of an encoder-decoder model with two vocabularies, also the target's.

    Raises:
        UserError: the files are not those that the trial was planned with.
    """
    paths = [path for path in (trial.tokenizer_path, trial.target_tokenizer_path) if path is not None]
    tokenizers = [open_tokenizer(path, pairs=trial.kind == "translation") for path in paths]
    hashes = [info.sha256 for _, info in tokenizers]
    if (hashes[0] if len(hashes) == 1 else sha256_json(hashes)) != trial.tokenizer_sha256:
        raise UserError(
            f"{' or '.join(paths)} is not the tokenizer that the trials were planned with; run the command again"
        )
    return tokenizers


def trial_model(trial: Trial) -> Model:
    """Return the model on the CPU: with the checkpoint's weights, or with random ones that the trial's seed keys.

    Raises:
        UserError: the weights are missing, damaged, or not those that the trial was planned with.
    """
    config, dropout = parse_model_config(trial.model), TrialSettings.model_validate(trial.settings).dropout
    if dropout is not None:
        config = config.with_dropout(dropout)
    checkpoint = None
    if trial.checkpoint_dir is not None:
        assert trial.checkpoint_sha256 is not None
        checkpoint = trial.checkpoint_dir, trial.checkpoint_sha256
    tokenizer = None
    if trial.init == "parent" and trial.data_path is not None:
        tokenizer = read_data_manifest(trial.data_path).tokenizer  # its added tokens are new to the parent
    return load_model(
        config, trial.vocab_size, trial.source_vocab_size, checkpoint, trial.checkpoint_step, trial.seed, tokenizer
    )


def lacking_weights(trial: Trial, model: Model) -> frozenset[str]:
    """Return the parameters that the trial's Hugging Face model does not have, and that are random in `model`."""
    if trial.checkpoint_dir is None or trial.checkpoint_step is not None:
        return frozenset()
    assert trial.checkpoint_sha256 is not None
    weights = huggingface_weights(trial.checkpoint_dir, trial.checkpoint_sha256)
    return frozenset(name for name, _ in model.named_parameters() if name not in weights)
