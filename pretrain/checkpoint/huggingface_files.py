"""The safetensors files of a Hugging Face directory: which they are, and what opens them without trusting them."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from multihop.common.errors import UserError
from multihop.common.files import open_regular
from multihop.pretrain.checkpoint.huggingface_config import read_json

WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 8 * 2**20


def weight_files(source: Path) -> list[Path]:
    """model.safetensors, or the files that model.safetensors.index.json names. Raises UserError if there are none."""
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


def open_weights(path: Path) -> Any:
    """The file, mapped and not read. Raises UserError where it is missing, damaged or not a regular file."""
    try:
        with open_regular(path) as file:  # safetensors would block on a pipe, and read a device for ever
            header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > _MAX_HEADER_BYTES:
            raise SafetensorError(f"its header has {header_bytes:,} bytes")
        return safe_open(path, "pt")
    except FileNotFoundError:
        raise UserError(f"{path} is missing, and {_INDEX} names it; copy the model again") from None
    except (SafetensorError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} is not a complete safetensors file ({reason}); copy the model again") from None
