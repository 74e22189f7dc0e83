"""Weights of ELMo in their authors' layout: options.json and an HDF5 file, as bilm-tf writes and AllenNLP reads them.

Both are data: nothing in them is executed. A vocabulary beside them is not read: the model reads words by their
characters, and these files have no output matrix.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from multihop.common.errors import UserError
from multihop.common.files import read_json_object
from multihop.pretrain.models.bilm.characters import CHARACTERS
from multihop.pretrain.models.bilm.config import BilmConfig
from multihop.pretrain.models.build import build_model_on_meta

if TYPE_CHECKING:
    import h5py

OPTIONS = "options.json"
_MAX_POSITIONS = 512
"""An LSTM has no limit; some length must be the longest that evaluation makes."""
_ADVICE = "copy the model again"


def read_weights(source: Path) -> tuple[BilmConfig, int, dict[str, Tensor]]:
    """The model in a directory with options.json and one .hdf5 or .h5 file of weights.

    Returns:
        The model's config, the number of its characters, and all its weights by our names, float32.

    Raises:
        UserError: h5py is not installed, a file is missing or damaged, or the model has other equations.
    """
    options = read_json_object(source / OPTIONS, advice=_ADVICE)
    config = read_options(options, source / OPTIONS)
    path = _weight_file(source)
    try:
        import h5py
    except ImportError:
        raise UserError(
            f"{path} is an HDF5 file, and the package h5py is not installed; install it with `pip install "
            "'multihop[elmo]'`"
        ) from None
    shapes = {
        name: tuple(parameter.shape) for name, parameter in build_model_on_meta(config, CHARACTERS).named_parameters()
    }
    try:
        with h5py.File(path, "r") as file:
            weights = _convert(file, config, path)
    except UserError:
        raise
    except (OSError, ValueError) as error:  # the latter from arrays of unexpected shapes
        raise UserError(f"{path} is not a complete HDF5 file of these options ({error}); {_ADVICE}") from None
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise UserError(
                f"{path} has weights for {name} of shape {list(weights[name].shape)}, and by {OPTIONS} it is "
                f"{list(shape)}; copy both files from one model"
            )
        if not torch.isfinite(weights[name]).all():
            raise UserError(f"{path} has NaN or infinity in the weights for {name}; choose a model without them")
    return config, CHARACTERS, weights


def read_options(options: dict[str, Any], path: Path) -> BilmConfig:
    """The config of the model that options.json describes.

    Raises:
        UserError: A key is missing or has no valid value, or asks for something that is not supported.
    """
    try:
        lstm, characters = options["lstm"], options["char_cnn"]
        activation, number = characters["activation"], characters["n_characters"]
        filters, width = [tuple(each) for each in characters["filters"]], lstm["projection_dim"]
        content = {
            "layers": lstm.get("n_layers", 1),
            "hidden": 2 * width,
            "max_positions": _MAX_POSITIONS,
            "lstm_width": lstm["dim"],
            "skip_connections": lstm["use_skip_connections"],
            "cell_clip": lstm.get("cell_clip"),
            "projection_clip": lstm.get("proj_clip"),
            "characters": {
                "embedding": characters["embedding"]["dim"],
                "filters": filters,
                "highways": characters.get("n_highway") or 0,
                "max_characters": characters["max_characters_per_token"],
            },
        }
    except KeyError as error:
        raise UserError(
            f"{path} has no {error.args[0]}; expected the options of an ELMo that reads characters (lstm and "
            f"char_cnn); {_ADVICE}"
        ) from None
    except (AttributeError, TypeError) as error:
        raise UserError(f"{path} does not have the options of ELMo ({error}); {_ADVICE}") from None
    if activation != "relu":
        raise UserError(f"{path} has activation={activation!r}, and only relu is supported; choose a model with it")
    if number not in (CHARACTERS - 1, CHARACTERS):
        raise UserError(
            f"{path} has n_characters={number!r}; expected {CHARACTERS - 1}, the bytes and the markers of words and "
            f"sentences, or {CHARACTERS} with padding; choose another model"
        )
    try:
        config = BilmConfig.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "a value"
        raise UserError(f"{path} has an invalid {key}: {first['msg']}; {_ADVICE}") from None
    if config.lstm_width <= config.hidden // 2:
        raise UserError(
            f"{path} has dim={config.lstm_width} and projection_dim={config.hidden // 2}, with which the authors' code "
            "has no projection, and only LSTMs with one are supported; choose a model with them"
        )
    if sum(count for _, count in filters) == config.hidden // 2:
        raise UserError(
            f"{path} has as many filters as projection_dim={config.hidden // 2}, with which the authors' code has no "
            "projection of them, and only models with one are supported; choose another model"
        )
    return config


def _weight_file(source: Path) -> Path:
    """The one HDF5 file of a directory that may be one of weights: expected states may be beside it."""
    found = sorted(path for path in source.iterdir() if path.suffix in (".hdf5", ".h5"))
    named = [path for path in found if "weights" in path.stem] or found
    if len(named) != 1:
        has = ", ".join(path.name for path in named) or "none"
        advice = 'leave one with "weights" in its name' if named else "copy it there"
        raise UserError(f"{source} needs one .hdf5 file of weights beside {OPTIONS}, and has {has}; {advice}")
    return named[0]


def _convert(file: "h5py.File", config: BilmConfig, path: Path) -> dict[str, Tensor]:
    assert config.characters is not None

    def read(name: str) -> NDArray[np.float32]:
        import h5py

        if name not in file or not isinstance(file[name], h5py.Dataset):
            raise UserError(f"{path} has no {name}; copy both files from one model")
        array = file[name]
        if array.dtype.kind != "f":
            raise UserError(
                f"{path} has {name} of type {array.dtype}, and weights are floating-point numbers; {_ADVICE}"
            )
        return np.asarray(array[...], np.float32)

    embedding = read("char_embed")
    arrays = {"word.weight": np.concatenate([np.zeros_like(embedding[:1]), embedding])}  # 0 is no character
    for number in range(len(config.characters.filters)):
        kernel = read(f"CNN/W_cnn_{number}")  # (1, size, embedding, number)
        arrays[f"characters.convolutions.{number}.weight"] = kernel.reshape(kernel.shape[-3:]).transpose(2, 1, 0)
        arrays[f"characters.convolutions.{number}.bias"] = read(f"CNN/b_cnn_{number}")
    for number in range(config.characters.highways):
        for ours, theirs in (("gate", "carry"), ("transform", "transform")):
            name = f"characters.highways.{number}.{ours}"
            arrays[f"{name}.weight"] = read(f"CNN_high_{number}/W_{theirs}").T
            arrays[f"{name}.bias"] = read(f"CNN_high_{number}/b_{theirs}")
    arrays["characters.projection.weight"] = read("CNN_proj/W_proj").T
    arrays["characters.projection.bias"] = read("CNN_proj/b_proj")
    for layer in range(config.layers):
        for direction in range(2):
            cell = f"RNN_{direction}/RNN/MultiRNNCell/Cell{layer}/LSTMCell"
            kernel = _torch_gates(read(f"{cell}/W_0").T)  # (4 * C, inputs and state)
            name = f"layers.{layer}.directions.{direction}"
            arrays[f"{name}.input_weight"], arrays[f"{name}.state_weight"] = np.split(kernel, 2, axis=1)
            arrays[f"{name}.bias"] = _torch_gates(read(f"{cell}/B"))
            arrays[f"{name}.projection"] = read(f"{cell}/W_P_0").T
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def _torch_gates(gates: NDArray[np.float32]) -> NDArray[np.float32]:
    """TensorFlow's order of the gates is i, g, f, o, and torch's i, f, g, o."""
    if len(gates) % 4:
        raise UserError(f"an LSTM has {len(gates)} rows of weights, which are not those of four gates; {_ADVICE}")
    i, g, f, o = np.split(gates, 4)
    return np.concatenate([i, f, g, o])
