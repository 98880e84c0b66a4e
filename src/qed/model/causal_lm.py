"""The causal language model: embedding → (norm → mixer → + ; norm → SwiGLU → +) × layers → norm → logits."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from ..layers import Attention, Mixer, QEDBlock, RMSNorm, Sequences
from ..layers.sequences import DENSE
from ..routes import AUTO, REFERENCE, Call
from .arguments import given_inputs, mask_of, offsets, refuse_unknown, wants_hidden_states
from .base import QEDPreTrainedModel
from .cache import QEDCache, check_cache
from .config import QEDConfig
from .decoding import Decoders
from .generation import QEDGenerationMixin
from .routes import PROMPT, Asked


def make_block(config: QEDConfig, layer: int) -> QEDBlock:
    """The block that a configuration has at a place in the stack."""
    assert config.layer_types is not None
    assert config.layer_rules is not None
    kind, rule = config.layer_types[layer], config.layer_rules[layer]
    sizes = {"hidden_size": config.hidden_size, "num_heads": config.num_heads}
    mixer: Mixer | Attention
    if rule is None:
        window = config.sliding_window if kind == "sliding_attention" else None
        mixer = Attention(**sizes, head_dim=config.head_dim, window=window, rope_theta=config.rope_theta)
    else:
        mixer = Mixer(
            **sizes,
            head_dim=config.head_dim,
            value_head_dim=config.value_head_dim,
            rule=rule,
            conv_size=config.conv_size,
            lambda_max=config.lambda_max,
            erase_max=config.erase_max,
            read_scale=config.read_scale,
            decay_rank=config.decay_rank,
            output_gate=config.output_gate,
            output_gate_rank=config.output_gate_rank,
            norm_eps=config.norm_eps,
        )
    return QEDBlock(
        mixer,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        norm_eps=config.norm_eps,
    )


class QEDModel(QEDPreTrainedModel):
    """The stack of blocks with its embedding and last norm: from tokens to hidden states."""

    def __init__(self, config: QEDConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(make_block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: QEDCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **unknown: Any,
    ) -> BaseModelOutputWithPast:
        """Return the last hidden states, and the cache after the last token.

        Args:
            input_ids, inputs_embeds: tokens [B, T], or their embeddings [B, T, hidden].
            attention_mask: [B, tokens before + T], 0 at padding, anywhere.
            past_key_values: the cache to continue from; changed in place.
            use_cache: whether to return a cache; by default the configuration's, and never in training.
            cu_seqlens: offsets [N + 1] of N sequences packed along T; then B = 1, and there is no mask and no cache.
            position_ids, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, seq_idx: the same as collators of
                transformers and TRL say it; see `arguments.offsets`. Without a mask or a cache, position_ids that
                begin again mean packed sequences; if they come alone, a GPU is waited for to read them.
            output_hidden_states: also return the embeddings and what every block gave, the last after the norm.
            output_attentions: refused if True, as a recurrent layer has no attention weights.
            unknown: `return_dict`, False for a tuple; anything else is refused by name.
        """
        if unknown:
            refuse_unknown(QEDModel.forward, unknown)
        wanted = wants_hidden_states(self.config, output_hidden_states, output_attentions)
        given = given_inputs(input_ids, inputs_embeds)
        # A copy: layers may write over the residual stream.
        x = _in_its_precision(self.embed_tokens(given) if inputs_embeds is None else given.clone())
        packed = offsets(
            *x.shape[:2],
            cu_seqlens=cu_seqlens,
            cu_seq_lens_q=cu_seq_lens_q,
            cu_seq_lens_k=cu_seq_lens_k,
            seq_idx=seq_idx,
            position_ids=position_ids,
            max_length_q=max_length_q,
            max_length_k=max_length_k,
            continues=attention_mask is not None or past_key_values is not None,
        )
        sequences = self._sequences(x, attention_mask, past_key_values, packed)
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        use_cache = use_cache and packed is None
        if use_cache and past_key_values is None:
            past_key_values = QEDCache()
        return self._run(sequences.align(x), sequences, past_key_values, use_cache, wanted)

    def read_aligned(self, input_ids: Tensor, sequences: Sequences, cache: QEDCache) -> Tensor:
        """Return the last hidden states of an aligned batch, and leave the states after it in the cache. This is
        `forward` without all that looks at its arguments, so that it can be captured.

        Args:
            input_ids: tokens [B, T], those that exist at the start of each row.
            sequences: how many exist.
            cache: the states to start from, of all layers; replaced.
        """
        return self._run(_in_its_precision(self.embed_tokens(input_ids)), sequences, cache, True, False)[0]

    def _run(
        self, x: Tensor, sequences: Sequences, cache: QEDCache | None, use_cache: bool, hidden_states: bool
    ) -> BaseModelOutputWithPast:
        """All blocks, on the residual stream of aligned sequences."""
        if cache is not None:
            cache.detach()  # another thread may take the decoder's memory meanwhile
        seen: list[Tensor] = []
        options = {"rewind": cache.depth} if use_cache and cache is not None and cache.rewind else {}
        # transformers' early exit drafts tokens with the first layers, by a smaller number in the configuration.
        for i, layer in zip(range(self.config.num_hidden_layers), self.layers, strict=False):
            if hidden_states:
                seen.append(sequences.restore(x).clone())  # blocks may write over x
            state = None if cache is None else cache.get(i)
            run = partial(self._gradient_checkpointing_func, partial(_kept, layer)) if self._checkpoints() else layer
            x, state = run(x, state, sequences, use_cache, **options)
            if use_cache and cache is not None:
                cache.put(i, state)
        if use_cache and cache is not None:
            cache.advance(x.shape[1], sequences)
        x = sequences.restore(self.norm(x))
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=cache if use_cache else None,
            hidden_states=(*seen, x) if hidden_states else None,
        )

    def _checkpoints(self) -> bool:
        return self.gradient_checkpointing and self.training

    def _sequences(self, x: Tensor, mask: Tensor | None, cache: QEDCache | None, packed: Tensor | None) -> Sequences:
        check_cache(cache, x.shape[0])
        if packed is not None:
            return Sequences(cu_seqlens=packed)
        return DENSE if mask is None else Sequences.from_mask(mask_of(x, mask, cache))


def _kept(block: nn.Module, x: Tensor, *given: Any, **options: Any) -> tuple[Tensor, Any]:
    """Run a block on inputs that a checkpoint keeps. torch's reentrant one runs it first without gradients, and a block
    may then write over x."""
    output: tuple[Tensor, Any] = block(x if torch.is_grad_enabled() else x.clone(), *given, **options)
    return output


def _in_its_precision(x: Tensor) -> Tensor:
    """Return the residual stream in the precision of its layers: with autocast it is in low precision too."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class QEDForCausalLM(QEDPreTrainedModel, QEDGenerationMixin):
    """The language model: from tokens to logits, with transformers' `generate`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    accepts_loss_kwargs = True  # transformers' Trainer then passes `num_items_in_batch`

    def __init__(self, config: QEDConfig):
        super().__init__(config)
        self.model = QEDModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.decoders = Decoders()
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens."""
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the embedding of tokens."""
        self.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        """The matrix that makes logits."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the matrix that makes logits."""
        self.lm_head = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: QEDCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **unknown: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits, the loss if there are labels, and the cache. Other arguments as in `QEDModel.forward`.

        Args:
            labels: like input_ids; shifted here, −100 ignored, and no sequence predicts the next one's first token.
            logits_to_keep: how many positions from the end, or which; 0 for all. A cache that can go back can then go
                back over all of these positions but the first.
            num_items_in_batch: what to divide the sum of losses by, instead of how many there are here: a batch that
                comes in pieces then has the same loss and gradient as the whole.
        """
        if unknown:
            refuse_unknown(QEDForCausalLM.forward, unknown)
        hidden_states = wants_hidden_states(self.config, output_hidden_states, output_attentions)
        if isinstance(past_key_values, QEDCache) and isinstance(logits_to_keep, int):
            past_key_values.expect(logits_to_keep - 1)
        given = given_inputs(input_ids, inputs_embeds)
        continues = attention_mask is not None or past_key_values is not None
        said: dict[str, Any] = {"cu_seqlens": cu_seqlens, "seq_idx": seq_idx, "position_ids": position_ids}
        said |= {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
        said |= {"max_length_q": max_length_q, "max_length_k": max_length_k}
        packed = offsets(*given.shape[:2], **said, continues=continues)
        if input_ids is not None and not torch.compiler.is_compiling():
            plain = {"hidden states of all layers": hidden_states, "a loss": labels is not None}
            plain |= {"packed sequences": packed is not None, "embeddings as inputs": inputs_embeds is not None}
            last = isinstance(logits_to_keep, int) and 1 in (logits_to_keep, input_ids.shape[1])
            plain |= {"logits of other positions than the last": not last}
            captured = self._captured(input_ids, attention_mask, past_key_values, use_cache, plain)
            if captured is not None:
                return captured
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seqlens=packed,
            output_hidden_states=hidden_states,
            return_dict=True,
        )
        return self._with_logits(found, labels, logits_to_keep, packed, num_items_in_batch)

    def _with_logits(
        self,
        found: BaseModelOutputWithPast,
        labels: Tensor | None,
        logits_to_keep: int | Tensor,
        packed: Tensor | None,
        items: Tensor | int | None,
    ) -> CausalLMOutputWithPast:
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        hidden = found.last_hidden_state if isinstance(kept, int) else found.last_hidden_state[:, kept]
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            if not isinstance(kept, int):
                raise ValueError("labels: a loss needs every position's logits; logits_to_keep must be 0")
            loss = causal_loss(logits, labels, packed, items)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=found.past_key_values, hidden_states=found.hidden_states
        )

    def _captured(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        cache: QEDCache | None,
        use_cache: bool | None,
        plain: dict[str, bool],
    ) -> CausalLMOutputWithPast | None:
        """Read a prompt or a token as the captured route does; None where it is not taken. `plain` says what only the
        plain forward has, and whether it is asked for."""
        check_cache(cache)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        only_plain = tuple(words for words, wanted in plain.items() if wanted)
        options: dict[str, Any] = {"keeps_cache": use_cache, "masked": mask is not None, "only_plain": only_plain}
        asked = Asked(model=self, batch=tokens.shape[0], cache=cache, **options)
        route = PROMPT.pick(AUTO, Call.of(tokens, *tokens.shape), asked)
        if route.name == REFERENCE:
            return None
        cache = QEDCache() if cache is None else cache
        mask = None if mask is None else mask_of(tokens, mask, cache)
        with self.decoders.lock:  # until the logits are out of the decoder's memory
            logits = route.run(asked, cache, tokens, mask)[:, None].clone()
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)


def causal_loss(
    logits: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None, items: Tensor | int | None = None
) -> Tensor:
    """Mean cross-entropy of every next token, or their sum over `items`, in at least float32.

    Args:
        logits: [B, T, vocabulary].
        labels: [B, T]; −100 is ignored.
        cu_seqlens: offsets of packed sequences, whose first tokens nothing predicts.
        items: what to divide the sum by; None for how many predictions there are.
    """
    if labels.shape != logits.shape[:2]:
        raise ValueError(
            f"labels: expected a token for every input, {list(logits.shape[:2])}, got {list(labels.shape)}"
        )
    targets = nn.functional.pad(labels, (0, 1), value=-100)
    if cu_seqlens is not None:  # an empty sequence begins where the next one does, or behind the last token
        targets = targets.index_fill(1, cu_seqlens[:-1].to(torch.int64), -100)
    targets = targets[:, 1:]
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    if items is None:
        return nn.functional.cross_entropy(wide, targets.flatten())
    total = nn.functional.cross_entropy(wide, targets.flatten(), reduction="sum")
    return total / (items.to(total.device) if isinstance(items, Tensor) else items)


def recompute_cheap(model: QEDForCausalLM, how: str = "cheap") -> None:
    """Keep products for the backward, of matrices and of the recurrence, and make again what is cheap: norms (but for
    their scales), gates, the convolution. About half the memory for a few per cent of a step's time where blocks are
    compiled.

    Args:
        model: the model, not yet compiled.
        how: "cheap"; "light" to keep the operands of the recurrence too; "lean" to make SwiGLU's product and the
            narrow products of bottlenecks again as well.
    """
    # torch warns of operations in place inside what is made again: there are none.
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: "context_fn" not in str(record.msg))
    for block in model.model.layers:
        assert isinstance(block, QEDBlock)
        block.recomputes = how


def compile_blocks(model: QEDForCausalLM) -> None:
    """Each block as one program; all share what was compiled for the first."""
    for block in model.model.layers:
        block.compile()
