"""Hugging Face's folders: ours written as config.json and model.safetensors, and theirs read.

Where a file of theirs means something else than ours without a word, such as another activation, it is refused.
"""

import json
import logging
import math
import re
import reprlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data_prep.files import open_regular, read_json_object, replacing, sha256_file, sha256_json, write_atomically
from pretrain.checkpoint import CheckpointReader, verify
from pretrain.config import ModelConfig
from pretrain.huggingface_names import FAMILIES, Names, config_json, from_huggingface, to_huggingface
from pretrain.models import outline_model

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 8 * 2**20
_MOST, _MOST_LAYERS = 2**31, 10_000
"""Of a size. ALBERT's layers are in no file, which could say whether there are so many."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_BUFFERS = re.compile(r"(.*\.)?(position_ids|token_type_ids|attn\.bias|attn\.masked_bias)")
_SAME_ACTIVATION = {"gelu_pytorch_tanh": "gelu_new"}
"""Names of one formula."""

log = logging.getLogger("multihop")


def export_model(checkpoint: str, model: ModelConfig, vocab_size: int, special_ids: dict[str, int], out: Path) -> None:
    """Write a checkpoint of ours as config.json, model.safetensors and, of a decoder, generation_config.json in `out`.

    One tensor at a time is in memory.

    Raises:
        ValueError: the checkpoint is not whole, is of another model, or has no counterpart there.
    """
    config = config_json(model, vocab_size, special_ids)
    saved = verify(checkpoint)
    outline = outline_model(model, vocab_size).state_dict()
    for name in [*outline, *saved.parameters]:
        there, here = saved.parameters.get(name), list(outline[name].shape) if name in outline else None
        if there != here:
            raise ValueError(
                f"{checkpoint} has {name} of shape {there}, and a {model.family} of this recipe's sizes {here} (None: "
                "there is none); export it with the recipe of its own run"
            )
    offset = special_ids["pad"] + 1 if model.family == "roberta" else 0
    shapes = {name: list(tensor.shape) for name, tensor in to_huggingface(model, offset, outline)}
    out.mkdir(parents=True, exist_ok=True)
    with (
        CheckpointReader(checkpoint) as reader,
        replacing(out / WEIGHTS) as temporary,
        open(temporary, "wb") as file,
    ):
        file.write(_header(shapes))
        for _, tensor in to_huggingface(model, offset, _OneByOne(reader, saved.parameters)):
            file.write(tensor.contiguous().numpy().astype("<f4", copy=False).data)
    if FAMILIES[model.family].conv1d:
        ids = {"bos_token_id": special_ids["end"], "eos_token_id": special_ids["end"]}
        write_atomically(out / "generation_config.json", _json({**ids, "pad_token_id": special_ids["end"]}))
    write_atomically(out / CONFIG, _json(config))  # last: without it no folder is taken for a model


class _OneByOne(Mapping[str, Tensor]):
    """A checkpoint's weights, each read when it is asked for."""

    def __init__(self, reader: CheckpointReader, shapes: dict[str, list[int]]) -> None:
        self._reader, self._shapes = reader, shapes

    def __getitem__(self, name: str) -> Tensor:
        shape = torch.Size(self._shapes[name])
        return self._reader.read("weight", name, 0, shape.numel()).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _header(shapes: dict[str, list[int]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    offset = 0
    for name, shape in shapes.items():
        stop = offset + 4 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def is_huggingface(folder: Path) -> bool:
    """Whether a folder is a model of Hugging Face's rather than a run or a checkpoint of ours."""
    return (folder / CONFIG).exists()


def content_hash(source: Path) -> str:
    """Tells a folder's weights from any others, as a checkpoint's content hash does."""
    return sha256_json([sha256_file(path) for path in _weight_files(source)])


def import_model(source: Path) -> tuple[ModelConfig, int, dict[str, Tensor]]:
    """The model in a folder with config.json and model.safetensors, of a class with all heads, some or none.

    Returns:
        The model's config, the size of its vocabulary, and float32 tensors by our names. Heads that the files lack are
        not among them. Tensors that are float32 in the file are views of it, mapped and not read, some not contiguous.

    Raises:
        ValueError: the folder is not such a model, is damaged, or is a model that differs from ours.
    """
    config = _read_json(source / CONFIG)
    family, model, vocab_size = _model_of(config, source / CONFIG)
    names = FAMILIES[family]
    pad = config.get("pad_token_id", 1)
    offset = pad + 1 if family == "roberta" else 0
    files = {path: _open(path) for path in _weight_files(source)}
    shapes = _expected(model, vocab_size, offset, files, source)
    where: dict[str, tuple[Any, str, Path]] = {}
    for path, file in files.items():
        for name in sorted(file.keys()):
            known = _full_name(name, names, shapes)
            if known in where:
                raise ValueError(f"{path} has the tensor {name} of {where[known][2]} again; write the folder anew")
            where[known] = (file, name, path)
    _check_tensors(where, shapes, names)
    weights = {name: file.get_tensor(stored) for name, (file, stored, _) in where.items()}
    for copy, original in names.copies.items():
        if copy in weights and not torch.equal(weights.setdefault(original, weights[copy]), weights[copy]):
            raise ValueError(
                f"{source} has {copy} and {original} with different values, and a {family} here has one tensor for "
                "both; train it with tie_word_embeddings=true"
            )
    _check_complete(weights.keys(), shapes, names, source)
    return model, vocab_size, from_huggingface(model, offset, weights)


def _expected(
    model: ModelConfig, vocab_size: int, offset: int, files: Mapping[Path, Any], source: Path
) -> dict[str, list[int]]:
    """Name and shape of each tensor that a model of these sizes has with all heads.

    Only one layer of it is outlined: what config.json says is believed where the files have as much.
    """
    stored = [(name, file.get_slice(name).get_shape()) for file in files.values() for name in sorted(file.keys())]
    elements, names = sum(math.prod(shape) for _, shape in stored), FAMILIES[model.family]
    for key, size, width in (
        ("vocab_size", vocab_size, model.embedding),
        (names.sizes["max_positions"], model.max_positions, model.embedding),
        (names.sizes["hidden"], model.hidden, model.hidden),
        (names.sizes.get("intermediate", "intermediate"), model.intermediate, model.hidden),
    ):
        if size * width > elements:
            raise ValueError(
                f"{source / CONFIG} has {key}={size}, of which one matrix alone has {size * width:,} elements, and the "
                f"files have {elements:,} in all; copy both files from one model"
            )
    one_layer = model.model_copy(update={"layers": 1})
    with torch.device("meta"):
        there = to_huggingface(one_layer, offset, outline_model(one_layer, vocab_size).state_dict())
        outline = {name: list(tensor.shape) for name, tensor in there}
    if model.family == "albert":  # whose layers are one
        return outline
    first, known = names.block.format(0), {_without_old_names(name) for name, _ in stored}
    shapes = {}
    for name, shape in outline.items():
        for layer in range(model.layers if name.startswith(first) else 1):
            full = names.block.format(layer) + name.removeprefix(first) if name.startswith(first) else name
            if layer and full not in known and full.removeprefix(names.prefix) not in known:
                raise ValueError(
                    f"{source} lacks {full}, and by {CONFIG} there are {model.layers} layers; copy both from one model"
                )
            shapes[full] = shape
    return shapes


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, advice="copy the model again")
    except FileNotFoundError:
        raise ValueError(f"{path.parent} is no Hugging Face model: it has no {path.name}") from None


def _model_of(config: dict[str, Any], path: Path) -> tuple[str, ModelConfig, int]:
    known = {names.model_type: family for family, names in FAMILIES.items()}
    given = config.get("model_type")
    if not isinstance(given, str) or given not in known:
        raise ValueError(
            f"{path} has model_type={reprlib.repr(given)}, and known are {', '.join(known)}; take one of those"
        )
    family = known[given]
    names = FAMILIES[family]
    for key, (ours, when_absent) in names.fixed.items():
        theirs = config.get(key, when_absent)
        if theirs != ours and not (isinstance(theirs, str) and _SAME_ACTIVATION.get(theirs) == ours):
            raise ValueError(
                f"{path} has {key}={reprlib.repr(theirs)}, and a {family} here has {ours!r}; take a model that has it"
            )
    sizes: dict[str, Any] = {ours: config.get(theirs) for ours, theirs in names.sizes.items()}
    if family == "gpt2" and sizes["intermediate"] is None:
        del sizes["intermediate"]  # 4 * hidden there too
    keys = {**names.sizes, "vocab_size": "vocab_size"}
    for ours, value in {**sizes, "vocab_size": config.get("vocab_size")}.items():
        most = _MOST_LAYERS if ours == "layers" else _MOST
        if type(value) is not int or not 0 < value <= most:
            raise ValueError(
                f"{path} has {keys[ours]}={reprlib.repr(value)}, which is no size; it must be a whole number from 1 to "
                f"{most}"
            )
    if family == "roberta":
        pad = config.get("pad_token_id", 1)
        if type(pad) is not int or not 0 <= pad < sizes["max_positions"] - 1:
            raise ValueError(
                f"{path} has pad_token_id={reprlib.repr(pad)} and max_position_embeddings="
                f"{sizes['max_positions']}, and positions begin behind pad_token_id; copy the model again"
            )
        sizes["max_positions"] -= pad + 1
    dropout = config.get(names.dropout[0], 0.0 if family == "albert" else 0.1)
    try:
        model = ModelConfig.model_validate({"family": family, **sizes, "dropout": dropout})
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ValueError(f"{path} describes no model: {reason}") from None
    return family, model, config["vocab_size"]


def _weight_files(source: Path) -> list[Path]:
    if (source / WEIGHTS).exists():
        return [source / WEIGHTS]
    if not (source / _INDEX).exists():
        hint = "copy the model with it"
        if (source / "pytorch_model.bin").exists() or (source / "pytorch_model.bin.index.json").exists():
            hint = (
                "pytorch_model.bin is a pickle, which could execute code: write it anew by "
                "AutoModelForPreTraining.from_pretrained(FOLDER).save_pretrained(OTHER_FOLDER) if you trust it"
            )
        raise ValueError(f"{source} has no {WEIGHTS}; {hint}")
    parts = _read_json(source / _INDEX).get("weight_map")
    if not isinstance(parts, dict) or not all(
        isinstance(part, str) and Path(part).name == part for part in parts.values()
    ):
        raise ValueError(
            f"{source / _INDEX} does not say which file of the folder has which tensor; copy the model again"
        )
    return [source / part for part in sorted(set(parts.values()))]


def _open(path: Path) -> Any:
    try:
        with open_regular(path) as file:  # which the library would wait for, or read for ever
            header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > _LONGEST_HEADER:
            raise SafetensorError(f"its header is said to have {header_bytes:,} bytes")
        return safe_open(path, "pt")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing, and {_INDEX} names it; copy the model again") from None
    except (SafetensorError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} is no whole safetensors file ({reason}); copy the model again") from None


def _without_old_names(name: str) -> str:
    """The first releases called a norm's parameters otherwise."""
    name = re.sub(r"(?<=LayerNorm\.)gamma$", "weight", name)
    return re.sub(r"(?<=LayerNorm\.)beta$", "bias", name)


def _full_name(name: str, names: Names, shapes: dict[str, list[int]]) -> str:
    """A stored tensor's name in the class with all heads."""
    name = _without_old_names(name)
    with_prefix = names.prefix + name
    return with_prefix if with_prefix in shapes or with_prefix in names.passed_over else name


def _check_tensors(where: dict[str, tuple[Any, str, Path]], shapes: dict[str, list[int]], names: Names) -> None:
    """Takes out of `where` what is known to be of no use; refuses all else that is not expected."""
    for name in list(where):
        file, stored, path = where[name]
        if name in names.passed_over or _BUFFERS.fullmatch(name):
            log.info("%s: %s is passed over, there is nothing like it here", path, stored)
            del where[name]
            continue
        expected = shapes.get(names.copies.get(name, name))
        if expected is None:
            raise ValueError(
                f"{path} has the tensor {stored}, and {names.architecture} of this {CONFIG} has none of that name; "
                "take a model without it"
            )
        entry = file.get_slice(stored)
        if entry.get_shape() != expected:
            raise ValueError(
                f"{path} has {stored} of shape {entry.get_shape()}, and by {CONFIG} it is {expected}; "
                "copy both files from one model"
            )
        if entry.get_dtype() not in _FLOATS:
            raise ValueError(f"{path} has {stored} in {entry.get_dtype()}, and known are {', '.join(_FLOATS)}")


def _check_complete(present: Iterable[str], expected: Iterable[str], names: Names, source: Path) -> None:
    """A head may be absent, but not a part of one."""
    head_of = {name: next((head for head in names.heads if name.startswith(head)), "") for name in expected}
    begun = {head_of[name] for name in present if name in head_of} | {""}
    lacking = [name for name in head_of if name not in present and head_of[name] in begun]
    if lacking:
        raise ValueError(
            f"{source} lacks {', '.join(lacking[:3])}{', …' if len(lacking) > 3 else ''}, {len(lacking)} of the "
            f"{len(head_of)} tensors of {names.architecture}; copy the model again"
        )
