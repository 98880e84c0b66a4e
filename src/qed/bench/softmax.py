"""One token through the Transformer that QED is compared with: this package's stack with softmax attention.

Its caches lie at fixed addresses and are full but for the new token, and the step is captured as a CUDA graph, as
`model.decoding` does for recurrent layers. So what is compared are the layers, and not two ways to launch kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..layers.attention import Attention
from ..model.cache import QEDCache
from ..model.causal_lm import QEDForCausalLM
from ..model.replaying import Replayed


class SoftmaxStep:
    """A step that puts the token `self.tokens` [B, 1] behind the tokens of a cache and computes `self.logits`.

    The cache stays as it is after a step, so that all steps have the same number of tokens before them.
    """

    def __init__(self, model: QEDForCausalLM, cache: QEDCache):
        """Make the step.

        Args:
            model: A model whose layers all have softmax attention without a window.
            cache: What the model keeps of the tokens before, which all rows have the same number of.
        """
        self.model, self.caches = model, []
        for i in range(len(model.model.layers)):
            state = cache.get(i)
            batch, context = state.positions.shape
            self.caches.append([torch.cat([x, torch.zeros_like(x[:, :, :1])], 2) for x in (state.keys, state.values)])
        self.places = torch.full((batch, 1), context, device=model.device)
        self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        self.logits = torch.zeros(batch, model.config.vocab_size, device=model.device)
        self._replayed = Replayed(model.device)

    def __call__(self) -> None:
        """Compute the logits after the token. The second call on a GPU captures the step."""
        self._replayed(self._step)

    def _step(self) -> None:
        x = self.model.model.embed_tokens(self.tokens)
        blocks: list[Any] = list(self.model.model.layers)
        for block, (keys, values) in zip(blocks, self.caches, strict=True):
            attention = block.mixer
            assert isinstance(attention, Attention)
            q, k, v = (y.transpose(1, 2) for y in attention.rotated(block.mixer_norm(x), self.places))
            keys[:, :, -1:], values[:, :, -1:] = k, v
            o: Tensor = scaled_dot_product_attention(q, keys, values)
            x = x + attention.o_proj(o.transpose(1, 2).flatten(2))
            x = block.mlp(block.mlp_norm(x), residual=x)
        self.logits.copy_(self.model.lm_head(self.model.model.norm(x))[:, -1])
