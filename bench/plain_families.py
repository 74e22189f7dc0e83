"""Minimal models of torch's modules, on rectangular batches (B, T). The tagger also needs pytorch-crf."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class PlainBag(nn.Module):
    """CBOW: a masked token by the mean of the embeddings of `window` tokens on each side."""

    def __init__(self, vocab_size: int, hidden: int, window: int, dropout: float) -> None:
        super().__init__()
        self.window = window
        self.word = nn.Embedding(vocab_size, hidden)
        self.dropout, self.transform = nn.Dropout(dropout), nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, vocab_size)
        self.head.weight = self.word.weight
        nn.init.normal_(self.word.weight, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of predicting `labels`, int64 (B, T), which are -100 where nothing is predicted."""
        x = self.dropout(self.word(ids)).transpose(1, 2)
        width = 2 * self.window + 1
        ones = torch.ones_like(x[:, :1])
        total, count = (F.avg_pool1d(each, width, 1, self.window) * width - each for each in (x, ones))
        predicted = labels >= 0
        context = self.transform((total / count.clamp(min=1)).transpose(1, 2)[predicted])
        return F.cross_entropy(self.head(context), labels[predicted])


class PlainAwdLstm(nn.Module):
    """Merity et al. 2018 over torch.nn.LSTM, with weight dropout as fastai has it."""

    def __init__(self, vocab_size: int, widths: list[int], rates: dict[str, float], alpha: float, beta: float) -> None:
        super().__init__()
        self.rates, self.alpha, self.beta = rates, alpha, beta
        self.word = nn.Embedding(vocab_size, widths[0])
        self.layers = nn.ModuleList(nn.LSTM(inputs, width, batch_first=True) for inputs, width in pairwise(widths))
        self.head = nn.Linear(widths[-1], vocab_size)
        self.head.weight = self.word.weight
        nn.init.uniform_(self.word.weight, -0.1, 0.1)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of predicting `labels`, int64 (B, T)."""
        kept = F.dropout(ids.new_ones(self.word.num_embeddings, 1, dtype=torch.float), self.rates["embedding_dropout"])
        x = self.locked(F.embedding(ids, self.word.weight * kept), "input_dropout")
        for number, layer in enumerate(self.layers):
            x = x if number == 0 else self.locked(x, "hidden_dropout")
            dropped = {"weight_hh_l0": F.dropout(layer.weight_hh_l0, self.rates["weight_dropout"])}
            x, _ = functional_call(layer, dropped, (x,))
        output = self.locked(x, "dropout")
        loss = F.cross_entropy(self.head(output).flatten(0, 1), labels.flatten())
        return loss + self.alpha * output.square().mean() + self.beta * x.diff(dim=1).square().mean()

    def locked(self, x: Tensor, rate: str) -> Tensor:
        return x * F.dropout(torch.ones_like(x[:, :1]), self.rates[rate])


class ClippedLstm(nn.Module):
    """One direction of an LSTM with a projection, in a loop over time, because torch.nn.LSTM cannot clip.

    The steps are those of AllenNLP's LstmCellWithProjection, which also multiplies the inputs in the loop; here one
    product over all steps does.
    """

    def __init__(self, width: int, cells: int, cell_clip: float, projection_clip: float) -> None:
        super().__init__()
        self.cells, self.cell_clip, self.projection_clip = cells, cell_clip, projection_clip
        self.inputs, self.states = nn.Linear(width, 4 * cells, bias=False), nn.Linear(width, 4 * cells)
        self.projection = nn.Linear(cells, width, bias=False)
        nn.init.zeros_(self.states.bias)
        nn.init.ones_(self.states.bias[cells : 2 * cells].detach())

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """x and the first result are (B, T, width); there is no second one."""
        out, cell = x.new_zeros(len(x), x.shape[2]), x.new_zeros(len(x), self.cells)
        outs = []
        for now in self.inputs(x).unbind(1):
            i, f, g, o = (now + self.states(out)).chunk(4, 1)
            cell = (i.sigmoid() * g.tanh() + f.sigmoid() * cell).clamp(-self.cell_clip, self.cell_clip)
            out = self.projection(o.sigmoid() * cell.tanh()).clamp(-self.projection_clip, self.projection_clip)
            outs.append(out)
        return torch.stack(outs, 1), None


class PlainBilm(nn.Module):
    """Two language models of LSTMs with projections and skip connections: of torch.nn.LSTM, or clipped ones."""

    def __init__(
        self,
        vocab_size: int,
        layers: int,
        width: int,
        cells: int,
        dropout: float,
        clips: tuple[float, float] | None,
    ) -> None:
        super().__init__()
        self.word, self.dropout = nn.Embedding(vocab_size, width), nn.Dropout(dropout)

        def lstm() -> nn.Module:
            if clips is None:
                return nn.LSTM(width, cells, batch_first=True, proj_size=width)
            return ClippedLstm(width, cells, *clips)

        self.directions = nn.ModuleList(nn.ModuleList(lstm() for _ in range(layers)) for _ in range(2))
        self.head = nn.Linear(width, vocab_size)
        self.head.weight = self.word.weight
        nn.init.normal_(self.word.weight, std=width**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the mean loss of both directions."""
        losses = []
        for text, layers in zip((ids, ids.flip(1)), self.directions, strict=True):
            x = self.word(text)
            for number, layer in enumerate(layers):
                out, _ = layer(self.dropout(x))
                x = out if number == 0 else x + out
            logits = self.head(self.dropout(x[:, :-1]))
            losses.append(F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()))
        return torch.stack(losses).mean()


class PlainCtc(nn.Module):
    """A bidirectional torch.nn.LSTM whose outputs are scored by torch.nn.functional.ctc_loss."""

    def __init__(self, vocab_size: int, layers: int, hidden: int, dropout: float, blank: int) -> None:
        super().__init__()
        self.blank = blank
        self.word, self.dropout = nn.Embedding(vocab_size, hidden), nn.Dropout(dropout)
        self.encoder = nn.LSTM(hidden, hidden // 2, layers, batch_first=True, dropout=dropout, bidirectional=True)
        self.head = nn.Linear(hidden, vocab_size)
        self.head.weight = self.word.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the targets `labels`, int64 (B, U), of sources of full length."""
        x, _ = self.encoder(self.dropout(self.word(ids)))
        scores = self.head(self.dropout(x)).log_softmax(-1).transpose(0, 1)
        lengths, targets = (torch.full((len(ids),), each.shape[1]) for each in (ids, labels))
        return F.ctc_loss(scores, labels, lengths, targets, blank=self.blank, reduction="sum") / labels.numel()


class PlainTagger(nn.Module):
    """A bidirectional torch.nn.LSTM and pytorch-crf's CRF over frozen word vectors."""

    def __init__(self, vocab_size: int, width: int, layers: int, units: int, labels: int, dropout: float) -> None:
        from torchcrf import CRF

        super().__init__()
        self.word = nn.Embedding(vocab_size, width).requires_grad_(False)
        self.lstm = nn.LSTM(width, units, layers, batch_first=True, bidirectional=True)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(2 * units, labels)
        self.crf = CRF(labels, batch_first=True)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of a word's label; `labels`, int64 (B, T), are negative at the padding."""
        mask = labels >= 0
        words = pack_padded_sequence(self.word(ids), mask.sum(1).cpu(), batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(self.lstm(words)[0], batch_first=True)
        loss: Tensor = -self.crf(self.head(self.dropout(x)), labels.clamp(min=0), mask, reduction="token_mean")
        return loss
