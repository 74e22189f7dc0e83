"""The GPUs of a node, as nvidia-smi describes them. Runs on the node."""

import csv
import re
import subprocess
from typing import Any

_FIELDS = (
    "index",
    "name",
    "uuid",
    "driver_version",
    "memory.total",
    "memory.used",
    "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_event_reasons.active",
    "pcie.link.width.max",
    "pcie.link.width.current",
)
_MIB = 2**20
_UNKNOWN = {"[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "[GPU is lost]", "[Insufficient Permissions]"}
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")


def gpus() -> dict[str, Any]:
    """What nvidia-smi says of each GPU, and the Xid messages of the kernel where this user may read them.

    Raises:
        OSError: there is no nvidia-smi.
        RuntimeError: it failed.
    """
    query = [f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise RuntimeError(f"nvidia-smi: {(done.stdout + done.stderr).strip()[:300]}")
    log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=20)
    return {"gpus": parse_gpus(done.stdout), "xids": parse_xids(log.stdout) if log.returncode == 0 else None}


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """Rows of nvidia-smi's CSV in the order of the fields above; None for what a GPU does not report.

    Returns:
        index, name, uuid, driver, memory_total and memory_used (bytes), temperature (degrees Celsius),
        uncorrected_errors (of ECC, since the driver was loaded), throttle_reasons (bits of NVML's
        nvmlClocksEventReason), and pcie_width as [now, at most]. An idle GPU lowers its PCIe generation, but not the
        width.
    """
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        values = dict(
            zip(_FIELDS, (None if value.strip() in _UNKNOWN else value.strip() for value in row), strict=True)
        )
        numbers = {key: None if value is None else _number(value) for key, value in values.items()}
        found.append(
            {
                "index": numbers["index"],
                "name": values["name"],
                "uuid": values["uuid"],
                "driver": values["driver_version"],
                "memory_total": _bytes(numbers["memory.total"]),
                "memory_used": _bytes(numbers["memory.used"]),
                "temperature": numbers["temperature.gpu"],
                "uncorrected_errors": numbers["ecc.errors.uncorrected.volatile.total"],
                "throttle_reasons": numbers["clocks_event_reasons.active"],
                "pcie_width": [numbers["pcie.link.width.current"], numbers["pcie.link.width.max"]],
            }
        )
    return found


def parse_xids(text: str) -> list[list[Any]]:
    """[PCI address, Xid number] of each kind of message of NVIDIA's driver in the kernel's log, without repetitions."""
    return [[address, int(number)] for address, number in dict.fromkeys(_XID.findall(text))]


def _number(text: str) -> int | None:
    """A decimal or hexadecimal number; None for other text."""
    try:
        return int(text, 0)
    except ValueError:
        return None


def _bytes(mebibytes: int | None) -> int | None:
    return None if mebibytes is None else mebibytes * _MIB
