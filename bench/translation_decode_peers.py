"""The peers of bench/translation_decode.py, each a process like those of bench/generate.py.

They return the hypotheses of each source, the best one first.
"""

import sys
from typing import Any

from generate_peers import Case, peer_process
from step_peers import lengths_of
from translation_step_peers import END, PAD, marian_config

UNKNOWN = 2
LENGTH_PENALTY = 0.6
Decoder = Any


def sources_of(case: Case) -> list[list[int]]:
    """Return sources of random tokens and an end token, with lengths as in bench/step.py."""
    import numpy as np

    rng = np.random.default_rng(case["seed"])
    return [
        [*rng.integers(UNKNOWN + 1, case["vocabulary"], length - 1).tolist(), END]
        for length in lengths_of({**case, "sequences": case["batch"]})
    ]


def model_of(case: Case) -> Any:
    """Return a transformer that copies its source with some uncertainty, the same in each process.

    As with a trained model, hypotheses compete, begin alike, and end where their source does. With random weights they
    would never end, or end at once. The last cross-attention attends to the source's token at its own position, by the
    sinusoids of high frequency, where the embeddings are zero; all other weights are noise.
    """
    import torch

    from multihop.pretrain.models.build import build_model
    from multihop.pretrain.models.families import parse_model_config

    model = build_model(parse_model_config({"preset": case["preset"]}), case["vocabulary"])
    hidden, width = model.config.hidden, model.config.hidden // model.config.heads
    generator = torch.Generator().manual_seed(case["seed"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=hidden**-0.5 if name == "word.weight" else 0.01, generator=generator)
            if name.endswith("norm.weight"):
                parameter += 1.0
        fastest = torch.cat([torch.arange(width // 2), hidden // 2 + torch.arange(width // 2)])
        model.word.weight[:, fastest] = 0.0
        attention = model.decoder[-1].cross_attention
        for matrix in (attention.query, attention.key):
            matrix.weight.copy_(4.0 * torch.eye(hidden)[fastest].repeat(model.config.heads, 1))
        attention.value.weight.copy_(torch.eye(hidden))
        attention.value.weight[fastest] = 0.0
        attention.output.weight.copy_(1.2 * torch.eye(hidden))
    return model.eval()


def ours(case: Case) -> Decoder:
    """Return a function that runs our beam search."""
    import torch

    from multihop.common.machine import disable_malloc_trim
    from multihop.eval.inference.beam_search import Search, beam_search
    from multihop.eval.inference.packed_weights import PackedWeights

    disable_malloc_trim()  # as `translate` does
    model = model_of(case).to("cuda" if torch.cuda.is_available() else "cpu")
    packed = PackedWeights(model)  # as `translate` does
    sources, specials = sources_of(case), {"pad": PAD, "end": END, "unk": UNKNOWN}
    search = Search(case["beams"], LENGTH_PENALTY)

    def run() -> list[list[list[int]]]:
        with packed:
            found = beam_search(model, sources, [case["new"]] * len(sources), specials, search)
        return [[hypothesis.tokens for hypothesis in each] for each in found]

    return run


def hugging_face(case: Case) -> Decoder:
    """Return a function that runs transformers' `generate` on the same weights, with sources padded on the right."""
    import torch
    import transformers

    from multihop.pretrain.models.huggingface_weights import to_huggingface

    model = model_of(case)
    sizes = model.config
    config = marian_config(sizes, case["vocabulary"])
    config.forced_eos_token_id = None
    theirs = transformers.MarianMTModel(config)
    weights = dict(to_huggingface(sizes, PAD, model.state_dict()))
    loaded = theirs.load_state_dict(weights, strict=False)
    assert not loaded.unexpected_keys
    theirs.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    sources = sources_of(case)
    longest = max(map(len, sources))
    ids = torch.tensor([[*each, *[PAD] * (longest - len(each))] for each in sources], device=theirs.device)
    mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in sources], device=theirs.device)

    def run() -> list[list[list[int]]]:
        made = theirs.generate(
            ids,
            attention_mask=mask,
            num_beams=case["beams"],
            num_return_sequences=case["beams"],
            length_penalty=LENGTH_PENALTY,
            max_new_tokens=case["new"],
            max_length=None,
            do_sample=False,
            early_stopping=False,
            bad_words_ids=[[PAD]],
        )
        rows = [row[: row.index(END) + 1] if END in row else row for row in made[:, 1:].tolist()]
        return [rows[at : at + case["beams"]] for at in range(0, len(rows), case["beams"])]

    return run


PEERS = {"ours": ours, "hugging_face": hugging_face}


if __name__ == "__main__":
    peer_process(sys.argv[1], PEERS)
