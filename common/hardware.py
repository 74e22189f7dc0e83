"""The names and published rates of processors and GPUs."""

import platform
from pathlib import Path

_DATASHEET = {  # dense bf16 matrix products with fp32 accumulation, per second; NVIDIA's datasheets
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}


def datasheet_rate(device_name: str) -> float | None:
    """The datasheet's bf16 rate of a GPU of this name; None for an unknown GPU."""
    return next((rate for name, rate in _DATASHEET.items() if all(word in device_name for word in name.split())), None)


def cpu_model() -> str:
    """The model name of this machine's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
