"""GPUs are found by the names that torch and users give them."""

import pytest

from multihop.common.gpus import GPUS, datasheet_rate, gpu_named


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("A100-40", "A100 40GB"),
        ("a100-80gb", "A100 80GB"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("b200", "B200"),
        ("NVIDIA L40", "L40"),
        *((name, name) for name in GPUS),
    ],
)
def test_known_names(given: str, name: str) -> None:
    found = gpu_named(given)
    assert found is not None and found.name == name


@pytest.mark.parametrize(
    "given", ["NVIDIA RTX A1000", "NVIDIA A10G", "GeForce 1080", "A100", "", "MI300X", "GeForce RTX 4090 Laptop GPU"]
)
def test_other_names_are_unknown(given: str) -> None:
    assert gpu_named(given) is None


def test_rates_are_plausible() -> None:
    for gpu in GPUS.values():
        assert 0.6 * gpu.flops < gpu.achievable_flops <= gpu.flops
        assert gpu.memory > 1e10 and gpu.bandwidth > gpu.link > 1e9


def test_datasheet_rates() -> None:
    assert datasheet_rate("NVIDIA H100 80GB HBM3") == datasheet_rate("NVIDIA H200") == 989e12
    assert datasheet_rate("NVIDIA RTX A1000") is None
