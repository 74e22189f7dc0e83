"""A minimal recurrent translator of torch's modules: the peer that uses torch alone.

It is the same model as `pretrain/models/seq2seq`: its encoder reads in both directions, each half as wide as the
decoder, which begins with the encoder's last states; one matrix embeds both sides and is the output layer.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class PlainLSTM(nn.Module):
    """A model that returns the loss of predicting `labels` (-100: padding), int64 (B, Tt).

    It reads `inputs`, int64 (B, Tt), and `sources`, int64 (B, Ts), of `lengths`, int64 (B,) on the CPU.
    """

    def __init__(
        self, vocab_size: int, layers: int, hidden: int, dropout: float, attends: bool, feeds: bool, smoothing: float
    ) -> None:
        super().__init__()
        self.attends, self.feeds, self.smoothing = attends, feeds, smoothing
        self.word = nn.Embedding(vocab_size, hidden)
        between = dropout if layers > 1 else 0.0
        self.encoder = nn.LSTM(hidden, hidden // 2, layers, batch_first=True, dropout=between, bidirectional=True)
        if feeds:
            self.cells = nn.ModuleList(nn.LSTMCell(hidden if n else 2 * hidden, hidden) for n in range(layers))
        else:
            self.decoder = nn.LSTM(hidden, hidden, layers, batch_first=True, dropout=between)
        if attends:
            self.key, self.readout = (nn.Linear(n * hidden, hidden, bias=False) for n in (1, 2))
        self.head = nn.Linear(hidden, vocab_size)
        self.head.weight = self.word.weight
        self.dropout = nn.Dropout(dropout)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)

    def forward(self, sources: Tensor, lengths: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        embedded = self.dropout(self.word(sources))
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        out, last = self.encoder(packed)
        source, _ = pad_packed_sequence(out, batch_first=True)
        # (2 * layers, B, hidden / 2) -> (layers, B, hidden): both directions side by side.
        states = tuple(part.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2) for part in last)
        padding = torch.arange(source.shape[1]) >= lengths[:, None]
        x = self.dropout(self.word(inputs))
        if self.feeds:
            x = self.step_by_step(x, states, source, padding.to(source.device))
        else:
            x, _ = self.decoder(x, states)
            if self.attends:
                x = self.attend(x, self.key(source), source, padding.to(source.device))
            x = self.dropout(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), label_smoothing=self.smoothing)

    def step_by_step(self, x: Tensor, states: tuple[Tensor, ...], source: Tensor, padding: Tensor) -> Tensor:
        """Run the decoder with input feeding (Luong et al. 2015, section 3.3)."""
        key = self.key(source)
        each = [(h, c) for h, c in zip(*states, strict=True)]
        fed, outs = torch.zeros_like(x[:, 0]), []
        for now in x.unbind(1):
            now = torch.cat([now, fed], 1)
            for number, cell in enumerate(self.cells):
                each[number] = cell(self.dropout(now) if number else now, each[number])
                now = each[number][0]
            fed = self.dropout(self.attend(now[:, None], key, source, padding)[:, 0])
            outs.append(fed)
        return torch.stack(outs, 1)

    def attend(self, h: Tensor, key: Tensor, source: Tensor, padding: Tensor) -> Tensor:
        """Apply attention of type general, then equation 5 (Luong et al. 2015, section 3)."""
        scores = torch.bmm(h, key.transpose(1, 2)).masked_fill(padding[:, None], -torch.inf)
        context = torch.bmm(scores.softmax(-1), source)
        return self.readout(torch.cat([context, h], 2)).tanh()
