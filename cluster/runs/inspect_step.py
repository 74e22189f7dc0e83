"""The samples of a training step, their documents, and the model's input, for `multihop inspect batch`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multihop.cluster.runs.find_data import find_data, index_folder_of
from multihop.cluster.runs.recipe import Recipe, validate_recipe
from multihop.common.config import DATA, ORDER, effect_of
from multihop.common.errors import UserError
from multihop.common.files import read_json_object
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.tokenizers import tokenizer
from multihop.data_prep.tokenizers.info import TokenizerInfo
from multihop.pretrain.data.batches import BatchBuilder, RankBatch
from multihop.pretrain.data.index import build_indexes, index_rows
from multihop.pretrain.data.phases import is_skipped, locate, share_of_rank
from multihop.pretrain.objectives.objective import objective_of
from multihop.pretrain.run.changes import differences

_MICRO_BATCH = 1  # grouping does not change samples, so each one gets a micro-batch of its own


@dataclass(frozen=True)
class InspectedSample:
    """One sample of a step."""

    fields: dict[str, Any]
    """sample, epoch, document, source and documents; where they apply, rank, next_document, next_source,
    is_random_next and is_swapped."""
    tokens: list[str]
    """The original tokens, special tokens included."""
    inputs: list[str]
    """The model's input: differs from `tokens` at masked positions."""
    predicted: list[bool]
    """Whether a token is predicted at each position, by masked or permutation language modeling; else all False."""

    def as_json(self) -> dict[str, Any]:
        masked = {"masked_text": _join(self.inputs)} if any(self.predicted) else {}
        return {**self.fields, "text": _join(self.tokens), **masked}


@dataclass(frozen=True)
class InspectedStep:
    """The samples of one step."""

    step: int
    phase: int
    skipped: bool
    samples: list[InspectedSample]

    def as_json(self) -> dict[str, Any]:
        head = {"step": self.step, "phase": self.phase, "skipped": self.skipped}
        return {**head, "samples": [sample.as_json() for sample in self.samples]}


def inspect_step(
    recipe: Recipe, runs: Path, step: int, world_size: int | None = None, rank: int | None = None
) -> InspectedStep:
    """Return the samples of the 0-based step `step` of a recipe whose data is prepared.

    Args:
        world_size: number of ranks; None leaves the ranks out of the result.
        rank: only this rank's samples.

    Raises:
        UserError: the data is not prepared, or there is no such step or rank.
    """
    phase, _ = locate(recipe.phases, step)
    ranks = _ranks(world_size, rank)
    data_folder = find_data(recipe, runs)
    with index_folder_of(runs / recipe.name) as index_folder:
        build_indexes(index_folder, open_dataset(data_folder), recipe)
        micro_batch_sizes = [_MICRO_BATCH] * len(recipe.phases)
        samples = []
        for number in ranks:
            builder = BatchBuilder.open(recipe, data_folder, index_folder, number, world_size or 1, micro_batch_sizes)
            samples += _samples(builder, step, data_folder, {} if world_size is None else {"rank": number})
    return InspectedStep(step, phase, is_skipped(recipe.phases, step), samples)


def deviations(recipe: Recipe, runs: Path) -> list[str]:
    """Return the keys that give an existing run of this name different batches from the recipe's."""
    path = runs / recipe.name / "recipe.json"
    if not path.exists():
        return []
    begun_with = validate_recipe(read_json_object(path), str(path))  # fills in keys that are newer than the run
    changed = [key for key, _, _ in differences(begun_with.model_dump(mode="json"), recipe.model_dump(mode="json"))]
    return [key for key in changed if effect_of(Recipe, key) & (DATA | ORDER)]


def _ranks(world_size: int | None, rank: int | None) -> range:
    if rank is None:
        return range(world_size or 1)
    if world_size is None:
        raise UserError(f"--rank {rank} needs the number of ranks; give --world-size too")
    if rank >= world_size:
        raise UserError(f"--rank must be < --world-size, got {rank} and {world_size}")
    return range(rank, rank + 1)


def _samples(builder: BatchBuilder, step: int, data_folder: Path, rank: dict[str, int]) -> list[InspectedSample]:
    """Return a rank's samples, decoded from the arrays that it trains on."""
    made, chosen = builder.step(step), builder.order.samples_of_step(step)
    share = share_of_rank(made.batch_size, builder.rank, builder.world_size)
    phase = builder.config.phases[chosen.phase]
    rows = index_rows(
        builder.config.objective,
        builder.order.indexes[chosen.phase],
        chosen.sources[share],
        chosen.samples[share],
        phase.seq_len,
    )
    manifest = builder.data.manifest
    to_text, to_target = (_decoder(data_folder, info) for info in (manifest.tokenizer, manifest.output_tokenizer))
    samples = []
    if builder.config.objective.needs.reads_pairs:
        numbered = zip(chosen.samples[share].tolist(), chosen.epochs[share].tolist(), rows, strict=True)
        for (sample, epoch, row), (source, target) in zip(numbered, _pairs(made), strict=True):
            tokens = [*map(to_text, source), *map(to_target, target)]
            fields = {"sample": sample, "epoch": epoch, **rank, **_documents(builder, row, phase.seq_len)}
            samples.append(InspectedSample(fields, tokens, tokens, [False] * len(tokens)))
        return samples
    for sample, epoch, row, batch in zip(
        chosen.samples[share].tolist(), chosen.epochs[share].tolist(), rows, made.micro_batches, strict=False
    ):
        seen: Mapping[str, Any] = batch.inputs
        fields = {"sample": sample, "epoch": epoch, **rank, **_documents(builder, row, phase.seq_len)}
        if "is_random_next" in seen:
            fields |= _second(fields["documents"], bool(seen["is_random_next"][0]))
        if "is_swapped" in seen:
            fields["is_swapped"] = bool(seen["is_swapped"][0])
        input_ids = seen["packed"].input_ids
        of_sample = ~seen["is_memory"] if "is_memory" in seen else np.ones(len(input_ids), bool)
        original, predicted = input_ids.copy(), np.zeros(len(input_ids), bool)
        if "masked_positions" in seen:
            original[seen["masked_positions"]] = seen["labels"]
            predicted[seen["masked_positions"]] = True
        if "factorization_order" in seen:  # what predicts a token does not see it
            input_ids = np.where(predicted, manifest.tokenizer.special_ids["mask"], input_ids)
        original, input_ids, predicted = (each[of_sample] for each in (original, input_ids, predicted))
        tokens = [to_text(i) for i in original.tolist()]
        inputs = [
            _with_blank_of(token, to_text(i)) if masked else token
            for token, i, masked in zip(tokens, input_ids.tolist(), predicted, strict=True)
        ]
        samples.append(InspectedSample(fields, tokens, inputs, predicted.tolist()))
    assert len(samples) == made.samples
    return samples


def _pairs(made: RankBatch) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens of both sides of each pair, as the model reads the source and predicts the target."""
    for batch in made.micro_batches:
        seen: Mapping[str, Any] = batch.inputs
        if batch.tokens:
            if "packed" in seen:  # both sides in one sequence, which ends with what predicts the target
                whole = seen["packed"].cu_seqlens
                first = np.searchsorted(seen["predicting_positions"], whole[1:-1])
                targets = np.split(batch.targets, first)
                sequences = np.split(seen["packed"].input_ids, whole[1:-1])
                sources = [each[: len(each) + 1 - len(target)] for each, target in zip(sequences, targets, strict=True)]
            else:
                sources = np.split(seen["source"].input_ids, seen["source"].cu_seqlens[1:-1])
                targets = np.split(batch.targets, seen["target"].cu_seqlens[1:-1])
            yield from ((source.tolist(), target.tolist()) for source, target in zip(sources, targets, strict=True))


def _documents(builder: BatchBuilder, row: NDArray[np.int64], seq_len: int) -> dict[str, Any]:
    """Return all spans of a sample. Document ids are strings because many JSON readers round large integers."""
    texts, sources = builder.data.train, builder.data.manifest.sources
    parts = [
        {"document": str(texts.ids[i]), "source": sources[texts.source(i)], "start": start, "stop": stop}
        for i, start, stop in objective_of(builder.config.objective).spans(
            texts, row, seq_len, builder.config.objective
        )
        if stop > start
    ]
    return {"document": parts[0]["document"], "source": parts[0]["source"], "documents": parts}


def _second(documents: list[dict[str, Any]], is_random: bool) -> dict[str, Any]:
    second = documents[1]
    return {"next_document": second["document"], "next_source": second["source"], "is_random_next": is_random}


def _decoder(data_folder: Path, info: TokenizerInfo) -> Callable[[int], str]:
    """Return a function from token id to text: blanks start a word, and surround separators such as [SEP]."""
    model = tokenizer.load(data_folder / info.file)
    special = {i: name for name, i in info.special_ids.items()}

    def write(i: int) -> str:
        if i not in special:
            return model.token_text(i)
        return model.id_to_token(i) if special[i] in ("mask", "unk") else f" {model.id_to_token(i)} "

    return write


def _with_blank_of(original: str, seen: str) -> str:
    """Return `seen` with the leading blank of the token that it replaces; [MASK] has no blank."""
    return seen if seen.startswith(" ") or not original.startswith(" ") else " " + seen


def _join(tokens: list[str]) -> str:
    return " ".join("".join(tokens).split())
