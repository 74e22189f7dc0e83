"""What is wrong with GPUs, judged from what nvidia-smi and the kernel say of them."""

from collections.abc import Iterator
from typing import Any

from multihop.cluster.doctor.finding import ClusterReport, Finding, gigabytes

HOT = 85
"""Degrees Celsius of a GPU without work; most slow down from about 87 on."""
USED = 2 * 10**9
"""Bytes; the driver itself takes some hundred megabytes."""
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""NVML's nvmlClocksEventReason bits that are no ordinary work of the power limit."""
USER_XIDS = {13, 31, 43, 45, 68, 69}
"""Of programs that made a mistake or were ended; any other speaks of the driver, the GPU or the bus."""


def gpu_findings(report: ClusterReport) -> Iterator[Finding]:
    """Of all nodes that were asked for their GPUs."""
    answered = {
        name: facts["gpus_idle"]
        for name, facts in report["nodes"].items()
        if "gpus_idle" in facts and "error" not in facts["gpus_idle"]
    }
    most = max((len(answer["gpus"]) for answer in answered.values()), default=0)
    for name, answer in answered.items():
        slowed: dict[str, Finding] = {}
        known, there = report["nodes"][name]["gpus"], len(answer["gpus"])
        if there < most or known != there:
            seen = f"{there} GPUs, of which Ray knows {known}"
            yield Finding(name, "GPU", seen, f"{most}", "see dmesg and nvidia-smi, and start Ray again")
        for gpu in answer["gpus"]:
            for seen, expected, advice in _of_gpu(gpu):
                yield Finding(name, "GPU", f"GPU {gpu['index']}: {seen}", expected, advice)
        after = report["nodes"][name].get("gpus_after_work", {}).get("gpus", [])
        for gpu in [*answer["gpus"], *after]:
            if reasons := [text for bit, text in SLOWDOWNS.items() if (gpu["throttle_reasons"] or 0) & bit]:
                seen = f"GPU {gpu['index']}: {', '.join(reasons)}"
                slowed.setdefault(seen, Finding(name, "GPU", seen, "full clocks", "see cooling and power supply"))
        yield from slowed.values()
        for address, number in answer["xids"] or ():
            if number not in USER_XIDS:
                advice = "look the number up in NVIDIA's table of Xid errors; restart or replace"
                yield Finding(name, "GPU", f"Xid {number} of {address} in the kernel's log", "none", advice)


def _of_gpu(gpu: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(seen, expected, advice)."""
    if (gpu["memory_used"] or 0) > USED:
        seen = f"{gigabytes(gpu['memory_used'])} of memory in use"
        yield seen, f"less than {gigabytes(USED)}", "end the process that nvidia-smi shows"
    if (gpu["temperature"] or 0) > HOT:
        yield f"{gpu['temperature']} degrees without work", f"{HOT} at most", "see its cooling"
    if gpu["uncorrected_errors"]:
        yield (
            f"{gpu['uncorrected_errors']} uncorrected ECC errors",
            "none",
            "reset it, and replace it if they come back",
        )
    now, most = gpu["pcie_width"]
    if now is not None and most is not None and now < most:
        yield f"PCIe x{now}", f"x{most}", "reseat the card, and see the slot and the riser"
