"""An end-to-end memory network of torch's modules, on padded batches: the peer of bench/memory_networks.py."""

import torch
from torch import Tensor, nn


class PlainMemoryNetwork(nn.Module):
    """Sukhbaatar et al. 2015 with adjacent tying, position encoding and temporal encoding."""

    def __init__(self, words: int, width: int, hops: int, memories: tuple[int, int], times: int) -> None:
        super().__init__()
        self.words = nn.ModuleList(nn.Embedding(words, width, padding_idx=0) for _ in range(hops + 1))
        self.times = nn.ModuleList(nn.Embedding(times, width) for _ in range(hops + 1))
        for table in [*self.words, *self.times]:
            nn.init.normal_(table.weight, std=0.1)
        for table in self.words:
            nn.init.zeros_(table.weight[0])
        count, length = memories
        self.count = count
        place, dimension = ((2 * torch.arange(1, n + 1) - (n + 1)) / n for n in (length, width))
        self.register_buffer("encoding", 1 + place[:, None] * dimension)

    def forward(self, memories: Tensor, questions: Tensor) -> Tensor:
        """Return logits (B, V) of questions (B, J) about memories (B, M, J), which are word ids, 0 where none is."""
        filled, at = memories.any(-1), torch.arange(memories.shape[1])
        empty = (self.count - filled.sum(-1, keepdim=True)).log()
        u = (self.words[0](questions) * self.encoding).sum(1)
        for hop in range(len(self.words) - 1):
            read, write = (
                ((self.words[number](memories) * self.encoding).sum(2) + self.times[number](at)) * filled[..., None]
                for number in (hop, hop + 1)
            )
            scores = (read @ u[..., None]).squeeze(-1).masked_fill(~filled, -torch.inf)
            p = torch.cat([scores, empty], -1).softmax(-1)[:, :-1]
            u = u + (p[:, None] @ write).squeeze(1)
        return u @ self.words[-1].weight.T
