"""nvidia-smi's CSV and the kernel's messages, written by hand in NVIDIA's documented format, not recorded."""

from multihop.cluster.doctor.measure_node import parse_gpus, parse_xids

A100S = """\
0, NVIDIA A100-SXM4-80GB, GPU-5d8d2a4e-7c0b-ae5e-6a2f-1f2d3c4b5a69, \
550.54.15, 81920, 4, 31, 0, 0x0000000000000001, 16, 16
1, NVIDIA A100-SXM4-80GB, GPU-0b1c2d3e-4f50-6172-8394-a5b6c7d8e9f0, \
550.54.15, 81920, 61234, 88, 2, 0x0000000000000060, 16, 8
"""
RTX = """\
0, NVIDIA GeForce RTX 4090, GPU-11111111-2222-3333-4444-555555555555, 535.183.01, 24564, 18, 40, [N/A], \
0x0000000000000004, 16, [Unknown Error]
"""
MESSAGES = """\
[    3.141592] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024
[ 8123.456789] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 8123.456999] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 9000.000001] NVRM: Xid (PCI:0000:86:00): 48, pid=1234, name=python, DBE (double bit error) ECC Error
"""


def test_rows_become_numbers() -> None:
    first, second = parse_gpus(A100S)
    assert (first["name"], first["driver"], first["memory_total"]) == ("NVIDIA A100-SXM4-80GB", "550.54.15", 80 * 2**30)
    assert (first["throttle_reasons"], first["pcie_width"], first["uncorrected_errors"]) == (1, [16, 16], 0)
    assert (second["index"], second["temperature"], second["throttle_reasons"]) == (1, 88, 0x60)
    assert (second["pcie_width"], second["uncorrected_errors"]) == ([8, 16], 2)


def test_what_a_gpu_does_not_report_is_none() -> None:
    (gpu,) = parse_gpus(RTX)
    assert (gpu["uncorrected_errors"], gpu["pcie_width"], gpu["temperature"]) == (None, [None, 16], 40)


def test_xid_messages_are_counted_once() -> None:
    assert parse_xids(MESSAGES) == [["0000:3b:00", 79], ["0000:86:00", 48]]
