"""Conversion between Hugging Face's config.json and a recipe's `model` section."""

import logging
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from multihop.common.errors import UserError
from multihop.common.files import read_json_object
from multihop.pretrain.models.config import AttentionConfig, ModelConfig
from multihop.pretrain.models.families import FAMILIES, parse_model_config
from multihop.pretrain.models.huggingface_weights import names_of
from multihop.pretrain.models.layers.huggingface_names import CLASSIFIER_DROPOUT

log = logging.getLogger("multihop")

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_MAX_SIZE, _MAX_LAYERS = 2**31, 10_000
"""Limits: the number of layers that share their weights cannot be checked against the files."""
_SHARE = "share_encoder_decoder_embeddings"
_SAME_ACTIVATION = {"gelu_pytorch_tanh": "gelu_new"}
"""Names of the same function."""


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file of a Hugging Face directory.

    Raises:
        UserError: It is missing or not a JSON object.
    """
    try:
        return read_json_object(path, advice="copy the model again")
    except FileNotFoundError:
        raise UserError(f"{path.parent} is not a Hugging Face model: it has no {path.name}") from None


def read_source_vocab_size(source: Path) -> int | None:
    """The size of the source's vocabulary if a translating model has two vocabularies, else None.

    Raises:
        UserError: It is not a valid size.
    """
    config = read_json(source / CONFIG)
    if not _has_two_vocabularies(config):
        return None
    return _size(config, "vocab_size", _MAX_SIZE, source / CONFIG)


def _has_two_vocabularies(config: dict[str, Any]) -> bool:
    return config.get(_SHARE) is False


def _size(config: dict[str, Any], key: str, largest: int, path: Path) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 < value <= largest:
        raise UserError(f"{path} has {key}={reprlib.repr(value)}; it must be an integer from 1 to {largest}")
    return value


def read_model_config(source: Path) -> tuple[ModelConfig, int, int]:
    """The model that a directory's config.json describes, its vocabulary's size (the target's) and its pad_token_id.

    Raises:
        UserError: It describes a model of a family that multihop does not have, one whose equations differ, or no model
            at all.
    """
    path = source / CONFIG
    config = read_json(path)
    family = _family_of(config, path)
    names = names_of(family)
    for key, (ours, when_absent) in names.fixed.items():
        theirs = config.get(key, when_absent)
        if theirs != ours and not (isinstance(theirs, str) and _SAME_ACTIVATION.get(theirs) == ours):
            raise UserError(
                f"{path} has {key}={reprlib.repr(theirs)}, and family {family} needs {ours!r}; choose a model "
                "that has it"
            )
    for key, other in names.repeated.items():
        if config.get(key) != config.get(other):
            raise UserError(
                f"{path} has {key}={reprlib.repr(config.get(key))} and {other}={reprlib.repr(config.get(other))}, and "
                f"family {family} needs the same; choose a model that has it"
            )
    sizes: dict[str, Any] = {}
    for ours, theirs in names.sizes.items():
        is_absent = ours in names.windows and theirs not in config
        if not is_absent and not (ours in names.null_sizes and config.get(theirs) is None):
            sizes[ours] = _size(config, theirs, _MAX_LAYERS if ours == "layers" else _MAX_SIZE, path)
        if ours in names.windows and sizes.get(ours, 0) > 1:
            sizes[ours] -= sizes[ours] % 2
        if ours in names.windows and names.windows[ours] in config:
            sizes[ours] = 2 * _size(config, names.windows[ours], _MAX_SIZE, path)
    vocab_key = "decoder_vocab_size" if _has_two_vocabularies(config) else "vocab_size"
    vocab_size = _size(config, vocab_key, _MAX_SIZE, path)
    if FAMILIES[family].translates and config.get("decoder_vocab_size") not in (None, vocab_size):
        raise UserError(
            f"{path} has {_SHARE}, and vocabularies of {vocab_size} and {reprlib.repr(config['decoder_vocab_size'])} "
            "tokens; copy the model again"
        )
    pad = config.get("pad_token_id", 1)
    if names.positions_after_pad:
        if type(pad) is not int or not 0 <= pad < sizes["max_positions"] - 1:
            raise UserError(
                f"{path} has pad_token_id={reprlib.repr(pad)} and max_position_embeddings={sizes['max_positions']}, "
                "and positions start after pad_token_id; copy the model again"
            )
        sizes["max_positions"] -= names.unused_positions(pad)
    if names.thetas:
        sizes |= _rope_thetas(config, names.thetas, FAMILIES[family].config, path)
    if names.layer_types:
        sizes |= _global_layers(config, names.layer_types, path)
    dropout = config.get(names.dropout[0], names.dropout_when_absent)
    rates = {name: config[name] for name in names.dropout if name in config and name != CLASSIFIER_DROPOUT}
    if any(rate != dropout for rate in rates.values()):
        text = ", ".join(f"{name}={reprlib.repr(rate)}" for name, rate in rates.items())
        log.warning("%s has several dropout rates, %s; model.dropout=%s stands for all", path, text, dropout)
    try:
        model = parse_model_config({"family": family, **sizes, "dropout": dropout})
    except ValidationError as error:
        raise _invalid(error, {**names.sizes, "dropout": names.dropout[0]}, path) from None
    return model, vocab_size, pad


def _invalid(error: ValidationError, keys: Mapping[str, str], path: Path) -> UserError:
    """What to say of values in config.json that `model` does not accept.

    Args:
        keys: Field of `model` -> key in config.json, where they differ.
    """
    first = error.errors()[0]
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" or not first["loc"]:
        reason = reason.rpartition("; ")[0] or reason  # without what to change in a recipe
        return UserError(f"{path} is not a valid model: {reason}; choose another model")
    field = str(first["loc"][-1])
    return UserError(
        f"{path} has {keys.get(field, field)}={reprlib.repr(first['input'])}: {reason[0].lower()}{reason[1:]}; choose "
        "another model"
    )


def _family_of(config: dict[str, Any], path: Path) -> str:
    known = {names_of(name).model_type: name for name, family in FAMILIES.items() if family.auto_class}
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in known:
        raise UserError(f"{path} has model_type={reprlib.repr(model_type)}; known are {', '.join(known)}")
    return known[model_type]


def _rope_thetas(
    config: dict[str, Any], thetas: Mapping[str, str], kind: type[ModelConfig], path: Path
) -> dict[str, Any]:
    """The bases of the rotary positions, by field of `model`; those that config.json does not have are left out.

    Args:
        thetas: As in `Names`; the first is the base of global layers, which is also that of others whose base is null.

    Raises:
        UserError: The positions are scaled, or rotate only a part of each head.
    """
    found: dict[str, Any] = {}
    of_global = next(iter(thetas.values()))
    given = config.get("rope_parameters") or {}
    if isinstance(given, dict) and not given.keys() <= thetas.keys():
        raise UserError(
            f"{path} has rope_parameters={reprlib.repr(given)}, and family {config.get('model_type')} has them for "
            f"{' and '.join(thetas)}; copy the model again"
        )
    for layer_type, field in thetas.items():
        by_type, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
        own = (by_type.get(layer_type) or {}) if isinstance(by_type, dict) else by_type
        for key, part, value in (("rope_parameters", own, by_type), ("rope_scaling", scaling, scaling)):
            if not isinstance(part, dict):
                raise UserError(f"{path} has {key}={reprlib.repr(value)}, which is not an object; copy the model again")
        parameters = {**own, **scaling}  # as transformers merges them
        named = [part[key] for part in (scaling, own) for key in ("rope_type", "type") if key in part]
        rope_type = named[0] if named else "default"
        factor = parameters.get("partial_rotary_factor", 1.0)
        for key, value, supported in (("rope_type", rope_type, "default"), ("partial_rotary_factor", factor, 1.0)):
            if value != supported:
                raise UserError(
                    f"{path} has {key}={reprlib.repr(value)}, and multihop supports only unscaled rotary positions "
                    "over the whole head; choose a model with them"
                )
        theta = parameters.get("rope_theta", config.get(field))
        if theta is not None:
            found[field] = theta
        elif field in config and field != of_global:
            found[field] = found.get(of_global, kind.model_fields[of_global].default)  # as transformers 4
    return found


def _global_layers(config: dict[str, Any], field: str, path: Path) -> dict[str, Any]:
    """After how many layers another one is global.

    Raises:
        UserError: Global layers do not come at equal distances, from the first one on.
    """
    types = config.get("layer_types")
    if types is None:
        return {} if config.get(field) is None else {field: config[field]}
    if not isinstance(types, list):
        raise UserError(f"{path} has layer_types={reprlib.repr(types)}, which is not a list; copy the model again")
    after = next((layer for layer, kind in enumerate(types) if layer and kind == "full_attention"), len(types))
    expected = ["sliding_attention" if layer % after else "full_attention" for layer in range(len(types))]
    if types != expected or len(types) != config.get("num_hidden_layers"):
        raise UserError(
            f"{path} has layer_types={reprlib.repr(types)}, and multihop needs a global first layer and a fixed "
            "interval between global layers; choose a model with them"
        )
    return {field: after}


def config_json(
    model: ModelConfig, vocab_size: int, special_ids: Mapping[str, int], source_vocab_size: int | None = None
) -> dict[str, Any]:
    """The content of config.json.

    Args:
        special_ids: The ids of the special tokens: pad, cls and sep of an encoder, end of a causal model, pad and end
            of a translating one.
        source_vocab_size: The size of the source's vocabulary if source and target have separate ones.

    Raises:
        UserError: The transformers class does not support these sizes, or a special token is not in `special_ids`.
    """
    names, family = names_of(model.family), FAMILIES[model.family]
    causal, translates = family.causal, family.translates
    assert isinstance(model, AttentionConfig), "transformers has no class of recurrent models with these equations"
    if getattr(model, "positions", None) == "relative":
        raise UserError(
            f"transformers has no {names.architecture} with relative positions, and this model has "
            "positions=relative; it cannot be exported"
        )
    for key, value in names.options.items():
        if getattr(model, key) != value:
            raise UserError(
                f"{names.architecture} has {key}={value}, and this model has {key}={getattr(model, key)}; it cannot be "
                "exported"
            )
    if "intermediate" not in names.sizes and model.intermediate != 4 * model.hidden:
        raise UserError(
            f"{names.architecture} has a fixed intermediate size of 4 * hidden = {4 * model.hidden}, and this model "
            f"has intermediate={model.intermediate}; it cannot be exported"
        )
    needed = {"end"} if causal else {"pad", "end"} if translates else {"pad", "cls", "sep"}
    if missing := sorted(needed - set(special_ids)):
        raise UserError(
            f"a {names.model_type} model needs the special tokens {sorted(needed)}, and {missing} are not among the "
            f"tokenizer's {sorted(special_ids)}; export it with the tokenizer that it was trained with"
        )
    sizes = {theirs: getattr(model, ours) for ours, theirs in names.sizes.items()}
    if causal:
        ids = {"bos_token_id": special_ids["end"], "eos_token_id": special_ids["end"], "pad_token_id": None}
        if names.special_ids:
            ids = dict.fromkeys((*ids, "cls_token_id", "sep_token_id"), special_ids["end"])
            # transformers never updates the embedding of pad_token_id, and the end token's is trained.
            ids["pad_token_id"] = special_ids.get("unk", special_ids["end"])
    elif translates:
        ids = _translating_ids(special_ids)
    else:
        tokens = {"bos_token_id": "cls", "eos_token_id": "sep", "pad_token_id": "pad"}
        if names.special_ids:
            tokens |= {"cls_token_id": "cls", "sep_token_id": "sep"}
        ids = {key: special_ids[token] for key, token in tokens.items()}
    if names.positions_after_pad:
        sizes[names.sizes["max_positions"]] += names.unused_positions(special_ids["pad"])
    vocabularies: dict[str, Any] = {"vocab_size": vocab_size}
    if translates:
        two_vocabularies = source_vocab_size is not None
        vocabularies = {
            "vocab_size": source_vocab_size if two_vocabularies else vocab_size,
            "decoder_vocab_size": vocab_size,
            _SHARE: not two_vocabularies,
        }
    return {
        "architectures": [names.architecture],
        "model_type": names.model_type,
        **vocabularies,
        **sizes,
        **{key: sizes[other] for key, other in names.repeated.items()},
        **{key: value for key, (value, _) in names.fixed.items()},
        **dict.fromkeys(names.dropout, model.dropout),
        **{field: getattr(model, field) for field in (*names.thetas.values(), names.layer_types) if field},
        **ids,
        "initializer_range": 0.02,
    }


def _translating_ids(special_ids: Mapping[str, int]) -> dict[str, int | None]:
    """The special ids in config.json of a translating model, whose decoder starts with the padding token."""
    pad, end = special_ids["pad"], special_ids["end"]
    return {
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "decoder_start_token_id": pad,
        "forced_eos_token_id": None,
    }


def generation_json(model: ModelConfig, special_ids: Mapping[str, int]) -> dict[str, Any] | None:
    """The content of generation_config.json; None for a model that does not generate."""
    family = FAMILIES[model.family]
    if family.translates:
        ids = _translating_ids(special_ids)
        return {**{key: value for key, value in ids.items() if value is not None}, "max_length": model.max_positions}
    if family.causal:
        return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), special_ids["end"])
    return None
