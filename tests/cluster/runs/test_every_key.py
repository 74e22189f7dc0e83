"""Every key of a recipe has an effect: another value of it changes what the code does, or is refused.

`KEYS` says for each key what a change of it must alter: the key of the prepared data, the batches of a run's steps, a
model's parameters and outputs, DeepSpeed's configuration, and so on. Effects that only a running process shows are
tested elsewhere, by the test that is named. A key without an entry fails.
"""

import itertools
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from many_shards import prepare_many_shards
from rank_jobs import run_worker
from rank_pool import RankPool
from recipe_effects import RecipeEffects
from worker_runs import rows

from multihop.cluster.runs.recipe import Recipe, load_recipe
from multihop.common.config import effects_by_key
from multihop.common.errors import UserError
from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.pretrain.checkpoint.verify import list_steps

ROOT = Path(__file__).parents[3]
STEPS = 24
_SIZES = {"layers": 2, "hidden": 32, "heads": 2, "max_positions": 64, "dropout": 0.1}


MASKED: dict[str, Any] = {
    "name": "run",
    "seed": 5,
    "data": {"sources": [{"path": "texts/a"}, {"path": "texts/b"}], "heldout_fraction": 0.1},
    "tokenizer": {"vocab_size": 100, "threads": 1},
    "model": {"family": "bert", **_SIZES},
    "objective": {"name": "mlm"},
    "phases": [{"seq_len": 32, "global_batch_size": 40, "steps": STEPS}],
    "engine": {"deepspeed": {}, "micro_batch_size": 16, "heldout_samples": 8},
    "eval": {"seeds": [1], "inits": ["pretrained"]},
}
PAIRS: dict[str, Any] = {
    **MASKED,
    "data": {"sources": [{"path": "pairs.jsonl", "fields": {"source": "en", "target": "es"}}]},
    "tokenizer": {"vocab_size": 120, "special_tokens": "t5", "threads": 1},
    "model": {"family": "transformer", **_SIZES},
    "objective": {"name": "translation"},
}
CAUSAL: dict[str, Any] = {
    **MASKED,
    "tokenizer": {"vocab_size": 100, "special_tokens": "gpt2", "threads": 1},
    "model": {"family": "gpt2", **_SIZES},
    "objective": {"name": "clm"},
}
SHARED: dict[str, Any] = {**MASKED, "model": {"family": "albert", "embedding": 16, **_SIZES}}
BY_TOKENS = {
    **PAIRS,
    "phases": [{"seq_len": 32, "global_batch_tokens": 200, "steps": STEPS}],
    "engine": {"deepspeed": {}, "heldout_samples": 8},
}
MODERN = {
    **MASKED,
    "model": {
        "family": "modernbert", "layers": 3, "hidden": 32, "heads": 2, "max_positions": 64, "local_attention": 8,
    },
}  # fmt: skip
BAG = {**MASKED, "model": {"family": "bag", "hidden": 32, "max_positions": 64}}
AWD = {**CAUSAL, "model": {"family": "awd-lstm", "layers": 2, "hidden": 32, "max_positions": 64}}
BILM = {
    **MASKED,
    "model": {"family": "bilm", "layers": 2, "hidden": 32, "lstm_width": 16, "max_positions": 64, "dropout": 0.1},
    "objective": {"name": "bilm"},
}
RECURRENT = {**PAIRS, "model": {"family": "seq2seq", "layers": 2, "hidden": 32, "max_positions": 64, "cell": "lstm"}}
MONOTONIC: dict[str, Any] = {
    **PAIRS,
    "data": {**PAIRS["data"], "max_bad_fraction": 1.0},
    "model": {"family": "ctc-encoder", "layers": 2, "hidden": 32, "max_positions": 64},
    "objective": {"name": "ctc"},
}


@dataclass(frozen=True)
class Key:
    """The effect of another value of a key, in combination with other values."""

    alters: str
    """Name of the attribute of `RecipeEffects` that changes."""
    value: Any
    beside: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=lambda: MASKED)


_PHASE = "phases[0]"
_TWO_FILES = {"path": "a.txt", "target_path": "c.txt"}
_RAMP = {f"{_PHASE}.batch_ramp": [{"steps": 2, "global_batch_size": 8}]}
_SCALED = {f"{_PHASE}.lr_scaling": {"rule": "sqrt", "global_batch_size": 8}}
_LAMB = {"optimizer.name": "lamb"}
_MUON = {"optimizer.name": "muon"}
_TASK: dict[str, Any] = {"eval.tasks": [{"name": "TASKS/small.yaml"}]}
_TAGS: dict[str, Any] = {"eval.tasks": [{"name": "TASKS/tags.yaml"}]}
_SETTINGS: dict[str, Any] = {
    "epochs": [1.0], "batch_size": [8], "lr": [1e-3], "warmup_ratio": 0.2, "weight_decay": 0.1, "dropout": 0.3,
    "head_dropout": 0.3, "pooling": "mean", "seq_len": 48, "stride": 64, "document_context": True,
    "max_examples": 10, "max_dev_examples": 10, "report_on": "dev",
    "schedule": "slanted_triangular", "layer_lr_decay": 0.5, "gradual_unfreezing": True,
}  # fmt: skip
_FEATURES = {"layers": [-1], "combine": "sum", "head": "linear", "lstm_width": 32}

KEYS: dict[str, Key] = {
    "name": Key("checkpoints", "other", {"checkpoint.location": "/store"}),
    "seed": Key("batches", 6),
    "data.sources[].path": Key("prepared_data", "texts/c"),
    "data.sources[].field": Key("prepared_data", "body"),
    "data.sources[].fields.source": Key("prepared_data", "de", base=PAIRS),
    "data.sources[].fields.target": Key("prepared_data", "de", base=PAIRS),
    "data.sources[].fields.relation": Key("prepared_data", "rel", base=PAIRS),
    "data.sources[].target_path": Key("prepared_data", "b.txt", {"data.sources": [_TWO_FILES]}, PAIRS),
    "data.sources[].documents": Key("prepared_data", "line"),
    "data.sources[].language": Key("prepared_data", "de"),
    "data.sources[].weight": Key("batches", 3.0, {"data.sources[0].weight": 1.0, "data.sources[1].weight": 1.0}),
    "data.heldout_fraction": Key("prepared_data", 0.2),
    "data.max_bad_fraction": Key("prepared_data", 0.2),
    "data.shuffle_window_shards": Key("batches", 2),
    "model.preset": Key("model", "bert-mini", {"model": {"preset": "bert-tiny", "max_positions": 64}}),
    "model.family": Key("model", "roberta"),
    "model.layers": Key("model", 3),
    "model.hidden": Key("model", 48),
    "model.embedding": Key("model", 16, {"model.family": "albert"}),
    "model.heads": Key("model", 4),
    "model.intermediate": Key("model", 48),
    "model.max_positions": Key("model", 96),
    "model.dropout": Key("model", 0.5),
    "model.output_bias": Key("initial_weights", "unigram"),
    "model.word_init": Key("initial_weights", "cooccurrences"),
    "model.attention_init": Key("initial_weights", "neighbors"),
    "model.norm": Key("model", "pre", base=PAIRS),
    "model.positions": Key("model", "relative"),
    "model.max_distance": Key("model", 4, {"model.positions": "relative"}),
    "model.local_attention": Key("model", 4, base=MODERN),
    "model.feed_forward": Key("model", "gelu", base=MODERN),
    "model.global_attn_every_n_layers": Key("model", 2, base=MODERN),
    "model.global_rope_theta": Key("model", 100.0, base=MODERN),
    "model.local_rope_theta": Key("model", 100.0, base=MODERN),
    "model.encoder": Key("model", "gru", base=MONOTONIC),
    "model.window": Key("model", 1, base=BAG),
    "model.input_dropout": Key("model", 0.5, base=AWD),
    "model.hidden_dropout": Key("model", 0.5, base=AWD),
    "model.embedding_dropout": Key("model", 0.5, base=AWD),
    "model.weight_dropout": Key("model", 0.5, base=AWD),
    "model.alpha": Key("model", 0.0, base=AWD),
    "model.beta": Key("model", 0.0, base=AWD),
    "model.bptt": Key("model", 5, base=AWD),
    "model.cell": Key("model", "gru", base=RECURRENT),
    "model.attention": Key("model", "general", {"model.attention": "dot"}, RECURRENT),
    "model.input_feeding": Key("model", True, {"model.attention": "dot", "model.input_feeding": False}, RECURRENT),
    "model.lstm_width": Key("model", 24, base=BILM),
    "model.skip_connections": Key("model", False, base=BILM),
    "model.cell_clip": Key("model", 1e-3, base=BILM),
    "model.projection_clip": Key("model", 1e-3, base=BILM),
    "objective.name": Key("batches", "mlm+nsp"),
    "objective.mask_rate": Key("batches", 0.3),
    "objective.max_predictions": Key("batches", 2),
    "objective.masking": Key("batches", "words"),
    "objective.static_masks": Key("batches", 1),
    "objective.isolate_documents": Key("batches", True),
    "objective.mem_len": Key("batches", 8, base=BILM),
    "objective.label_smoothing": Key("model", 0.0, base=PAIRS),
    "phases[].seq_len": Key("batches", 48),
    "phases[].global_batch_size": Key("batches", 24),
    "phases[].global_batch_tokens": Key("batches", 300, base=BY_TOKENS),
    "phases[].batch_ramp[].steps": Key("batches", 3, _RAMP),
    "phases[].batch_ramp[].global_batch_size": Key("batches", 9, _RAMP),
    "phases[].steps": Key("schedule", 30),
    "phases[].skip_steps": Key("schedule", [3]),
    "phases[].lr": Key("schedule", 2e-3),
    "phases[].lr_scaling.rule": Key("schedule", "linear", _SCALED),
    "phases[].lr_scaling.global_batch_size": Key("schedule", 9, _SCALED),
    "phases[].schedule": Key("schedule", "cosine"),
    "phases[].warmup_ratio": Key("schedule", 0.5),
    "phases[].warmup_steps": Key("schedule", 5),
    "phases[].power": Key("schedule", 2.0, {f"{_PHASE}.schedule": "polynomial"}),
    "phases[].decay_ratio": Key("schedule", 0.5, {f"{_PHASE}.schedule": "warmup-stable-decay"}),
    "phases[].min_lr_ratio": Key("schedule", 0.1),
    "phases[].global_rope_theta": Key("model", 100.0, base=MODERN),
    "optimizer.name": Key("optimizer", "lamb"),
    "optimizer.weight_decay": Key("optimizer", 0.1),
    "optimizer.betas": Key("optimizer", [0.9, 0.98]),
    "optimizer.eps": Key("optimizer", 1e-8),
    "optimizer.max_grad_norm": Key("deepspeed", 0.5),
    "optimizer.max_trust_ratio": Key("optimizer", 5.0, _LAMB),
    "optimizer.momentum": Key("optimizer", 0.9, _MUON),
    "optimizer.muon_scale": Key("optimizer", "original", _MUON),
    "optimizer.adamw_lr_ratio": Key("optimizer", 0.1, _MUON),
    "optimizer.layer_lr_decay": Key("optimizer", 0.5),
    "engine.deepspeed": Key("deepspeed", {"zero_optimization": {"reduce_bucket_size": 1000}}),
    "engine.zero_stage": Key("deepspeed", 2),
    "engine.offload": Key("deepspeed", "optimizer"),
    "engine.precision": Key("deepspeed", "bf16"),
    "engine.micro_batch_size": Key("batches", 4),
    "engine.micro_batch_tokens": Key("batches", 64, base=BY_TOKENS),
    "engine.activation_checkpointing": Key("kept_activations", "full"),
    "engine.heldout_samples": Key("heldout", 4),
    "checkpoint.location": Key("checkpoints", "/store"),
    "tokenizer.path": Key("prepared_data", "vocab.txt", {"tokenizer": {"path": "other.txt"}}),
    "tokenizer.add_words": Key("prepared_data", 5, {"tokenizer": {"path": "vocab.txt"}}),
    "tokenizer.added_tokens": Key("prepared_data", ["<is_a>"]),
    "tokenizer.lowercase": Key("prepared_data", False, {"tokenizer": {"path": "vocab.txt"}}),
    "tokenizer.kind": Key("prepared_data", "bpe"),
    "tokenizer.vocab_size": Key("prepared_data", 200),
    "tokenizer.special_tokens": Key("prepared_data", "albert"),
    "tokenizer.separate_vocabularies": Key("prepared_data", True, base=PAIRS),
    "tokenizer.byte_fallback": Key("prepared_data", True),
    "tokenizer.sample_mb": Key("prepared_data", 1.0),
    "tokenizer.threads": Key("prepared_data", 2),
    **{f"eval.{name}": Key("trials", value, _TASK) for name, value in _SETTINGS.items()},
    **{f"eval.tasks[].{name}": Key("trials", value, _TASK) for name, value in _SETTINGS.items()},
    **{
        f"eval.features.{name}": Key("trials", value, {**_TASK, "eval.features": {}})
        for name, value in _FEATURES.items()
    },
    **{
        f"eval.tasks[].features.{name}": Key("trials", value, {**_TASK, "eval.tasks[0].features": {}})
        for name, value in _FEATURES.items()
    },
    "eval.pooling.hops": Key("trials", 2, {**_TASK, "eval.pooling": {"hops": 1}}),
    "eval.tasks[].pooling.hops": Key("trials", 2, {**_TASK, "eval.tasks[0].pooling": {"hops": 1}}),
    "eval.tasks[].name": Key("trials", "TASKS/large.yaml", _TASK),
    "eval.tasks[].start_from": Key(
        "trials", "TASKS/large.yaml", {"eval.tasks": [{"name": "TASKS/small.yaml"}, {"name": "TASKS/large.yaml"}]}
    ),
    "eval.seeds": Key("trials", [2], _TASK),
    "eval.inits": Key("trials", ["random"], _TASK),
    "eval.data_dir": Key("trials", "/elsewhere", _TASK),
    "eval.cpus": Key("trials", 2, _TASK),
    "eval.gpus": Key("trial_resources", 0.25),
    "eval.memory_gb": Key("trial_resources", 3.0),
}  # fmt: skip
FILTERS = re.compile(r"data\.(clean|filters|near_duplicates|decontaminate)\.")
"""Keys that all alter the key of the prepared data."""
A_RUN = {
    "engine.log_interval", "engine.eval_interval",
    "checkpoint.save_interval", "checkpoint.keep", "checkpoint.keep_every",
}  # fmt: skip
"""Keys whose effect `test_a_run_logs_evaluates_and_saves_at_the_configured_steps` tests."""
_OF_CHARACTERS = "tests/pretrain/models/test_bilm.py::test_the_sizes_of_characters_are_those_of_the_weights"
ELSEWHERE = {
    "model.init_from": "tests/pretrain/run/test_training.py::test_another_run_begins_with_the_weights_of_the_first",
    **{f"model.characters.{name}": _OF_CHARACTERS for name in ("embedding", "filters", "highways", "max_characters")},
    "engine.compile": "tests/pretrain/engine/test_engine.py::test_compiled_layers_give_the_same_training",
    "engine.deterministic": "tests/pretrain/engine/test_device.py::test_new_memory_is_not_filled",
    "engine.data_workers": "tests/pretrain/data/test_batches.py::test_processes_that_make_batches_ahead_change_nothing",
    "engine.max_consecutive_nonfinite_steps": "tests/pretrain/run/test_training.py::test_a_run_that_stays_not_finite_"
    "ends_with_the_steps_and_their_samples",
    "checkpoint.audit.every": "tests/cluster/runs/test_audit.py::test_a_run_audits_its_checkpoints",
    "engine.replica_check_interval": "tests/pretrain/run/test_replica_check.py::test_a_flipped_bit_is_found_before_a_"
    "save_and_a_rerun_loses_only_the_steps_since",
    "engine.hang_timeout_s": "tests/pretrain/run/test_training.py::test_a_silent_rank_is_dumped_and_ended",
    "eval.examples": "tests/cluster/runs/test_whole_path.py::test_examples_are_regenerated_only_if_the_texts_change",
    "eval.checkpoint": "tests/cluster/runs/test_whole_path.py::test_a_run_that_is_evaluated_as_another_model_and_back_"
    "reports_the_last_evaluation",
    "eval.average_with": "tests/eval/trials/test_three_stages.py::test_from_general_text_by_target_text_to_a_"
    "classifier",
    "tracking.uri": "tests/cluster/tracking/test_whole_run.py::test_a_run_whose_mlflow_is_away_for_minutes",
    "tracking.experiment": "tests/cluster/tracking/test_store.py::test_a_deleted_experiment_is_the_users_mistake",
    "cluster.address": "tests/cluster/ray/test_elastic.py::test_a_run_grows_when_a_node_joins_and_shrinks_when_it_is_"
    "lost",
    "cluster.workers": "tests/cluster/ray/test_elastic.py::test_a_run_grows_when_a_node_joins_and_shrinks_when_it_is_"
    "lost",
    "cluster.env": "tests/cluster/jobs/test_jobs.py::test_a_run_is_submitted_followed_twice_stopped_resumed_and_"
    "fetched",
}
"""Keys whose effect only running processes show, each with the test that sets it."""


def test_every_key_has_an_entry() -> None:
    entries = {*KEYS, *A_RUN, *ELSEWHERE}
    keys = {key for key in effects_by_key(Recipe) if not FILTERS.match(key)}
    assert entries == keys
    for key, where in ELSEWHERE.items():
        path, name = where.split("::")
        _, *after = re.split(rf"^def {name}\b", (ROOT / path).read_text(), flags=re.MULTILINE)
        assert len(after) == 1, f"{where} does not exist"
        body = re.split(r"^(?:def|class|@)", after[0], flags=re.MULTILINE)[0]
        assert re.search(rf"(?:\b|_){key.rpartition('.')[2]}\b", body), f"{where} does not look at {key}"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, texts: Path, gpt2_data: Path, pairs_data: Path) -> Path:
    """A folder with a data set of two sources in many shards, one for causal models, one of pairs, and tasks."""
    folder = tmp_path_factory.mktemp("every-key")
    for part, name in enumerate("ab"):
        (folder / "texts" / name).mkdir(parents=True)
        for path in sorted(texts.iterdir())[part * 60 : part * 60 + 60]:
            (folder / "texts" / name / path.name).write_bytes(path.read_bytes())
    sources = [Source(path=str(folder / "texts" / name)) for name in "ab"]
    tokenizer = TokenizerConfig.model_validate(MASKED["tokenizer"])
    prepare_many_shards(DataConfig(sources=sources, heldout_fraction=0.1), tokenizer, folder / "masked")
    (folder / "pairs").symlink_to(pairs_data)
    (folder / "causal").symlink_to(gpt2_data)
    for number, name in enumerate(("small", "large")):
        lines = "".join(f"river {row},{(row + number) % 2}\n" for row in range(40 + 20 * number))
        (folder / f"{name}.csv").write_text("what,how\n" + lines)
        described = f"kind: classification\ntrain: {name}.csv\nfields: {{text: what, label: how}}\n"
        (folder / f"{name}.yaml").write_text(described)
    return folder


def put(tree: Any, key: str, value: Any) -> None:
    """Set a key of a recipe: "phases[0].lr"; "[]" is the first item."""
    path: list[str | int] = [name or int(number or 0) for name, number in re.findall(r"(\w+)|\[(\d*)\]", key)]
    for parent, following in itertools.pairwise(path):
        if isinstance(parent, str) and tree.get(parent) is None:
            tree[parent] = [] if isinstance(following, int) else {}
        tree = tree[parent]
    tree[path[-1]] = value


def seen(workplace: Path, base: dict[str, Any], changes: dict[str, Any]) -> RecipeEffects:
    """Return the effects of a recipe that is loaded as a user gives it."""
    content = deepcopy(base)
    for key, value in changes.items():
        put(content, key, deepcopy(value))
    path = workplace / "recipe.yaml"
    path.write_text(yaml.safe_dump(content).replace("TASKS", str(workplace)))
    data = {"clm": "causal", "translation": "pairs", "ctc": "pairs"}.get(content["objective"]["name"], "masked")
    return RecipeEffects(load_recipe(path, []), workplace / data, workplace / "index")


@pytest.mark.parametrize("key", KEYS)
def test_another_value_changes_what_the_code_does(workplace: Path, key: str) -> None:
    entry = KEYS[key]
    one, other = (
        getattr(seen(workplace, entry.base, changes), entry.alters)
        for changes in (entry.beside, {**entry.beside, key: entry.value})
    )
    assert one != other


GROUPS: dict[str, Any] = {
    "data.clean": {},
    "data.filters": {"c4": {}, "language": {"keep": ["en"]}, "gopher_quality": {}, "gopher_repetition": {}},
    "data.near_duplicates": {"bands": 8},
    "data.decontaminate": {"against": ["a.txt"]},
}
OF_PAIRS: dict[str, Any] = {"data.filters": {"pairs": {"languages": {"source": "en", "target": "es"}}}}
WORDS = {"data.decontaminate.action": "cut", "data.filters.c4.bad_words": "words.txt"}


@pytest.mark.parametrize("key", [key for key in effects_by_key(Recipe) if FILTERS.match(key)])
def test_another_rule_makes_another_data_set(workplace: Path, key: str) -> None:
    base, groups = (PAIRS, OF_PAIRS) if ".pairs." in key else (MASKED, GROUPS)
    one = seen(workplace, base, groups)
    value: Any = one.recipe.data
    for part in key.split(".")[1:]:
        value = getattr(value, part)
    match value:
        case bool():
            other: Any = not value
        case int():
            other = value + 8
        case float():
            other = value / 2
        case list():
            other = [*value, "other"]
        case _:
            other = WORDS.get(key, "other")
    assert seen(workplace, base, {**groups, key: other}).prepared_data != one.prepared_data


WITHOUT_EFFECT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (CAUSAL, {"objective.mask_rate": 0.3}, "objective.mask_rate"),
    (CAUSAL, {"objective.max_predictions": 3}, "objective.max_predictions"),
    (CAUSAL, {"objective.masking": "words"}, "objective.masking"),
    (CAUSAL, {"objective.static_masks": 3}, "objective.static_masks"),
    (CAUSAL, {"objective.label_smoothing": 0.0}, "objective.label_smoothing"),
    (PAIRS, {"objective.mask_rate": 0.3}, "objective.mask_rate"),
    (MASKED, {"objective.label_smoothing": 0.0}, "objective.label_smoothing"),
    (MASKED, {f"{_PHASE}.power": 2.0}, "phases[0].power"),
    (MASKED, {f"{_PHASE}.decay_ratio": 0.5}, "phases[0].decay_ratio"),
    (MASKED, {f"{_PHASE}.schedule": "constant", f"{_PHASE}.min_lr_ratio": 0.1}, "phases[0].min_lr_ratio"),
    (MASKED, {f"{_PHASE}.global_rope_theta": 100.0}, "phases[0].global_rope_theta"),
    (MODERN, {"model.positions": "learned", "model.local_rope_theta": 100.0}, "model.local_rope_theta"),
    (MODERN, {"model.positions": "learned", f"{_PHASE}.global_rope_theta": 100.0}, "phases[0].global_rope_theta"),
    (MODERN, {"model.global_attn_every_n_layers": 1}, "model.local_attention"),
    (MODERN, {"model.layers": 1}, "model.local_attention"),
    (MODERN, {"model.local_attention": 126}, "model.local_attention"),
    (
        MODERN,
        {"model.global_attn_every_n_layers": 1, "model.local_attention": 128, "model.local_rope_theta": 100.0},
        "model.local_rope_theta",
    ),
    (MASKED, {"optimizer.max_trust_ratio": 5.0}, "optimizer.max_trust_ratio"),
    (MASKED, {**_LAMB, "optimizer.momentum": 0.9}, "optimizer.momentum"),
    (MASKED, {"optimizer.muon_scale": "original"}, "optimizer.muon_scale"),
    (MASKED, {"optimizer.adamw_lr_ratio": 0.1}, "optimizer.adamw_lr_ratio"),
    (BY_TOKENS, {"engine.micro_batch_size": 4}, "engine.micro_batch_size"),
]


@pytest.mark.parametrize(("base", "changes", "key"), WITHOUT_EFFECT)
def test_a_value_that_would_be_ignored_is_refused(
    workplace: Path, base: dict[str, Any], changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(UserError, match=rf"^{re.escape(key)}=\S+ has no effect with .*; remove it, or set "):
        seen(workplace, base, changes)


BASES = {
    "causal": CAUSAL,
    "awd-lstm": AWD,
    "shared": SHARED,
    "modern": MODERN,
    "pairs": PAIRS,
    "by-tokens": BY_TOKENS,
    "recurrent": RECURRENT,
}
_NAMED = ("model.preset", "model.max_positions")
"""Keys without an effect in these recipes, which give the sizes of a preset, and for which the other is a limit."""
OF_TRAINING = [
    key
    for key in KEYS
    if key.startswith(("model.", "objective.", "phases", "optimizer.", "engine.")) and key not in _NAMED
]
VIEWS = ("batches", "heldout", "schedule", "optimizer", "deepspeed", "initial_weights", "model", "kept_activations")


@pytest.mark.long
@pytest.mark.parametrize("key", OF_TRAINING)
@pytest.mark.parametrize("kind", BASES)
def test_with_every_kind_of_model_a_value_has_an_effect_or_is_refused(workplace: Path, kind: str, key: str) -> None:
    entry = KEYS[key]
    beside = {name: value for name, value in entry.beside.items() if name != "model"}
    try:
        one, other = (seen(workplace, BASES[kind], changes) for changes in (beside, {**beside, key: entry.value}))
    except UserError as error:
        # What is refused is the key, or what it has an effect with; another family has other keys.
        named = [name.rpartition(".")[2] for name in (key, *beside)] + ["model."] * ("model.family" in {key, *beside})
        assert any(name in str(error) for name in named)
        return
    first = sorted(VIEWS, key=lambda view: view != entry.alters)
    assert one.recipe == other.recipe or any(getattr(one, view) != getattr(other, view) for view in first)


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_a_run_logs_evaluates_and_saves_at_the_configured_steps(
    workplace: Path, tmp_path: Path, pool: Callable[[int], RankPool]
) -> None:
    changes = {
        "phases[0].steps": 12,
        "engine.log_interval": 5,
        "engine.eval_interval": 4,
        "checkpoint.save_interval": 3,
        "checkpoint.keep": 1,
        "checkpoint.keep_every": 6,
    }
    run_dir = tmp_path / "run"
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "data").symlink_to(workplace / "masked")
    (run_dir / "recipe.json").write_text(seen(workplace, MASKED, changes).recipe.model_dump_json())
    assert pool(1).run(run_worker, run_dir) == [0]
    assert [row["step"] for row in rows(run_dir) if "loss" in row] == [5, 10, 12]
    assert [row["step"] for row in rows(run_dir) if "heldout_loss" in row] == [0, 4, 8, 12]
    assert list_steps(str(run_dir / "checkpoints")) == [6, 12]
