"""The model that vLLM builds for a checkpoint of this package, of the package's own layers.

vLLM keeps the states: of a recurrent layer one for each request, in a slot of its memory, and copies of it where a
prefix may be used again; of a softmax layer the keys and values, which its own attention reads. A step computes tokens
of many requests at once, which come as one row of tokens: first the requests that have one token each, then the
prompts, or pieces of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention as PagedAttention
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.utils import maybe_prefix
from vllm.v1.attention.backends.linear_attn import LinearAttentionBackend, LinearAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from ..layers import MixerState, QEDBlock, RMSNorm, Sequences
from ..layers.sequences import DENSE
from ..model.causal_lm import make_block
from ..model.config import QEDConfig
from .sharding import Shards, config_of_process


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Some requests of a step, and where their states are."""

    tokens: slice  # of the step's row
    slots: Tensor | slice  # one for each request; a slice where they lie side by side, so that nothing is copied
    begins: Tensor | None  # bool, which of them begin with this step, from states of zeros; None if none does
    sequences: Sequences  # one token each, or packed

    @staticmethod
    def of(tokens: slice, slots: Tensor, begins: Tensor, sequences: Sequences) -> Requests:
        """Return the requests. What a CPU can look at without waiting makes a step cheaper.

        Args:
            tokens: their tokens in the step's row.
            slots: [requests], where the state of each is.
            begins: [requests] bool, which of them begin.
            sequences: the layout of their tokens.
        """
        if slots.device.type != "cpu":
            return Requests(tokens=tokens, slots=slots, begins=begins, sequences=sequences)
        numbers = slots.tolist()
        together = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        return Requests(
            tokens=tokens,
            slots=slice(numbers[0], numbers[-1] + 1) if together else slots,
            begins=begins if begins.any() else None,
            sequences=sequences,
        )


@dataclass(frozen=True, kw_only=True)
class Step:
    """What recurrent layers have to know of one step of the engine. All layers whose states lie alike share it."""

    requests: list[Requests]  # those with one token each, if there are some, and then all others
    tokens: int  # of all requests; what follows them in the row is padding


class StepBuilder(LinearAttentionMetadataBuilder):
    """Makes a `Step` of what vLLM says of a batch."""

    supports_update_block_table = False

    def build(self, *arguments: Any, **options: Any) -> Step:
        """Return the step that vLLM's arguments describe."""
        said = super().build(*arguments, **options)
        alone, every = said.num_decodes, said.num_decodes + said.num_prefills
        tokens = said.num_decode_tokens + said.num_prefill_tokens
        starts = said.query_start_loc[: every + 1].to(torch.int64)
        slots, begins = said.state_indices_tensor[:every].to(torch.int64), said.seq_lens[:every] == starts.diff()
        requests = []
        if alone:
            requests.append(Requests.of(slice(0, alone), slots[:alone], begins[:alone], DENSE))
        if alone < every:
            packed = Sequences(cu_seqlens=starts[alone:] - said.num_decode_tokens)
            requests.append(Requests.of(slice(alone, tokens), slots[alone:], begins[alone:], packed))
        return Step(requests=requests, tokens=tokens)


class StepBackend(LinearAttentionBackend):
    """How vLLM finds the builder."""

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        """Return the builder of steps."""
        return StepBuilder


class ServedBlock(nn.Module):
    """A block of the stack with the heads and columns of this process, on a row of tokens."""

    def __init__(self, config: QEDConfig, layer: int):
        super().__init__()
        self.rank, processes = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.shards = Shards(config, layer, rank=self.rank, processes=processes)
        self.block: QEDBlock = make_block(config_of_process(config, processes), layer)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the residual stream [tokens, hidden] after the block.

        Every process adds a part to it. The first one adds the stream itself too, so that the sum over all processes
        has it once.
        """
        x = self._summed(self.mix(self.block.mixer_norm(x), positions, self._residual(x)))
        return self._summed(self.block.mlp(self.block.mlp_norm(x), self._residual(x)))

    def mix(self, x: Tensor, positions: Tensor, residual: Tensor | None) -> Tensor:
        """Return this process's part of what the mixer makes of x, with the residual stream if there is one.

        Args:
            x: [tokens, hidden], after the norm.
            positions: [tokens], every token's place in its sequence.
            residual: [tokens, hidden], or None.
        """
        raise NotImplementedError

    def _residual(self, x: Tensor) -> Tensor | None:
        return x if self.rank == 0 else None

    def _summed(self, x: Tensor) -> Tensor:
        y: Tensor = tensor_model_parallel_all_reduce(x)
        return y


class RecurrentBlock(ServedBlock, MambaBase):
    """A block with a recurrent mixer, whose states are in vLLM's memory."""

    mamba_type = MambaAttentionBackendEnum.LINEAR

    def __init__(self, config: QEDConfig, layer: int, vllm_config: VllmConfig, prefix: str):
        super().__init__(config, layer)
        self.prefix, self.vllm_config = prefix, vllm_config
        self.kv_cache = (torch.empty(0), torch.empty(0))  # until vLLM binds its memory
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of one request's states."""
        return QEDForVLLM.get_mamba_state_shape_from_config(self.vllm_config)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the states."""
        return QEDForVLLM.get_mamba_state_dtype_from_config(self.vllm_config)

    def get_attn_backend(self) -> type[StepBackend]:
        """Return how vLLM describes a step to this layer."""
        return StepBackend

    def mix(self, x: Tensor, positions: Tensor, residual: Tensor | None) -> Tensor:
        """Return what the mixer makes of x. Requests with one token take the mixer's step, all others are packed.

        Args:
            x, positions, residual: as in `ServedBlock.mix`.
        """
        found = get_forward_context().attn_metadata
        if found is None:  # vLLM measures memory with tokens that belong to no request
            y, _ = self.block.mixer(x[None], residual=None if residual is None else residual[None])
            return y[0]
        step: Step = found[self.prefix]
        parts = [self._run(requests, x, residual) for requests in step.requests]
        if step.tokens < x.shape[0]:
            parts.append(torch.zeros_like(x[step.tokens :]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run(self, requests: Requests, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return what the mixer makes of some requests' tokens of the row x, from their states, and keep the new
        states."""
        alone, slots = requests.sequences is DENSE, requests.slots
        cached_conv, cached_recurrent = self.kv_cache
        conv, recurrent = cached_conv[slots], cached_recurrent[slots]
        if requests.begins is not None:
            conv.masked_fill_(requests.begins[:, None, None], 0)
            recurrent.masked_fill_(requests.begins[:, None, None, None], 0)
        batched = [None if y is None else y[requests.tokens].unsqueeze(1 if alone else 0) for y in (x, residual)]
        y, new = self.block.mixer(
            batched[0], MixerState(conv, recurrent), requests.sequences, residual=batched[1], inplace=alone
        )
        cached_conv[slots] = new.conv
        if not (alone and isinstance(slots, slice)):  # otherwise the step has written it in its place
            cached_recurrent[slots] = new.recurrent
        return y.squeeze(1 if alone else 0)


class SoftmaxBlock(ServedBlock):
    """A block with softmax attention, whose keys and values are in vLLM's memory."""

    def __init__(self, config: QEDConfig, layer: int, vllm_config: VllmConfig, prefix: str):
        super().__init__(config, layer)
        mixer: Any = self.block.mixer
        self.attention = PagedAttention(
            mixer.num_heads,
            mixer.head_dim,
            scale=mixer.head_dim**-0.5,
            num_kv_heads=mixer.num_heads,
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=mixer.window,
            prefix=f"{prefix}.attention",
        )

    def mix(self, x: Tensor, positions: Tensor, residual: Tensor | None) -> Tensor:
        """Return what the attention makes of x.

        Args:
            x, positions, residual: as in `ServedBlock.mix`.
        """
        mixer: Any = self.block.mixer
        q, k, v = (y[0].flatten(1) for y in mixer.rotated(x[None], positions[None]))
        o = self.attention(q, k, v)
        if get_forward_context().attn_metadata is None:  # tokens that belong to no request: vLLM has written nothing
            o = torch.zeros_like(o)
        y: Tensor = mixer.o_proj(o)
        return y if residual is None else residual + y


class QEDForVLLM(nn.Module, HasInnerState, IsHybrid):
    """The language model under vLLM: recurrent layers, softmax layers, or both."""

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a request's states in one recurrent layer of one process: the convolution's last inputs,
        and the recurrent state."""
        config: QEDConfig = vllm_config.model_config.hf_config
        heads = config.num_heads // vllm_config.parallel_config.tensor_parallel_size
        channels = heads * (2 * config.head_dim + config.value_head_dim)
        return (config.conv_size - 1, channels), (heads, config.head_dim, config.value_head_dim)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the same: the weights' own, and float32."""
        return vllm_config.model_config.dtype, torch.float32

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        """Return how vLLM copies the states of a prefix that is kept: whole."""
        return MambaStateCopyFuncCalculator.linear_attention_state_copy_func() * 2

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config: QEDConfig = vllm_config.model_config.hf_config
        self.config = config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        rules = config.layer_rules or []
        self.layers = nn.ModuleList(
            (SoftmaxBlock if rule is None else RecurrentBlock)(
                config, i, vllm_config, maybe_prefix(prefix, f"layers.{i}")
            )
            for i, rule in enumerate(rules)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings of tokens."""
        x: Tensor = self.embed_tokens(input_ids)
        return x

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states of a step's tokens.

        Args:
            input_ids: [tokens].
            positions: [tokens], every token's place in its sequence.
            intermediate_tensors: what an earlier stage of a pipeline gave; there is none.
            inputs_embeds: embeddings [tokens, hidden] instead of tokens.
        """
        # A copy: layers may write over the residual stream.
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds.clone()
        for layer in self.layers:
            x = layer(x, positions)
        y: Tensor = self.norm(x)
        return y

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return the logits of hidden states, on the process that chooses tokens."""
        logits: Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint's weights, of every one this process's part, and return the names of those that were
        loaded. ValueError if one is unknown, missing or of another shape."""
        # vLLM's attention has scales of its own, which no checkpoint of this package has.
        own = {name: x for name, x in self.state_dict(keep_vars=True).items() if ".attention." not in name}
        loaded, blocks = set(), cast(list[ServedBlock], list(self.layers))
        for name, weight in weights:
            name = name.removeprefix("model.")
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            if name.startswith("layers."):
                _, layer, rest = name.split(".", 2)
                weight, name = blocks[int(layer)].shards.of(rest, weight), f"layers.{layer}.block.{rest}"
            if name not in own:
                raise ValueError(f"{name}: not a weight of this model")
            getattr(own[name], "weight_loader", default_weight_loader)(own[name], weight)
            loaded.add(name)
        tied = {"lm_head.weight"} if self.config.tie_word_embeddings else set()
        missing = sorted(own.keys() - loaded - tied)
        if missing:
            raise ValueError(f"{missing[0]}: not in the checkpoint, and {len(missing) - 1} more are missing")
        return loaded
