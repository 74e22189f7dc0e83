"""GPUs by name: their rates and memory, from NVIDIA's datasheets."""

import re
import subprocess
from dataclasses import dataclass

_QUERY_S = 20.0
PCIE_5 = 64e9
"""Bytes that 16 lanes of PCIe 5.0 send in a second."""
_OLDER_PCIE = {"V100": 16e9, "A100": 32e9}
"""Those of PCIe 3.0 and 4.0, of GPUs that also have NVLink, by the first word of their names."""
USABLE = 0.9
"""Share of a GPU's memory that is planned for tensors; the rest is for CUDA, NCCL and what the allocator cannot use."""


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU. Rates are per second."""

    name: str
    flops: float
    """Dense matrix products in bf16 with sums in fp32; V100: in fp16."""
    fp32_flops: float
    """In fp32, without TF32."""
    achievable_flops: float
    """The largest rate of a matrix product that was measured: B200, H100 and A100 from the table of maximum achievable
    matmul FLOPS in https://github.com/stas00/ml-engineering, H200 from bench/README.md. Others: 0.8 of `flops`."""
    attention_flops: float
    """The rate of FlashAttention 2, forward and backward passes: of the A100 and the H100 about what its author
    measured (Dao 2023, section 4.1); others in proportion to `flops`, those before Hopper as the A100."""
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes that it reads from or writes to its memory."""
    multiprocessors: int
    """Streaming multiprocessors."""
    link: float
    """Bytes that it sends to, and receives from, another GPU of its node: by NVLink, which an H100 NVL or H200 NVL has
    only to those that it is bridged with; by PCIe where it has none."""

    @property
    def has_nvlink(self) -> bool:
        """Whether its link is faster than PCIe 5.0."""
        return self.link > PCIE_5

    @property
    def pcie(self) -> float:
        """Bytes that it sends to, and receives from, the host's memory in a second."""
        return min(self.link, _OLDER_PCIE.get(self.name.split()[0], PCIE_5))


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("B200", 2250e12, 75e12, 1745e12, 769e12, 180e9, 8000e9, 148, 900e9),
        Gpu("H200 NVL", 836e12, 60e12, 669e12, 286e12, 141e9, 4800e9, 132, 450e9),
        Gpu("H200", 989e12, 67e12, 764e12, 338e12, 141e9, 4800e9, 132, 450e9),
        Gpu("H100 PCIe", 756e12, 51e12, 605e12, 258e12, 80e9, 2000e9, 114, 64e9),
        Gpu("H100 NVL", 835e12, 60e12, 668e12, 285e12, 94e9, 3900e9, 132, 300e9),
        Gpu("H100", 989e12, 67e12, 794e12, 338e12, 80e9, 3350e9, 132, 450e9),
        Gpu("A100 PCIe 80GB", 312e12, 19.5e12, 250e12, 190e12, 80e9, 1935e9, 108, 32e9),
        Gpu("A100 PCIe 40GB", 312e12, 19.5e12, 250e12, 190e12, 40e9, 1555e9, 108, 32e9),
        Gpu("A100 80GB", 312e12, 19.5e12, 271e12, 190e12, 80e9, 2039e9, 108, 300e9),
        Gpu("A100 40GB", 312e12, 19.5e12, 271e12, 190e12, 40e9, 1555e9, 108, 300e9),
        Gpu("V100 32GB", 125e12, 15.7e12, 100e12, 76e12, 32e9, 900e9, 80, 150e9),
        Gpu("V100 16GB", 125e12, 15.7e12, 100e12, 76e12, 16e9, 900e9, 80, 150e9),
        Gpu("A10", 125e12, 31.2e12, 100e12, 76e12, 24e9, 600e9, 72, 32e9),
        Gpu("L40S", 362e12, 91.6e12, 290e12, 220e12, 48e9, 864e9, 142, 32e9),
        Gpu("L40", 181e12, 90.5e12, 145e12, 110e12, 48e9, 864e9, 142, 32e9),
        Gpu("L4", 121e12, 30.3e12, 97e12, 74e12, 24e9, 300e9, 58, 32e9),
        Gpu("RTX 4090", 165e12, 82.6e12, 132e12, 100e12, 24e9, 1008e9, 128, 32e9),
    )
}
"""Names of several words come before those that are a part of them."""


def gpu_named(name: str) -> Gpu | None:
    """The GPU whose name is in `name`, for example torch's "NVIDIA H100 80GB HBM3", or A100-80; None: it is unknown."""
    given = _words(name)
    if "LAPTOP" in given:  # slower than the card of that name
        return None
    return next((gpu for gpu in GPUS.values() if given >= _words(gpu.name)), None)


def nvidia_smi(*fields: str) -> str:
    """Return these fields of each GPU of this machine, as nvidia-smi's CSV without units.

    Raises:
        OSError: there is no nvidia-smi.
        RuntimeError: nvidia-smi failed, or did not answer.
    """
    query = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=_QUERY_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"nvidia-smi did not answer in {_QUERY_S:.0f} s") from None
    if done.returncode != 0:
        raise RuntimeError(f"nvidia-smi: {(done.stdout + done.stderr).strip()[:300]}")
    return done.stdout


def datasheet_rate(device_name: str) -> float | None:
    """The datasheet's bf16 rate of a GPU, in FLOP/s; None for an unknown GPU."""
    gpu = gpu_named(device_name)
    return None if gpu is None else gpu.flops


def _words(name: str) -> set[str]:
    words = re.split(r"[\s_-]+", name.upper())
    return {f"{word}GB" if re.fullmatch("[0-9]{2,3}", word) else word for word in words}
