"""Export of a checkpoint as Hugging Face's config.json and model.safetensors."""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multihop.common.errors import UserError
from multihop.common.files import atomic_replace, write_atomically
from multihop.pretrain.checkpoint.huggingface_config import CONFIG, WEIGHTS, config_json, generation_json
from multihop.pretrain.checkpoint.reader import CheckpointReader
from multihop.pretrain.checkpoint.verify import verify
from multihop.pretrain.models.build import build_model_on_meta
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.huggingface_weights import to_huggingface


def export_model(
    checkpoint: str,
    model: ModelConfig,
    vocab_size: int,
    special_ids: dict[str, int],
    out: Path,
    source_vocab_size: int | None = None,
) -> None:
    """Write a checkpoint as config.json, model.safetensors and, for a model that generates, generation_config.json to
    `out`.

    Only one tensor at a time is in memory.

    Args:
        source_vocab_size: The size of the source's vocabulary if source and target have separate ones.

    Raises:
        UserError: The checkpoint is damaged, is of another model, or has no counterpart in transformers.
    """
    config = config_json(model, vocab_size, special_ids, source_vocab_size)
    saved = verify(checkpoint)
    meta = build_model_on_meta(model, vocab_size, source_vocab_size).state_dict()
    for name in [*meta, *saved.parameters]:
        stored, expected = saved.parameters.get(name), list(meta[name].shape) if name in meta else None
        if stored != expected:
            raise UserError(
                f"{checkpoint} has {name} of shape {stored}, and by this recipe a {model.family} has it of shape "
                f"{expected} (None: not at all); export it with the recipe of its own run"
            )
    pad = special_ids.get("pad", 0)
    shapes = {name: list(tensor.shape) for name, tensor in to_huggingface(model, pad, meta)}
    out.mkdir(parents=True, exist_ok=True)
    with (
        CheckpointReader(checkpoint) as reader,
        atomic_replace(out / WEIGHTS) as temporary,
        open(temporary, "wb") as file,
    ):
        file.write(_header(shapes))
        for _, tensor in to_huggingface(model, pad, _LazyWeights(reader, saved.parameters)):
            file.write(tensor.contiguous().numpy().astype("<f4", copy=False).data)
    generation = generation_json(model, special_ids)
    if generation is not None:
        write_atomically(out / "generation_config.json", _json(generation))
    write_atomically(out / CONFIG, _json(config))  # last, because a directory without it is not a model


class _LazyWeights(Mapping[str, Tensor]):
    """A checkpoint's weights, each read on access."""

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
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # which transformers requires
    offset = 0
    for name, shape in shapes.items():
        stop = offset + 4 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
