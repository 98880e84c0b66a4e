"""A layer of your own in a plain torch model: your projections around `qed_attention`, beside a layer of `qed.layers`.

    python examples/own_layer.py

The model has two blocks. The first one's layer is written here, around the operator alone; the second one's is `Mixer`,
the package's own, which has the same job. The model learns to answer questions about the newest of several statements.
"""

import tiny
import torch
from torch import Tensor, nn

from qed import QEDConfig, qed_attention
from qed.layers import Mixer
from qed.model.initialization import initialize

WIDTH, HEADS = 64, 2
STEPS = 100


class OwnLayer(nn.Module):
    """Everything around the operator is up to you: here a convolution over four tokens, and one matrix for the rest."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.convolution = nn.Conv1d(width, width, 4, groups=width)
        self.projections = nn.Linear(width, 6 * width)
        self.theta = nn.Parameter(torch.full((heads,), -2.0))  # λ = 0.25 · sigmoid(θ) is 0.03 at the start
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs like x, [batch, tokens, width]."""
        past = nn.functional.pad(x.transpose(1, 2), (3, 0))  # so that no token sees a later one
        mixed = nn.functional.silu(self.convolution(past)).transpose(1, 2)
        # Six tensors [batch, tokens, heads, width / heads]. The operator itself gives q and k unit length.
        q, k, v, g, b, w = self.projections(mixed).unflatten(-1, (6, self.heads, -1)).unbind(2)
        o, _ = qed_attention(
            q,
            k,
            v,
            g=-nn.functional.softplus(g - 3),  # the log-decay, which is never positive
            b=torch.sigmoid(b),  # how much to erase
            w=torch.sigmoid(w),  # how much to write
            strength=0.25 * torch.sigmoid(self.theta),  # λ of each head: 0 is Gated DeltaNet-2
        )
        return self.output(o.flatten(2))


class PackagedLayer(nn.Module):
    """The same with the package's layer, which also returns the state it leaves off in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        sizes = {"hidden_size": width, "num_heads": heads, "head_dim": width // heads, "value_head_dim": width // heads}
        self.mixer = Mixer(**sizes, rule="qed")
        # Its matrices begin as torch's do. This gives them what our own models start from, which learns faster here.
        self.mixer.apply(lambda part: initialize(part, QEDConfig(initializer_range=0.1)))

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs like x, [batch, tokens, width]."""
        return self.mixer(x)[0]


class Model(nn.Module):
    """Embedding → (norm → layer → +; norm → MLP → +) × 2 → norm → logits."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList([OwnLayer(WIDTH, HEADS), PackagedLayer(WIDTH, HEADS)])
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in self.layers
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [batch, tokens, vocabulary]."""
        x = self.embedding(ids)
        for i, (layer, mlp) in enumerate(zip(self.layers, self.mlps, strict=True)):
            x = x + layer(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(self.norms[4](x))


torch.manual_seed(0)
tokenizer = tiny.make_tokenizer()
rows = tiny.encode(tokenizer, tiny.documents(tiny.ROWS * STEPS))
model = Model(tokenizer.get_vocab_size())
before = tiny.accuracy(model, tokenizer)

optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
losses = []
for batch in rows.split(tiny.ROWS):
    logits = model(batch)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

after = tiny.accuracy(model, tokenizer)
strengths = 0.25 * torch.sigmoid(model.layers[0].theta.detach())
print(f"The loss fell from {losses[0]:.2f} to {losses[-1]:.2f} in {STEPS} steps.")
print(f"The model answered {before:.0%} of the questions before training, and {after:.0%} after it.")
print(f"λ of our own layer's heads began at 0.030 and is now {', '.join(f'{x:.3f}' for x in strengths)}.")
