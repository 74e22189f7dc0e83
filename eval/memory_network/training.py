"""Training of memory networks as in Sukhbaatar et al. 2015, sections 4.1 and 4.2:

for each epoch of the linear start, then for each epoch with softmax:
    for each batch of 32 questions, in a new order:
        one step of SGD on the sum of the cross-entropies, gradients of a norm above 40 scaled to 40
take the network with the fewest wrong answers to the training questions
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from multihop.common.counter_rng import key_of
from multihop.eval.memory_network.model import MemoryNetworks, NetworkSizes, Tying
from multihop.eval.memory_network.stories import Stories

_PREDICT_BATCH = 256


@dataclass(frozen=True)
class TrainingSettings:
    """The published settings for one task alone."""

    hops: int = 3
    tying: Tying = "adjacent"
    width: int = 20
    memory_size: int = 50
    """Number of the newest statements that are kept."""
    batch_size: int = 32
    linear_epochs: int = 20
    """Epochs of the linear start; 0: none."""
    linear_lr: float = 0.005
    epochs: int = 100
    lr: float = 0.01
    halve_every: int = 25
    """Epochs after which the learning rate is halved."""
    max_grad_norm: float = 40.0
    time_noise: float = 0.1
    """Share of empty memories that is inserted in training, so that times are not learned by heart (section 4.1)."""
    validation: float = 0.1
    """Share of the training questions that is held out."""
    restarts: int = 10
    """Number of networks with different initial weights, of which the training error chooses one (section 4.2)."""

    @property
    def times(self) -> int:
        """Number of temporal encodings."""
        return self.memory_size + max_blanks(self.memory_size, self.time_noise)


JOINT = TrainingSettings(width=50, linear_epochs=30, epochs=60, halve_every=15)
"""The settings of the authors' code for one network for all tasks, but for `lr`, which is 0.005 there."""


def max_blanks(size: int, noise: float) -> int:
    """The maximum number of empty memories that are inserted into `size` memories."""
    return math.ceil(size * noise)


@dataclass(frozen=True)
class TrainedNetworks:
    """Networks after training, and their results."""

    model: MemoryNetworks
    validation: NDArray[np.int64]
    """(Q,), the questions that were held out."""
    validation_wrong: NDArray[np.bool_]
    """(R, Q), whether each network's answer to each of these is wrong."""
    training: NDArray[np.int64]
    """(T,), the questions that the networks were trained on."""
    training_wrong: NDArray[np.bool_]
    """(R, T), whether each network's answer to each of these is wrong."""
    chosen: int
    """The network with the lowest training error; of equal ones that with the lowest training loss."""


def train_networks(
    stories: Stories,
    vocab_size: int,
    settings: TrainingSettings,
    seed: int,
    progress: Callable[[int, int], None] = lambda epoch, epochs: None,
) -> TrainedNetworks:
    """Train `settings.restarts` networks on the questions, each with its own initial weights, orders and time noise.

    Args:
        vocab_size: number of words, with word 0.
        progress: called with the epochs done and their number.
    """
    rng = random_generator(seed)
    validation, training = split(len(stories), settings, rng)
    sizes = NetworkSizes(
        vocab_size=vocab_size,
        sentence_words=stories.sentences.shape[1],
        memories=min(settings.memory_size, int(stories.sizes.max())),
        times=settings.times,
        width=settings.width,
        hops=settings.hops,
        tying=settings.tying,
    )
    model = MemoryNetworks(sizes, settings.restarts, seed)
    epochs = settings.linear_epochs + settings.epochs
    for epoch in range(epochs):
        linear = epoch < settings.linear_epochs
        after = epoch - settings.linear_epochs
        lr = settings.linear_lr if linear else settings.lr * 0.5 ** (after // settings.halve_every)
        for batch, times in draw_batches(stories, training, settings, rng):
            _step(model, stories, batch, times, lr, settings.max_grad_norm, linear)
        progress(epoch + 1, epochs)
    validation_wrong, _ = answer(model, stories, validation)
    training_wrong, losses = answer(model, stories, training)
    chosen = int(np.lexsort([losses.sum(1), training_wrong.sum(1)])[0])
    return TrainedNetworks(model, validation, validation_wrong, training, training_wrong, chosen)


def random_generator(seed: int) -> np.random.Generator:
    """Return the generator from which a training draws `split`, and then for each epoch `draw_batches`."""
    return np.random.Generator(np.random.Philox(key_of("memory network", seed)))


def split(
    questions: int, settings: TrainingSettings, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw which of the questions are held out; return these and the others."""
    shuffled = rng.permutation(questions)
    held = round(settings.validation * questions)
    return shuffled[:held], shuffled[held:]


def draw_batches(
    stories: Stories, training: NDArray[np.int64], settings: TrainingSettings, rng: np.random.Generator
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the batches of an epoch, in a new order for each network: int64 (R, B), questions, and (R, B, M), the
    temporal encodings of their memories."""
    orders = np.stack([rng.permutation(training) for _ in range(settings.restarts)])
    for start in range(0, orders.shape[1], settings.batch_size):
        batch = orders[:, start : start + settings.batch_size]
        yield batch, noisy_times(stories.sizes[batch], settings.memory_size, settings.time_noise, rng)


def noisy_times(sizes: NDArray[np.int64], memories: int, noise: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw the temporal encodings (..., M) of memories: ascending from the newest one, with gaps at random places.

    Up to ceil(noise * n) empty memories are inserted into n memories.

    Args:
        sizes: (...,), the number of memories.
    """
    blanks = rng.integers(0, np.ceil(noise * sizes).astype(np.int64) + 1)
    slots = memories + max_blanks(memories, noise)
    drawn = rng.random((*sizes.shape, slots))
    drawn[np.arange(slots) >= (sizes + blanks)[..., None]] = np.inf
    ranks = drawn.argsort(-1).argsort(-1)
    is_empty = ranks >= sizes[..., None]
    return is_empty.argsort(-1, kind="stable")[..., :memories]


def _step(
    model: MemoryNetworks,
    stories: Stories,
    batch: NDArray[np.int64],
    times: NDArray[np.int64],
    lr: float,
    max_grad_norm: float,
    linear: bool,
) -> None:
    """One step of SGD on each network's sum of losses; batch: int64 (R, B), questions; times: int64 (R, B, M)."""
    logits, _ = model(*_inputs(stories, batch, times, model.sizes.memories), linear)
    answers = torch.from_numpy(stories.answers[batch])
    loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="sum")
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    norms = torch.stack([each.flatten(1).square().sum(1) for each in gradients]).sum(0).sqrt()
    scale = lr * (max_grad_norm / norms.clamp_min(max_grad_norm))
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(scale.view(-1, *[1] * (gradient.ndim - 1)) * gradient)


def _inputs(
    stories: Stories, batch: NDArray[np.int64], times: NDArray[np.int64], most_memories: int
) -> tuple[Tensor, ...]:
    """The model's inputs for some questions: of each network only the sentences and memories that occur in its own, of
    longer stories than those of the training the newest statements."""
    memories = min(int(stories.sizes[batch].max()), most_memories)
    memory_sentences, questions = stories.memories[batch][..., :memories], stories.questions[batch]
    occurs = np.zeros((len(batch), len(stories.sentences)), bool)
    occurs[:, 0] = True
    rows = np.arange(len(batch))[:, None]
    occurs[rows, memory_sentences.reshape(len(batch), -1)] = True
    occurs[rows, questions] = True
    counts = occurs.sum(1)
    used = np.zeros((len(batch), counts.max()), np.int64)
    used[np.arange(counts.max()) < counts[:, None]] = occurs.nonzero()[1]
    positions = occurs.cumsum(1) - 1
    return (
        torch.from_numpy(stories.sentences[used]),
        torch.from_numpy(positions[rows[:, None], memory_sentences]),
        torch.from_numpy(times[..., :memories]),
        torch.from_numpy(positions[rows, questions]),
    )


def batches_of(indexes: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the indexes in parts that fit into memory."""
    for start in range(0, len(indexes), _PREDICT_BATCH):
        yield indexes[start : start + _PREDICT_BATCH]


@torch.inference_mode()
def attend(model: MemoryNetworks, stories: Stories, batch: NDArray[np.int64]) -> tuple[Tensor, list[Tensor]]:
    """Return the logits (R, B, V) of some questions, int64 (B,), and the attention of each hop, (R, B, M); times are
    without noise."""
    all_networks = np.broadcast_to(batch, (model.networks, len(batch)))
    memories = stories.memories.shape[1]
    times = np.broadcast_to(np.arange(memories), (*all_networks.shape, memories))
    logits, attention = model(*_inputs(stories, all_networks, times.copy(), model.sizes.memories))
    return logits, attention


def predicted(logits: Tensor) -> Tensor:
    """The likeliest words, int64 (...,), of logits (..., V); word 0 is none."""
    return logits[..., 1:].argmax(-1) + 1


def answer(
    model: MemoryNetworks, stories: Stories, questions: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return for each network and question, (R, Q), whether the answer is wrong, and its cross-entropy in nats."""
    wrong: list[NDArray[np.bool_]] = [np.empty((model.networks, 0), bool)]
    losses: list[NDArray[np.float64]] = [np.empty((model.networks, 0))]
    for batch in batches_of(questions):
        logits, _ = attend(model, stories, batch)
        right = torch.from_numpy(stories.answers[batch]).expand(model.networks, -1)
        wrong.append((predicted(logits) != right).numpy())
        losses.append(F.cross_entropy(logits.transpose(1, 2), right, reduction="none").double().numpy())
    return np.concatenate(wrong, 1), np.concatenate(losses, 1)
