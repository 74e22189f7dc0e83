"""Compares what is equal on all ranks of a run: replicated tensors, hyperparameters, counters, installed versions.

After a bit has flipped in one rank's copy of the weights, the ranks average gradients of different models, and nothing
in the loss shows it. What only one rank holds, such as a slice of the optimizer's state, has no copy to compare with.
"""

import hashlib
import json
import platform
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import multihop.common
import multihop.data_prep
import multihop.pretrain
from multihop.common.errors import UserError
from multihop.common.files import canonical_json
from multihop.pretrain.engine.ranks import Ranks

_PACKAGES = ("torch", "deepspeed", "numpy", "pyarrow", "triton")
_WORD_BYTES = 4
_CHUNK = 2**20
"""Integers that are widened to 64 bits and summed at once."""
_ROW = 1024
"""Integers in a row of the grid whose sums by row and by column give a checksum."""
CHECKSUM_DIGITS = 8
_SHOWN = 3
"""Most differences that a message names."""


class InconsistentStateError(RuntimeError):
    """The ranks differ in what is equal in every correct run, or do not have what the recipe sets. Raised on all ranks
    at once."""


def fletcher(integers: Tensor) -> Tensor:
    """Fletcher's checksum (1982) of integers (n,), modulo 2^64: int64 (2,), on their device.

    Their sum, which any single flipped bit changes; and the sum of each times its position from 1. With integers of at
    most 32 bits and fewer than 2^32 of them, this one changes as well if two flipped bits cancel in the first, or two
    integers are exchanged. In integers of 64 bits, two flips of the highest one can cancel in both.
    """
    sums = torch.zeros(2, dtype=torch.int64, device=integers.device)
    wide = torch.empty(min(_CHUNK, len(integers)), dtype=torch.int64, device=integers.device)
    for number, part in enumerate(integers.split(_CHUNK)):
        total, weighted = _fletcher(wide[: len(part)].copy_(part))
        sums += torch.stack([total, weighted + number * _CHUNK * total])
    return sums


def _fletcher(integers: Tensor) -> tuple[Tensor, Tensor]:
    """The two sums of Fletcher's checksum, of int64 (n,)."""
    whole, device = len(integers) // _ROW * _ROW, integers.device
    grid, rest = integers[:whole].view(-1, _ROW), integers[whole:]
    # The integer in row r and column c has the position r * _ROW + c + 1.
    rows, columns = grid.sum(1), grid.sum(0)
    weighted = _ROW * (rows * torch.arange(len(rows), device=device)).sum()
    weighted += (columns * torch.arange(1, _ROW + 1, device=device)).sum()
    weighted += (rest * torch.arange(whole + 1, len(integers) + 1, device=device)).sum()
    return rows.sum() + rest.sum(), weighted


def words(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements, and zeros up to a whole word: int32 (n,). A view where that is possible."""
    if not tensor.numel():
        return torch.zeros(0, dtype=torch.int32, device=tensor.device)
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    content = flat.view(torch.uint8)
    if len(content) % _WORD_BYTES or content.storage_offset() % _WORD_BYTES:
        padded = content.new_zeros(len(content) + -len(content) % _WORD_BYTES)
        padded[: len(content)] = content
        content = padded
    return content.view(torch.int32)


def check_replicas(ranks: Ranks, tensors: Iterable[tuple[str, Tensor]], facts: Mapping[str, Any], step: int) -> None:
    """Compare tensors and other values over the ranks. A collective call, which waits for the device once.

    Args:
        tensors: Names and replicated tensors, in the same order on all ranks.
        facts: JSON values by name.
        step: Steps done, for the message.

    Raises:
        InconsistentStateError: They differ; the message names the ranks, and the first of what differs.
    """
    names, sums = [], []
    for name, tensor in tensors:
        names.append(name)
        sums.append(fletcher(words(tensor)).to(ranks.device))
    table = torch.stack(sums).cpu() if sums else torch.zeros(0, 2, dtype=torch.int64)
    content = canonical_json([names, dict(facts)])
    digest = hashlib.sha256(table.numpy().tobytes() + content).digest()
    if ranks.all_equal(_number(digest)):
        return
    found = [*_differing_tensors(ranks, names, table), *differing_facts(ranks, facts)]
    more = f", and {len(found) - _SHOWN:,} more differences" if len(found) > _SHOWN else ""
    raise InconsistentStateError(
        f"the ranks differ after step {step}: {'; '.join(found[:_SHOWN])}{more}; nothing was saved since then, and a "
        "rerun resumes from the newest checkpoint; if a host is named again, test its memory and its GPUs"
    )


def state_checksums(ranks: Ranks, names: Sequence[str], slices: Mapping[str, Tensor]) -> str:
    """Checksums of the weights and moments of each parameter: `CHECKSUM_DIGITS` hexadecimal digits for each, in the
    order of the parameters' names. A collective call, which waits for the device once.

    The sums of a tensor are those of its slices, with positions from where they begin; so they do not depend on how
    the ranks divide it.

    Args:
        names: All tensors of the state, KIND/NAME.
        slices: What this rank holds of them, KIND/NAME@START -> (numel,).
    """
    table = torch.zeros(len(names), 2, dtype=torch.int64)
    rows = {name: number for number, name in enumerate(names)}
    if slices:
        for key, (total, weighted) in zip(
            slices, torch.stack([fletcher(each.view(torch.int32)) for each in slices.values()]).cpu(), strict=True
        ):
            name, _, start = key.rpartition("@")
            table[rows[name]] += torch.stack([total, weighted + int(start) * total])
    ranks.all_reduce_sum_(table)
    by_parameter: dict[str, bytes] = {}
    for name in sorted(names):
        parameter = name.partition("/")[2]
        by_parameter[parameter] = by_parameter.get(parameter, b"") + table[rows[name]].numpy().tobytes()
    return "".join(hashlib.sha256(by_parameter[each]).hexdigest()[:CHECKSUM_DIGITS] for each in sorted(by_parameter))


def check_installed(ranks: Ranks) -> None:
    """Check that all ranks run the same code with the same libraries. A collective call.

    Raises:
        UserError: They do not.
    """
    installed = installed_versions()
    if ranks.all_equal(_number(hashlib.sha256(canonical_json(installed)).digest())):
        return
    found = differing_facts(ranks, installed)
    raise UserError(f"the ranks do not run the same software: {'; '.join(found)}; install the same on all nodes")


def differing_facts(ranks: Ranks, facts: Mapping[str, Any]) -> list[str]:
    """A sentence for each value that is not the same on all ranks. A collective call."""
    everywhere = [json.loads(text) for text in ranks.all_gather_text(canonical_json(dict(facts)).decode())]
    hosts = ranks.all_gather_text(socket.gethostname())
    found = []
    for name in dict.fromkeys(name for each in everywhere for name in each):
        values = [json.dumps(each.get(name), sort_keys=True) for each in everywhere]
        if odd := _odd_ones(values):
            usual = "" if len(odd) == len(values) else f", the others {Counter(values).most_common(1)[0][0]}"
            shown = ", ".join(f"rank {rank} ({hosts[rank]}) has {name} {values[rank]}" for rank in odd[:_SHOWN])
            found.append(f"{shown}{usual}")
    return found


@cache
def installed_versions() -> dict[str, str | None]:
    """The versions of the libraries that decide a step's bits, and a hash of the code that a training worker runs."""
    code = hashlib.sha256()
    for package in (multihop.common, multihop.data_prep, multihop.pretrain):
        for folder in package.__path__:
            for path in sorted(Path(folder).rglob("*.py")):
                code.update(path.read_bytes())
    cuda = torch.version.cuda
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "CUDA": cuda,
        "cuDNN": None if cuda is None else str(torch.backends.cudnn.version()),
        "NCCL": None if cuda is None else ".".join(map(str, torch.cuda.nccl.version())),
        "multihop's code": code.hexdigest()[:12],
    }


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:7], "big")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _differing_tensors(ranks: Ranks, names: Sequence[str], table: Tensor) -> list[str]:
    """A sentence for each tensor whose checksum is not the same on all ranks, in the model's order."""
    everywhere = [[tuple(row) for row in rows.tolist()] for rows in ranks.all_gather_rows(table)]
    hosts = ranks.all_gather_text(socket.gethostname())
    found = []
    for name, values in zip(names, zip(*everywhere, strict=True), strict=True):
        if odd := _odd_ones(values):
            who = ", ".join(f"{rank} ({hosts[rank]})" for rank in odd[:_SHOWN])
            found.append(f"{name} of {'rank' if len(odd) == 1 else 'ranks'} {who}")
    return found


def _odd_ones(values: Sequence[Any]) -> list[int]:
    """The ranks that do not have the value that most ranks have; all of them if no value has a majority."""
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return list(range(len(values)))
    return [rank for rank, each in enumerate(values) if each != value]
