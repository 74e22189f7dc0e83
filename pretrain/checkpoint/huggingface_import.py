"""Import of a Hugging Face model: every tensor is checked against config.json before it is used.

A model with the same names but another computation, for example another activation function, is refused.
"""

import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from multihop.common.errors import UserError
from multihop.common.files import open_regular, sha256_file, sha256_json
from multihop.pretrain.checkpoint.huggingface_config import (
    CONFIG,
    WEIGHTS,
    read_json,
    read_model_config,
    read_source_vocab_size,
)
from multihop.pretrain.models.build import build_model_on_meta
from multihop.pretrain.models.config import AttentionConfig, ModelConfig
from multihop.pretrain.models.huggingface_weights import from_huggingface, names_of, to_huggingface
from multihop.pretrain.models.layers.huggingface_names import Names
from multihop.pretrain.models.layers.model import Model
from multihop.pretrain.models.layers.sinusoids import sinusoids

_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 8 * 2**20
_DTYPES = ("F64", "F32", "F16", "BF16")
_BUFFERS = re.compile(r"(.*\.)?(position_ids|token_type_ids|attn\.bias|attn\.masked_bias)")
log = logging.getLogger("multihop")

_StoredTensor = tuple[Any, str, Path]
"""The open file with a tensor, the tensor's name in the file, and the file's path."""


def is_huggingface(folder: Path) -> bool:
    """Whether a directory is a Hugging Face model rather than a run or a checkpoint of multihop's."""
    return (folder / CONFIG).exists()


def content_hash(source: Path) -> str:
    """SHA-256 that identifies a directory's weights, as a checkpoint's content hash does."""
    return sha256_json([sha256_file(path) for path in _weight_files(source)])


def import_model(source: Path) -> tuple[ModelConfig, int, dict[str, Tensor]]:
    """The model in a directory with config.json and model.safetensors, of a class with all heads, some or none.

    Returns:
        The model's config, the size of its vocabulary (the target's, if it has two), and float32 tensors by our names,
        without those of heads that the files lack. Tensors that are float32 in the file are memory-mapped views of it,
        and may be non-contiguous.

    Raises:
        UserError: The directory is not such a model, is damaged, or has a model with another computation.
    """
    opened = _open_model(source)
    model, names = opened.model, opened.names
    weights = {name: file.get_tensor(stored) for name, (file, stored, _) in opened.tensors.items()}
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            _, stored, path = opened.tensors[name]
            raise UserError(f"{path} has NaN or infinity in {stored}; choose a model without them")
    _check_sinusoids({name: weights.pop(name) for name in names.sinusoids if name in weights}, source)
    for copy, original in names.copies.items():
        if copy in weights and not torch.equal(weights.setdefault(original, weights[copy]), weights[copy]):
            raise UserError(
                f"{source} has {copy} and {original} with different values, and family {model.family} has one "
                "tensor for both; train it with tie_word_embeddings=true"
            )
    _check_complete(weights.keys(), opened.shapes, names, source)
    return model, opened.vocab_size, from_huggingface(model, opened.pad, weights, opened.source_vocab_size is not None)


def missing_parameters(source: Path) -> tuple[Model, list[str]]:
    """The model in a directory as `import_model` takes it, on the meta device, and the names of the parameters of heads
    that the files lack. No weights are read.

    Raises:
        UserError: As `import_model`, but for the values of the weights.
    """
    opened = _open_model(source)
    names, shapes = opened.names, opened.shapes
    present = {names.copies.get(name, name) for name in opened.tensors} - {*names.sinusoids}
    _check_complete(present, shapes, names, source)
    tensors = {name: torch.empty(shapes[name], device="meta") for name in present}
    ours = from_huggingface(opened.model, opened.pad, tensors, opened.source_vocab_size is not None)
    model = build_model_on_meta(opened.model, opened.vocab_size, opened.source_vocab_size)
    return model, [name for name, _ in model.named_parameters() if name not in ours]


@dataclass(frozen=True)
class _OpenedModel:
    """A Hugging Face directory whose tensors have the names, shapes and types that its config.json says."""

    model: ModelConfig
    vocab_size: int
    source_vocab_size: int | None
    pad: int
    names: Names
    shapes: dict[str, list[int]]
    """The shapes of all tensors of the class with all heads, by their names there."""
    tensors: dict[str, _StoredTensor]
    """Those of them that are stored."""


def _open_model(source: Path) -> _OpenedModel:
    model, vocab_size, pad = read_model_config(source)
    source_vocab_size = read_source_vocab_size(source)
    names = names_of(model.family, source_vocab_size is not None)
    files = {path: _open_weights(path) for path in _weight_files(source)}
    shapes = _expected(model, (vocab_size, source_vocab_size), pad, files, source)
    stored_tensors: dict[str, _StoredTensor] = {}
    for path, file in files.items():
        for name in sorted(file.keys()):
            known = _full_name(name, names, shapes)
            if known in stored_tensors:
                raise UserError(
                    f"{path} has the tensor {name} of {stored_tensors[known][2]} again; save the model again"
                )
            stored_tensors[known] = (file, name, path)
    _check_tensors(stored_tensors, shapes, names)
    return _OpenedModel(model, vocab_size, source_vocab_size, pad, names, shapes, stored_tensors)


def _weight_files(source: Path) -> list[Path]:
    """model.safetensors, or the files that model.safetensors.index.json names.

    Raises:
        UserError: There are none.
    """
    if (source / WEIGHTS).exists():
        return [source / WEIGHTS]
    if not (source / _INDEX).exists():
        hint = "copy the model with it"
        if (source / "pytorch_model.bin").exists() or (source / "pytorch_model.bin.index.json").exists():
            hint = (
                "pytorch_model.bin is a pickle, which could execute code: if you trust it, convert it with "
                "AutoModelForPreTraining.from_pretrained(DIR).save_pretrained(OTHER_DIR)"
            )
        raise UserError(f"{source} has no {WEIGHTS}; {hint}")
    parts = read_json(source / _INDEX).get("weight_map")
    if not isinstance(parts, dict) or not all(
        isinstance(part, str) and Path(part).name == part for part in parts.values()
    ):
        raise UserError(f"{source / _INDEX} does not map tensors to files of its directory; copy the model again")
    return [source / part for part in sorted(set(parts.values()))]


def _open_weights(path: Path) -> Any:
    """Open a file memory-mapped.

    Raises:
        UserError: It is missing, damaged or not a regular file.
    """
    try:
        with open_regular(path) as file:  # safetensors would block on a pipe, and read a device forever
            header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > _MAX_HEADER_BYTES:
            raise SafetensorError(f"its header has {header_bytes:,} bytes")
        return safe_open(path, "pt")
    except FileNotFoundError:
        raise UserError(f"{path} is missing, and {_INDEX} names it; copy the model again") from None
    except (SafetensorError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} is not a complete safetensors file ({reason}); copy the model again") from None


def _expected(
    model: ModelConfig, vocabularies: tuple[int, int | None], pad: int, files: Mapping[Path, Any], source: Path
) -> dict[str, list[int]]:
    """Name and shape of each tensor of a model of these sizes with all heads.

    Sizes that the files cannot have are refused before anything of these sizes is built: only two layers are built,
    because the first one may lack a norm.
    """
    assert isinstance(model, AttentionConfig), "transformers has no class of recurrent models with these equations"
    stored = [(name, file.get_slice(name).get_shape()) for file in files.values() for name in sorted(file.keys())]
    (vocab_size, source_vocab_size), two_vocabularies = vocabularies, vocabularies[1] is not None
    elements, names = sum(math.prod(shape) for _, shape in stored), names_of(model.family, two_vocabularies)
    has_positions = any(module.endswith("position") for module in names.modules) and not names.sinusoids
    for key, size, width in (
        ("decoder_vocab_size" if two_vocabularies else "vocab_size", vocab_size, model.embedding_width),
        ("vocab_size", source_vocab_size or 0, model.embedding_width),
        (names.sizes["max_positions"], model.max_positions if has_positions else 0, model.embedding_width),
        (names.sizes["hidden"], model.hidden, model.hidden),
        (names.sizes.get("intermediate", "intermediate"), model.intermediate, model.hidden),
    ):
        if size * width > elements:
            raise UserError(
                f"{source / CONFIG} has {key}={size}, which makes one matrix of {size * width:,} elements, and the "
                f"files have {elements:,} in all; copy both files from one model"
            )
    shallow = model.model_copy(update={"layers": min(2, model.layers)})
    with torch.device("meta"):
        tensors = to_huggingface(shallow, pad, build_model_on_meta(shallow, vocab_size, source_vocab_size).state_dict())
        built = {name: list(tensor.shape) for name, tensor in tensors}
    known, shapes = {_without_old_names(name) for name, _ in stored}, {}
    prefixes = [each.prefix for each in names.blocks.values() if "{}" in each.prefix]  # without {} all share one block
    for name, shape in built.items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix.format(1))), None)
        if prefix is None:
            shapes[name] = shape
            continue
        for layer in range(1, model.layers):
            full = prefix.format(layer) + name.removeprefix(prefix.format(1))
            if full not in known and full.removeprefix(names.prefix) not in known:
                raise UserError(
                    f"{source} lacks {full}, and {CONFIG} has {model.layers} layers; copy both files from one model"
                )
            shapes[full] = shape
    return shapes


def _without_old_names(name: str) -> str:
    """Rename gamma and beta, which the first releases called the parameters of a norm."""
    name = re.sub(r"(?<=LayerNorm\.)gamma$", "weight", name)
    return re.sub(r"(?<=LayerNorm\.)beta$", "bias", name)


def _full_name(name: str, names: Names, shapes: dict[str, list[int]]) -> str:
    """A stored tensor's name in the class with all heads."""
    name = _without_old_names(name)
    with_prefix = names.prefix + name
    return with_prefix if with_prefix in shapes or with_prefix in names.ignored else name


def _check_tensors(stored_tensors: dict[str, _StoredTensor], shapes: dict[str, list[int]], names: Names) -> None:
    """Remove tensors without a counterpart from `stored_tensors`, and refuse unexpected ones."""
    for name in list(stored_tensors):
        file, stored, path = stored_tensors[name]
        if name in names.ignored or _BUFFERS.fullmatch(name):
            log.info("%s: %s has no counterpart here and is ignored", path, stored)
            del stored_tensors[name]
            continue
        expected = shapes.get(names.copies.get(name, name))
        if name in names.sinusoids:
            expected = file.get_slice(stored).get_shape()
        if expected is None:
            raise UserError(
                f"{path} has the tensor {stored}, which {names.architecture} of this {CONFIG} does not have; copy both "
                "files from one model, or choose a model without it"
            )
        entry = file.get_slice(stored)
        if entry.get_shape() != expected:
            raise UserError(
                f"{path} has {stored} of shape {entry.get_shape()}, and by {CONFIG} it is {expected}; "
                "copy both files from one model"
            )
        if entry.get_dtype() not in _DTYPES:
            raise UserError(f"{path} has {stored} in {entry.get_dtype()}; supported are {', '.join(_DTYPES)}")


def _check_sinusoids(fixed: Mapping[str, Tensor], source: Path) -> None:
    for name, tensor in fixed.items():
        expected = None
        if tensor.ndim == 2:
            positions, width = tensor.shape
            expected = sinusoids(positions, width, tensor.device, torch.float32)
        tolerance = 1e-6 if tensor.dtype in (torch.float32, torch.float64) else 1e-2
        if expected is None or not torch.allclose(tensor.float(), expected, rtol=0, atol=tolerance):
            raise UserError(
                f"{source} has {name} with other values than sinusoids, which this family has; choose a model with them"
            )


def _check_complete(present: Iterable[str], expected: Iterable[str], names: Names, source: Path) -> None:
    """Check that no tensor is missing. A head may be absent as a whole, but not in part."""
    head_of = {name: next((head for head in names.heads if name.startswith(head)), "") for name in expected}
    present_heads = {head_of[name] for name in present if name in head_of} | {""}
    missing = [name for name in head_of if name not in present and head_of[name] in present_heads]
    if missing:
        raise UserError(
            f"{source} lacks {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}, {len(missing)} of the "
            f"{len(head_of)} tensors of {names.architecture}; copy the model again"
        )
