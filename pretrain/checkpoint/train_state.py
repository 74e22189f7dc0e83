"""How far a run has trained."""

from dataclasses import dataclass


@dataclass
class TrainState:
    """What a training loop needs to resume, besides the weights and moments."""

    step: int = 0
    """Optimizer steps done, which is also the 0-based number of the next one."""
    tokens: int = 0
    """Seen so far, over all ranks, without padding."""
    skipped: int = 0
    """Steps that were skipped because of a non-finite loss or gradient."""
    skipped_in_a_row: int = 0
    """How many of them are the most recent steps."""
