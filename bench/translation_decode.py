"""Measure sentences per second of beam search: ours, and transformers' `generate` on the same weights.

    python bench/translation_decode.py --padding 0 0.3

A transformer copies sentences of random tokens with some uncertainty, so that hypotheses compete and end where their
source ends. The padding of a batch is that of its sources; finished sentences leave our batch, but not that of
`generate`. Each peer runs in its own process; they take turns, one batch each. `same` is the share of the sentences
whose hypotheses are all equal.
"""

import argparse
import json
import os
import platform
import statistics
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import translation_decode_peers
from generate import measure
from translation_decode_peers import PEERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="transformer-base")
    parser.add_argument("--padding", type=float, nargs="+", default=[0.0, 0.3], help="its share (default: 0 0.3)")
    parser.add_argument("--batch", type=int, default=32, help="sentences at a time (default: %(default)s)")
    parser.add_argument("--length", type=int, default=32, help="tokens of the longest source (default: %(default)s)")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=32000, help="joint (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("bench/results/translation_decode.json"))
    arguments = parser.parse_args()
    if find_spec("transformers") is None:
        raise SystemExit("the peer is transformers, which is not installed; install it")

    import torch

    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.beams} beams")
    print(f"{'padding':>7} {'sentences/s':>11}  speed beside transformers (from-to)  CPU time  same")
    results = []
    for padding in arguments.padding:
        sizes = {name: getattr(arguments, name) for name in ("preset", "batch", "length", "beams", "vocabulary")}
        more = arguments.length + 50  # as `multihop translate` allows; no sentence needs them
        case = {**sizes, "padding": padding, "new": more, "threads": arguments.threads, "seed": 1}
        times, found = measure(case, PEERS, translation_decode_peers.__file__, arguments.repeats)
        same = statistics.mean(mine == theirs for mine, theirs in zip(*found.values(), strict=True))
        ratios, of_cpu = (
            sorted(theirs / mine for mine, theirs in zip(each["ours"], each["hugging_face"], strict=True))
            for each in times.values()
        )
        print(
            f"{padding:7} {arguments.batch / statistics.median(times['seconds']['ours']):11.2f}  "
            f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f}-{ratios[-1]:.2f}){'':16} "
            f"{statistics.median(of_cpu):8.2f}x  {same:.1%}",
            flush=True,
        )
        ratio = {"ratio": statistics.median(ratios), "cpu_ratio": statistics.median(of_cpu)}
        results.append({"case": case, **times, **ratio, "same": same})
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "results": results,
    }
    arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
