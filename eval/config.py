"""The recipe's `eval` section."""

from pydantic import Field

from data_prep.config import Section


class EvalConfig(Section):
    """Which downstream tasks are tried, and how each trial is fine-tuned."""

    tasks: list[str] = Field(default=[])
    """Names of tasks; a name that is not known is answered with those that are."""
    seeds: list[int] = Field(default=[0, 1, 2], min_length=1)
    data_dir: str | None = None
    """A folder with the official files of those tasks that do not come with an installed package; null:
    `share/multihop` in the Python environment, where `make demo` puts them."""
    epochs: float = Field(default=3.0, gt=0.0)
    """Passes over a task's training examples."""
    max_examples: int | None = Field(default=None, ge=1)
    """At most so many training examples of a task, chosen by a hash; null: all of them."""
    max_dev_examples: int | None = Field(default=None, ge=1)
    """At most so many development examples, chosen by a hash; null: all of them. The test set is always whole."""
    batch_size: int = Field(default=16, ge=1)
    """Examples a step."""
    lr: float = Field(default=5e-5, gt=0.0)
    """The highest learning rate; linear warm-up over a tenth of the steps, then linear decay."""
    seq_len: int = Field(default=128, ge=8)
    """Longest example in pieces; what is longer is cut."""
