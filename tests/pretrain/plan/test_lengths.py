"""Every published size is planned at short and long sequences; longer ones take no less memory and time."""

from itertools import pairwise

import pytest

from multihop.common.gpus import GPUS
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.models.families import FAMILIES, PRESETS
from multihop.pretrain.plan.collectives import links_of
from multihop.pretrain.plan.fit import RankPlan, Vocabularies
from multihop.pretrain.plan.step_time import efficiency_of, step_time

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1800)]
LOOPS = {"bilm", "seq2seq"}
"""Families that compute one time step after another: tracing them takes as long as a sample has tokens."""
LENGTHS, OF_LOOPS = (128, 512, 1024, 8192), (16, 64, 128)
"""Tokens of a sample, and of one of these families."""
VOCABULARY, SAMPLES, RANKS = 32_000, 2, 8
SHORT = {"bert-tiny", "modernbert-tiny"}
"""Those of `make test`."""


def planned(preset: str, seq_len: int) -> tuple[int, float]:
    """Bytes of a GPU, and seconds of a step, with positions for the longest of the lengths."""
    not_trained = {"characters": None} if "characters" in PRESETS[preset] else {}  # are for imported weights alone
    config = TrainingConfig.model_validate(
        {
            "seed": 3,
            "model": {"preset": preset, "max_positions": max(LENGTHS), **not_trained},
            "objective": {"name": FAMILIES[PRESETS[preset]["family"]].default_objective},
            "phases": [{"seq_len": seq_len, "global_batch_size": SAMPLES * RANKS, "steps": 9}],
            "engine": {"micro_batch_size": SAMPLES, "precision": "bf16", "deepspeed": {}},
        }
    )
    fit = RankPlan(config, 0, RANKS, Vocabularies(VOCABULARY)).largest(1e15)
    assert fit.micro_batch_size == SAMPLES and fit.micro_batches == 1
    assert sum(fit.trace.peak_by_category.values()) == fit.trace.peak
    return fit.trace.peak, step_time(
        fit.trace, 1, 1.0, GPUS["H100"], links_of(GPUS["H100"], RANKS), efficiency_of(config.engine)
    )[0]


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.long) for name in PRESETS]
)
def test_longer_samples_take_no_less_memory_and_time(preset: str) -> None:
    is_loop = PRESETS[preset]["family"] in LOOPS
    lengths = OF_LOOPS if is_loop else LENGTHS
    memory, seconds = zip(*(planned(preset, seq_len) for seq_len in lengths), strict=True)
    assert list(memory) == sorted(memory) and (is_loop or memory[-1] > memory[0])
    # If launches take the longest, the kernel for short sequences brings one or two more.
    assert all(longer > 0.98 * shorter for shorter, longer in pairwise(seconds)) and seconds[-1] > 1.1 * seconds[0]
