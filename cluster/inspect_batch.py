"""`multihop inspect batch`: which samples a step uses, from which documents, and what the model gets to see."""

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.progress import plain
from cluster.recipe import Recipe, validate_recipe
from data_prep.files import read_json_object
from data_prep.identity import settings_of, sources_key
from data_prep.manifest import MANIFEST, TokenizerInfo, read_manifest
from data_prep.shards import open_dataset
from data_prep.shown import shown
from data_prep.tokenizers import tokenizer
from pretrain.batches import BatchMaker
from pretrain.changes import differences
from pretrain.objectives import objective_of
from pretrain.order import is_skipped, locate, share_of_rank
from pretrain.samples import build_indexes, look_up

_MICRO_BATCH = 1  # how samples are grouped does not change them, and so each of them stands by itself
_DECIDING_SECTIONS = ("seed", "data", "tokenizer", "objective")
_DECIDING_IN_PHASES = re.compile(r"phases(\[\d+\](\.(seq_len|batch_size|batch_ramp|steps)\b.*)?)?")
_WORD_START = "▁"


@dataclass(frozen=True)
class Sample:
    """One sample of a step."""

    facts: dict[str, Any]
    """sample, epoch, document, source and documents; rank, next_document, next_source, is_random_next and is_swapped
    if any."""
    pieces: list[str]
    """What stands in the text, special pieces included."""
    shown: list[str]
    """What the model gets: other pieces where some are to be predicted."""
    predicted: list[bool]
    """Which pieces a masked-word model is asked for; none under another objective."""

    def as_json(self) -> dict[str, Any]:
        masked = {"masked_text": _joined(self.shown)} if any(self.predicted) else {}
        return {**self.facts, "text": _joined(self.pieces), **masked}


@dataclass(frozen=True)
class Step:
    """What `inspect batch` tells."""

    step: int
    phase: int
    skipped: bool
    samples: list[Sample]

    def as_json(self) -> dict[str, Any]:
        told = {"step": self.step, "phase": self.phase, "skipped": self.skipped}
        return {**told, "samples": [sample.as_json() for sample in self.samples]}


def inspect_step(recipe: Recipe, runs: Path, step: int, world_size: int | None = None, rank: int | None = None) -> Step:
    """The samples of step `step` (from 0) of a recipe whose text is prepared.

    Args:
        world_size: tell which rank of so many takes each sample.
        rank: only this rank's share.

    Raises:
        ValueError: the text is not prepared, or there is no such step or rank.
    """
    phase, _ = locate(recipe.phases, step)
    ranks = _ranks(world_size, rank)
    data_folder = find_data(recipe, runs)
    with _index_folder(runs / recipe.name) as index_folder:
        build_indexes(index_folder, open_dataset(data_folder), recipe)
        micro_batches = [_MICRO_BATCH] * len(recipe.phases)
        samples = []
        for number in ranks:
            maker = BatchMaker.open(recipe, data_folder, index_folder, number, world_size or 1, micro_batches)
            samples += _samples(maker, step, data_folder, {} if world_size is None else {"rank": number})
    return Step(step, phase, is_skipped(recipe.phases, step), samples)


def find_data(recipe: Recipe, runs: Path) -> Path:
    """The folder in which the text was prepared as the recipe says.

    Raises:
        ValueError: there is none.
    """
    of_run = [runs / recipe.name / "data" / MANIFEST]
    of_others = (runs / ".prepared" / sources_key(recipe.data)).glob(f"*/{MANIFEST}")
    newest_first = sorted(of_others, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [path for path in of_run if path.exists()] + newest_first:
        if read_manifest(path.parent).settings == settings_of(recipe.data, recipe.tokenizer):
            return path.parent
    raise ValueError(f"the text of {recipe.name} is not prepared in {runs}; run `multihop prep` with this recipe first")


def deviations(recipe: Recipe, runs: Path) -> list[str]:
    """Keys by which the run of this name, if there is one, uses other batches than the recipe says."""
    path = runs / recipe.name / "recipe.json"
    if not path.exists():
        return []
    begun_with = validate_recipe(read_json_object(path), str(path))  # older ones lack the keys that are newer
    changed = [key for key, _, _ in differences(begun_with.model_dump(mode="json"), recipe.model_dump(mode="json"))]
    return [k for k in changed if k.split(".")[0] in _DECIDING_SECTIONS or _DECIDING_IN_PHASES.fullmatch(k)]


def show_step(step: Step) -> None:
    """Print a step for people: a block for each sample, `{what stood there → what the model gets}` where it differs."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    skipped = "  skipped by the recipe" if step.skipped else ""
    console.print(f"step {step.step}  phase {step.phase}  {len(step.samples)} samples{skipped}", style="bold")
    for sample in step.samples:
        console.print()
        facts = {key: value for key, value in sample.facts.items() if key != "documents"}
        told = "  ".join(f"{key} {value}" for key, value in facts.items())
        console.print(plain(told), style="cyan", soft_wrap=True)
        text = Text()
        pieces, seen = [shown(piece) for piece in sample.pieces], [shown(piece) for piece in sample.shown]
        for piece, instead, predicted in zip(pieces, seen, sample.predicted, strict=True):
            if piece.startswith(" ") and len(text) and not text.plain.endswith(" "):
                text.append(" ")
            if predicted:
                text.append(f"{{{piece.strip() or _WORD_START} → {instead.strip() or _WORD_START}}}", style="yellow")
            else:
                text.append(piece.lstrip(" "))
        text.rstrip()
        console.print(text, soft_wrap=not console.is_terminal)


def _ranks(world_size: int | None, rank: int | None) -> range:
    if rank is None:
        return range(world_size or 1)
    if world_size is None:
        raise ValueError(f"--rank {rank} says nothing without the number of ranks; give --world-size too")
    if rank >= world_size:
        raise ValueError(f"there is no rank {rank} of {world_size}; ranks are counted from 0")
    return range(rank, rank + 1)


@contextmanager
def _index_folder(run_dir: Path) -> Iterator[Path]:
    if run_dir.exists():
        yield run_dir / "index"
        return
    with tempfile.TemporaryDirectory(prefix="multihop-index-") as folder:
        yield Path(folder)


def _samples(maker: BatchMaker, step: int, data_folder: Path, rank: dict[str, int]) -> list[Sample]:
    """A rank's samples, decoded from the very arrays that it would train on."""
    made, chosen = maker.step(step), maker.choose(step)
    share = share_of_rank(made.batch_size, maker.rank, maker.world_size)
    phase = maker.config.phases[chosen.phase]
    rows = look_up(
        maker.config.objective,
        maker.train_indexes[chosen.phase],
        chosen.sources[share],
        chosen.samples[share],
        phase.seq_len,
    )
    to_piece = _piece_writer(data_folder, maker.data.manifest.tokenizer)
    found = []
    for sample, epoch, row, batch in zip(
        chosen.samples[share].tolist(), chosen.epochs[share].tolist(), rows, made.micro_batches, strict=False
    ):
        seen: dict[str, Any] = batch.inputs
        facts = {"sample": sample, "epoch": epoch, **rank, **_documents(maker, row, phase.seq_len)}
        if "is_random_next" in seen:
            facts |= _second(facts["documents"], bool(seen["is_random_next"][0]))
        if "is_swapped" in seen:
            facts["is_swapped"] = bool(seen["is_swapped"][0])
        stood, predicted = seen["input_ids"].copy(), np.zeros(len(seen["input_ids"]), bool)
        if "masked_at" in seen:
            stood[seen["masked_at"]] = seen["masked_ids"]
            predicted[seen["masked_at"]] = True
        pieces = [to_piece(i) for i in stood.tolist()]
        as_seen = [
            _like(piece, to_piece(i)) if masked else piece
            for piece, i, masked in zip(pieces, seen["input_ids"].tolist(), predicted, strict=True)
        ]
        found.append(Sample(facts, pieces, as_seen, predicted.tolist()))
    assert len(found) == made.samples
    return found


def _documents(maker: BatchMaker, row: NDArray[np.int64], seq_len: int) -> dict[str, Any]:
    """All that a sample is cut from; ids are text because JSON's readers round large numbers."""
    texts, sources = maker.data.train, maker.data.manifest.sources
    parts = [
        {"document": str(texts.ids[i]), "source": sources[texts.source(i)], "start": start, "stop": stop}
        for i, start, stop in objective_of(maker.config.objective).spans(texts, row, seq_len, maker.config.objective)
        if stop > start
    ]
    return {"document": parts[0]["document"], "source": parts[0]["source"], "documents": parts}


def _second(documents: list[dict[str, Any]], is_random: bool) -> dict[str, Any]:
    second = documents[1]
    return {"next_document": second["document"], "next_source": second["source"], "is_random_next": is_random}


def _piece_writer(data_folder: Path, info: TokenizerInfo) -> Callable[[int], str]:
    """A function from an id to its text: a blank before the start of a word, and around what stands between texts."""
    model = tokenizer.load(data_folder / info.file)
    special = {i: name for name, i in info.special_ids.items()}

    def write(i: int) -> str:
        if i not in special:
            return model.piece_text(i)
        return model.id_to_piece(i) if special[i] in ("mask", "unk") else f" {model.id_to_piece(i)} "

    return write


def _joined(pieces: list[str]) -> str:
    return " ".join("".join(pieces).split())


def _like(stood: str, seen: str) -> str:
    """`seen` with the blank before it that [MASK] lacks."""
    return seen if seen.startswith(" ") or not stood.startswith(" ") else " " + seen
