"""Measure what a rank opens and reads to resume from a checkpoint of many ranks: `python bench/restart.py`.

The checkpoint is that of a GPT-2 1.5B as ZeRO-1 ranks write it: true names, slices and files; only the numbers of
elements are divided (--scale), so that it fits anywhere. It is read in two ways: as it is, and with a manifest of
format version 3, which did not say where slices are, so that every rank opened all files to read their headers, and
rank 0 hashed all of them. The page cache is warm and the disk local, so that the seconds are a lower bound; the files
and bytes are the same on any storage.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from multihop.common.files import canonical_json, sha256_json
from multihop.pretrain.checkpoint.manifest import MANIFEST, CheckpointManifest, folder_of_step, read_checkpoint_manifest
from multihop.pretrain.checkpoint.reader import CheckpointReader
from multihop.pretrain.checkpoint.verify import check_headers, file_checks
from multihop.pretrain.checkpoint.verify_shared import assign_files
from multihop.pretrain.checkpoint.writer import CheckpointWriter
from multihop.pretrain.models.build import build_model_on_meta, uses_weight_decay
from multihop.pretrain.models.families import parse_model_config

KINDS = ("weight", "exp_avg", "exp_avg_sq")
RUN = "b" * 32
"""An id that no run has."""
SAMPLED = 8
"""Number of ranks that are measured."""

Slice = tuple[str, int, int]
"""Parameter, first element, number of elements."""


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--scale", type=int, default=100, help="by which the elements of each parameter are divided")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default: a temporary one")
    parser.add_argument("--json", type=Path, default=Path("bench/results/restart.json"))
    options = parser.parse_args()
    numels = {name: max(1, numel // options.scale) for name, numel in parameters_of("gpt2-xl", 50257).items()}
    results = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(prefix="restart-", dir=options.folder) as folder:
            results.append(measure(folder, numels, ranks, options.repeats))
    report = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}",
        "parameters": len(numels),
        "elements": sum(numels.values()),
        "scale": options.scale,
        "repeats": options.repeats,
        "results": results,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['machine']}; {len(numels)} parameters, {report['elements']:,} elements; medians")
    for result in results:
        print(
            f"\n{result['ranks']:,} ranks, manifest {result['manifest_bytes']:,} bytes, save {result['save_s']:.2g} s"
        )
        print(f"{'':42}{'files':>14}{'MB':>18}{'seconds':>22}")
        for title, key in ROWS.items():
            old, new = result["format_3"][key], result["format_4"][key]
            files = f"{old['files']:,} -> {new['files']:,}"
            megabytes = f"{old['bytes'] / 1e6:.3g} -> {new['bytes'] / 1e6:.3g}"
            print(f"{title:42}{files:>14}{megabytes:>18}{old['seconds']:>12.3g} -> {new['seconds']:.3g}")


ROWS = {
    "open": "open",
    "verify: the busiest rank": "verify",
    "read a rank's part, same number of ranks": "same",
    "read a rank's part, on 3/4 of the ranks": "fewer",
}


def parameters_of(preset: str, vocab_size: int) -> dict[str, int]:
    """Return the number of elements by parameter."""
    model = build_model_on_meta(parse_model_config({"preset": preset}), vocab_size)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def zero_1_slices(numels: dict[str, int], ranks: int) -> list[list[Slice]]:
    """Return the slices of each rank: an equal part of two flat buffers, that of the matrices and that of all else."""
    parts: list[list[Slice]] = [[] for _ in range(ranks)]
    for wanted in (True, False):
        group = {name: numel for name, numel in numels.items() if uses_weight_decay(name) == wanted}
        part, offset = -(-sum(group.values()) // ranks), 0
        for name, numel in group.items():
            for rank in range(offset // part, (offset + numel - 1) // part + 1):
                start, stop = max(offset, rank * part), min(offset + numel, (rank + 1) * part)
                parts[rank].append((name, start - offset, stop - start))
            offset += numel
    return parts


def measure(folder: str, numels: dict[str, int], ranks: int, repeats: int) -> dict[str, Any]:
    """Return files, bytes and seconds of each way to read one checkpoint."""
    parts = zero_1_slices(numels, ranks)
    started = time.perf_counter()
    location = write(folder, parts, numels)
    saved = time.perf_counter() - started
    newest = read_checkpoint_manifest(location)
    manifest = Path(location, MANIFEST).read_bytes()
    results: dict[str, Any] = {"ranks": ranks, "manifest_bytes": len(manifest), "save_s": saved}
    for version in (4, 3):
        if version == 3:
            without_stripes(Path(location))
        fewer = zero_1_slices(numels, max(1, ranks * 3 // 4))
        results[f"format_{version}"] = {
            "open": median_of(sampled([[] for _ in range(ranks)]), repeats, lambda part: read(location, part)),
            "same": median_of(sampled(parts), repeats, lambda part: read(location, part)),
            "fewer": median_of(sampled(fewer), repeats, lambda part: read(location, part)),
            "verify": verify_busiest(location, newest if version == 4 else read_checkpoint_manifest(location), repeats),
        }
    return results


def write(folder: str, parts: list[list[Slice]], numels: dict[str, int]) -> str:
    """Save as these ranks would, in threads of one process; returns the checkpoint's location."""
    manifest = CheckpointManifest(
        run=RUN,
        step=1,
        tokens=0,
        updates=1,
        world_size=len(parts),
        zero_stage=1,
        parameters={name: [numel] for name, numel in numels.items()},
        data_fingerprint="bench",
    )
    writers = [CheckpointWriter(folder, rank, len(parts), f"{RUN[:8]}-bench", keep=1) for rank in range(len(parts))]
    for writer, part in zip(writers, parts, strict=True):
        live = {f"{kind}/{name}@{start}": torch.rand(numel) for name, start, numel in part for kind in KINDS}
        writer.save(live, manifest)
    for writer in writers:
        writer.wait()
    return folder_of_step(folder, 1)


def without_stripes(location: Path) -> None:
    """Rewrite a checkpoint to format version 3, which is read by opening all files."""
    content = json.loads((location / MANIFEST).read_bytes())
    content = {key: value for key, value in content.items() if key not in ("sha256", "kinds", "stripes")}
    content["format_version"] = 3
    (location / MANIFEST).write_bytes(canonical_json({**content, "sha256": sha256_json(content)}))


def sampled(parts: list[list[Slice]]) -> list[list[Slice]]:
    """Return the slices of `SAMPLED` ranks, evenly spread."""
    return parts[:: max(1, len(parts) // SAMPLED)][:SAMPLED]


def median_of(
    parts: list[list[Slice]], repeats: int, run: Callable[[list[Slice]], tuple[int, int]]
) -> dict[str, float]:
    """Return the medians over ranks and repeats."""
    rows = []
    for _ in range(repeats):
        for part in parts:
            started = time.perf_counter()
            files, size = run(part)
            rows.append((files, size, time.perf_counter() - started))
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    return {"files": round(medians[0]), "bytes": round(medians[1]), "seconds": medians[2]}


def read(location: str, part: list[Slice]) -> tuple[int, int]:
    """Read the manifest and a rank's weights and moments; returns how many other files and bytes of them were read."""
    with CheckpointReader(location) as reader:
        for name, start, numel in part:
            for kind in KINDS:
                reader.read(kind, name, start, numel)
        return reader.files_opened, reader.bytes_read


def verify_busiest(location: str, manifest: CheckpointManifest, repeats: int) -> dict[str, float]:
    """Measure hashing the largest share; in format version 3 that is rank 0's, which had all files."""
    sizes = [entry.bytes for entry in manifest.files]
    share = list(range(len(sizes)))
    if manifest.stripes is not None:
        share = max(assign_files(sizes, manifest.world_size), key=lambda mine: sum(sizes[index] for index in mine))
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        checks = file_checks(location, manifest)
        assert all(checks[index]() is None for index in share) and check_headers(location, manifest) is None
        seconds.append(time.perf_counter() - started)
    return {"files": len(share), "bytes": sum(sizes[i] for i in share), "seconds": statistics.median(seconds)}


if __name__ == "__main__":
    main()
