"""The peers of bench/generate.py, each a process: `generate_peers.py NAME` reads a case, then generates per line."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

VOCABULARY = 50257
Case = dict[str, Any]
Generator = Callable[[], list[Any]]
"""Returns the new tokens of each prompt."""


def prompts_of(case: Case) -> list[list[int]]:
    """Return prompts of random tokens; their lengths range from half to all of the full one if the case says so."""
    import numpy as np

    rng = np.random.default_rng(case["seed"])
    shortest = case["prompt"] // 2 if case["unequal"] else case["prompt"]
    lengths = np.linspace(case["prompt"], shortest, case["batch"]).round().astype(int)
    return [rng.integers(0, VOCABULARY - 1, length).tolist() for length in lengths]


def model_of(case: Case) -> Any:
    """Return a GPT-2 with random weights that are large enough for tokens to differ, the same in each process."""
    import torch

    from multihop.pretrain.models.build import build_model
    from multihop.pretrain.models.families import parse_model_config

    sizes = {name: case[name] for name in ("layers", "hidden", "heads")}
    model = build_model(parse_model_config({"family": "gpt2", **sizes, "max_positions": 1024}), VOCABULARY)
    generator = torch.Generator().manual_seed(case["seed"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.05, generator=generator)
            if name.endswith("norm.weight"):
                parameter += 1.0
    return model.eval()


def ours(case: Case) -> Generator:
    """Return a function that generates with our key-value cache."""
    from typing import cast

    import torch

    from multihop.data_prep.tokenizers.tokenizer import Tokenizer
    from multihop.eval.inference.generate import generate_tokens
    from multihop.eval.inference.trained_model import TrainedModel

    class Vocabulary:
        vocab_size = VOCABULARY

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # A token that no model chooses ends the texts: all have the same number of new tokens.
    trained = TrainedModel("bench", model_of(case).to(device), cast(Tokenizer, Vocabulary()), {"end": -1})
    prompts = prompts_of(case)

    def run() -> list[list[int]]:
        steps = list(generate_tokens(trained, prompts, case["new"]))
        return [[token for token in column if token is not None] for column in zip(*steps, strict=True)]

    return run


def hugging_face(case: Case) -> Generator:
    """Return a function that runs transformers' `generate` on the same weights, with prompts padded on the left."""
    import torch
    import transformers

    from multihop.pretrain.models.huggingface_weights import to_huggingface

    model = model_of(case)
    config = transformers.GPT2Config(
        n_embd=case["hidden"], n_layer=case["layers"], n_head=case["heads"], bos_token_id=None, eos_token_id=None
    )
    theirs = transformers.GPT2LMHeadModel(config)
    missing = theirs.load_state_dict(dict(to_huggingface(model.config, 0, model.state_dict())), strict=False)
    assert not missing.unexpected_keys
    theirs.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    prompts = prompts_of(case)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(each)) + each for each in prompts], device=theirs.device)
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts], device=theirs.device)

    def run() -> list[list[int]]:
        made = theirs.generate(
            ids, attention_mask=mask, max_new_tokens=case["new"], do_sample=False, pad_token_id=0, eos_token_id=None
        )
        tokens: list[list[int]] = made[:, longest:].tolist()
        return tokens

    return run


PEERS = {"ours": ours, "hugging_face": hugging_face}


def peer_process(name: str, peers: dict[str, Callable[[Case], Generator]]) -> None:
    """Read a case from standard input, then generate once per line and print wall-clock and processor seconds and the
    tokens."""
    case = json.loads(sys.stdin.readline())
    import torch

    torch.set_num_threads(case["threads"])
    run = peers[name](case)
    for _ in sys.stdin:
        before, used = time.perf_counter(), time.process_time()
        tokens = run()
        times = {"seconds": time.perf_counter() - before, "cpu_seconds": time.process_time() - used}
        print(json.dumps({"peer": name, **times, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    peer_process(sys.argv[1], PEERS)
