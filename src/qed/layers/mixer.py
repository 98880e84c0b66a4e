"""The token mixer: any row of the rule table as a layer.

    x → q, k, v → short convolution, SiLU → L2 norm of q and k
      → decay g = −exp(A_log)·softplus(W_f x + dt_bias), gates b = b_max·σ(W_b x) and w = σ(W_w x),
        strength λ_h = λ_max·σ(θ_h), where the paper has b_max = 1 and λ_max = 0.25
      → rule → S_t = (I − k aᵀ) Diag(exp g) S_{t−1} + k uᵀ,  o_t = scale · Sᵀ q
      → RMSNorm of each head, times a gate → W_o

A rule's row says which of these it takes and how wide they are; the layer has parameters for those alone.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..choices import check_choice
from ..ops.affine import segment
from ..ops.routes import RECURRENCE
from ..routes import AUTO, Call, Impl, check_name
from ..rules import RULES, Operands, Projections, l2_normalize
from .context import Context
from .convolution import ShortConvolution
from .functions import last_inputs
from .initialization import THETA, fill_directions, fill_log_rate, fill_time_step, filled
from .norm import GatedRMSNorm, RMSNorm
from .projections import into_residual
from .rewind import RewindState, recorded
from .routes import OPERANDS, project
from .sequences import DENSE, Sequences


class MixerState(NamedTuple):
    """Where a mixer leaves off; of fixed size, whatever it has read."""

    conv: Tensor  # [N, W − 1, 2·H·K + H·V] the last inputs of the convolution
    recurrent: Tensor  # [N, H, K, V] float32


class Gates(NamedTuple):
    """The projections that become the erase gate, the write gate, the decay and a direction, before any function of
    them, and λ; None where a rule has none."""

    b: Tensor | None
    w: Tensor | None
    f: Tensor | None
    e: Tensor | None
    strength: Tensor | None


class Mixer(nn.Module):
    """The token mixer of any rule.

    Args:
        rule: a name of `RULES`.
        lambda_max, erase_max: bounds of the strength and of the erase gate, λ = lambda_max · σ(θ) and
            b = erase_max · σ(W_b x). With 2 a step can turn what lies along the key around: 1 − b is in (−1, 1).
        read_scale: factor on the read o = scale · Sᵀ q.
        decay_rank: width of the bottleneck of W_f where the decay is per channel; None for `head_dim`.
        output_gate: "silu", "sigmoid", or None for the norm alone.
        output_gate_rank: width of the gate's bottleneck; None for `value_head_dim`, 0 for one full matrix.
    """

    random_direction: Tensor
    context: Context | None = None  # where a sequence is spread over processes
    impl: Impl = AUTO

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        value_head_dim: int,
        rule: str = "qed",
        conv_size: int = 4,
        lambda_max: float = 0.25,
        erase_max: float = 1.0,
        read_scale: float = 1.0,
        decay_rank: int | None = None,
        output_gate: str | None = "silu",
        output_gate_rank: int | None = None,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        check_choice("rule", rule, RULES)
        self.rule, self.row = rule, RULES[rule]
        self.num_heads, self.head_dim, self.value_head_dim = num_heads, head_dim, value_head_dim
        self.lambda_max, self.erase_max = lambda_max, erase_max
        self.read_scale, self.strength_scale = read_scale, 1.0
        keys, values = num_heads * head_dim, num_heads * value_head_dim
        decay_rank = decay_rank or head_dim
        gate_rank = value_head_dim if output_gate_rank is None else output_gate_rank
        gate_inputs = 0 if output_gate is None else gate_rank or values

        def width(wanted: str, channels: int) -> int:
            return {"none": 0, "head": num_heads, "channel": channels}[wanted]

        numbers = partial(torch.empty, dtype=torch.float32)  # in float32 whatever the layer is computed in
        # One matrix for all that comes from x: how many outputs each part has. q, k and v lie side by side for the
        # convolution.
        self.parts = {"qkv": 2 * keys + values}
        self.parts |= {"b": width(self.row.erase, keys), "w": width(self.row.write, values)}
        self.parts |= {"f": width(self.row.decay, decay_rank), "output_gate": gate_inputs}
        self.parts |= {"e": keys if self.row.direction == "token" else 0}
        self.in_proj = nn.Linear(hidden_size, sum(self.parts.values()), bias=False)
        self.conv = ShortConvolution(2 * keys + values, conv_size)
        self.f_proj = nn.Linear(decay_rank, keys, bias=False) if self.row.decay == "channel" else None
        self.g_proj = nn.Linear(gate_rank, values) if gate_inputs and gate_rank else None
        if self.row.decay != "none":
            self.A_log = nn.Parameter(filled(numbers(num_heads), fill_log_rate))
            self.dt_bias = nn.Parameter(filled(numbers(width(self.row.decay, keys)), fill_time_step))
        if self.row.strength:
            self.theta = nn.Parameter(numbers(num_heads).fill_(THETA))
        if self.row.direction == "head":
            self.register_buffer("random_direction", filled(numbers(num_heads, head_dim), fill_directions))
        self.o_norm = (
            GatedRMSNorm(value_head_dim, output_gate, norm_eps) if output_gate else RMSNorm(value_head_dim, norm_eps)
        )
        self.o_proj = into_residual(values, hidden_size)

    def in_proj_parts(self) -> dict[str, int]:
        """How many outputs of `in_proj` belong to each projection, q, k and v apart, in their order."""
        keys = self.num_heads * self.head_dim
        return {"q": keys, "k": keys, "v": self.parts["qkv"] - 2 * keys} | {
            name: width for name, width in self.parts.items() if name != "qkv"
        }

    def strength(self) -> Tensor:
        """λ_h [H], scaled by `strength_scale` (the paper's s)."""
        return self.strength_scale * self.lambda_max * torch.sigmoid(_wide(self.theta))

    def forward(
        self,
        x: Tensor,
        state: MixerState | RewindState | None = None,
        sequences: Sequences = DENSE,
        *,
        residual: Tensor | None = None,
        inplace: bool = False,
        rewind: int = 0,
        impl: str | None = None,
    ) -> tuple[Tensor, MixerState | RewindState]:
        """Return outputs like x, and the state after the last token.

        Args:
            x: [B, T, hidden].
            state: the state to start from; None for the beginning of a sequence.
            sequences: where sequences begin and end.
            residual: the residual stream, like x, to add the outputs to; it may be written over.
            inplace: for one token, write the recurrent state over the old one.
            rewind: how many of the last tokens the returned state can go back; with 0 it is a plain `MixerState`.
            impl: the routes for this call, such as "reference" for plain torch; None for the layer's own.
        """
        if impl is not None:
            check_name(impl, RECURRENCE.names)
        return self._forward(x, state, sequences, residual, inplace, rewind, self.impl if impl is None else impl)

    def _forward(
        self,
        x: Tensor,
        state: MixerState | RewindState | None,
        sequences: Sequences,
        residual: Tensor | None,
        inplace: bool,
        rewind: int,
        impl: Impl,
    ) -> tuple[Tensor, MixerState | RewindState]:
        inputs = self._inputs(x, impl)
        qkv = inputs["qkv"]
        if self.context is not None:
            state = self._state_from_context(qkv, state, sequences)
        gates = self._gates(inputs, impl)
        operands, gate, conv = self._operands(inputs, None if state is None else state.conv, sequences, gates, impl)
        output_gate = None if gate is None else self._output_gate(gate, impl)
        recurrence = RECURRENCE.wanted(impl)
        if self.context is not None and state is not None:
            state = state._replace(recurrent=self.context.start(segment(*operands[1:], impl=recurrence)))
        if state is not None and x.shape[1] == 1 and sequences.cu_seqlens is None and sequences.lengths is None:
            o, recurrent = self.row.run_step(
                operands, state=state.recurrent, scale=self.read_scale, inplace=inplace, impl=recurrence
            )
        else:
            o, recurrent = self.row.run(
                operands,
                scale=self.read_scale,
                initial_state=None if state is None else state.recurrent,
                cu_seqlens=sequences.cu_seqlens,
                there=sequences.there(x.shape[1]),
                impl=recurrence,
            )
        normal = self.o_norm(o, impl=impl) if output_gate is None else self.o_norm(o, output_gate, impl=impl)
        y, now = project(self.o_proj, normal.flatten(-2), residual, impl), MixerState(conv, recurrent)
        if not rewind:
            return y, now
        depth = {"substeps": self.row.substeps, "tokens": rewind}
        return y, recorded(state, now, qkv, operands, sequences, **depth, impl=recurrence)

    def projections(self, x: Tensor) -> Projections:
        """What the rule takes for tokens x [B, T, hidden] from a sequence's beginning: to look at."""
        inputs = self._inputs(x, self.impl)
        return self._projections(self.conv(inputs["qkv"]), self._gates(inputs, self.impl))

    def _inputs(self, x: Tensor, impl: Impl) -> dict[str, Tensor]:
        """x's projections by name, and "all" of them side by side. They are split once, so that the gradient is one
        concatenation."""
        projected = project(self.in_proj, x, impl=impl)
        split = projected.split(list(self.parts.values()), -1)
        return dict(zip(self.parts, split, strict=True)) | {"all": projected}

    def _state_from_context(self, qkv: Tensor, state: object, sequences: Sequences) -> MixerState:
        """The convolution's first inputs, from the process before; the recurrent state follows after the rule."""
        before = self.conv.weight.shape[1] - 1
        if state is not None or sequences != DENSE:
            raise ValueError("a sequence over several processes starts from nothing, without padding or packing")
        if qkv.shape[1] < before:
            raise ValueError(f"expected at least {before} tokens in each process, got {qkv.shape[1]}")
        assert self.context is not None
        conv = self.context.before(qkv[:, qkv.shape[1] - before :])
        return MixerState(conv, conv.new_empty(0))

    def _gates(self, inputs: dict[str, Tensor], impl: Impl) -> Gates:
        """What else the rule takes, before any function of it."""
        b, w, f, e = (inputs[name] if self.parts[name] else None for name in ("b", "w", "f", "e"))
        if f is not None and self.f_proj is not None:
            f = project(self.f_proj, f, impl=impl)
        return Gates(b, w, f, e, self.strength() if self.row.strength else None)

    def _output_gate(self, gate: Tensor, impl: Impl) -> Tensor:
        """The output's gate before its activation, from its part of `in_proj`."""
        if self.g_proj is not None:  # as a matrix: of any other shape torch adds the bias in a pass of its own
            gate = project(self.g_proj, gate.flatten(0, 1), impl=impl).unflatten(0, gate.shape[:2])
        return self._heads(gate)

    def _heads(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (self.num_heads, -1))

    def _operands(
        self, inputs: dict[str, Tensor], state: Tensor | None, sequences: Sequences, gates: Gates, impl: Impl
    ) -> tuple[Operands, Tensor | None, Tensor]:
        """What the recurrence takes, the part of `in_proj` that becomes the output's gate, and the convolution's state
        after the last token."""
        qkv, packed = inputs["qkv"], sequences.cu_seqlens is not None
        call = Call.of(qkv, qkv.shape[0], qkv.shape[1], packed=packed, state=state is not None)
        operands, gate = OPERANDS.pick(impl, call, self).run(self, inputs, state, sequences, gates, impl)
        return operands, gate, last_inputs(qkv, self.conv.weight.shape[1] - 1, state, sequences)

    def operands_of_convolved(self, qkv: Tensor, gates: Gates) -> Operands:
        """What the recurrence takes, in plain torch, from q, k and v after the convolution and from the gates."""
        return self.row.operands(self._projections(qkv, gates))

    def _projections(self, qkv: Tensor, gates: Gates) -> Projections:
        heads, (b, w, f, e, strength) = self._heads, gates
        keys = self.num_heads * self.head_dim
        q, k, v = (heads(y) for y in qkv.split([keys, keys, self.parts["qkv"] - 2 * keys], -1))
        direction = None if e is None else l2_normalize(heads(e))
        if self.row.direction == "head":
            direction = self.random_direction.to(qkv.dtype)
        return Projections(
            l2_normalize(q),
            l2_normalize(k),
            v,
            g=None if f is None else self._log_decay(heads(_wide(f) + _wide(self.dt_bias))),
            b=None if b is None else heads(self._erase_gate(b)),
            w=None if w is None else heads(torch.sigmoid(w)),
            strength=strength,
            direction=direction,
        )

    def _erase_gate(self, x: Tensor) -> Tensor:
        b = torch.sigmoid(x)
        return b if self.erase_max == 1 else self.erase_max * b

    def _log_decay(self, x: Tensor) -> Tensor:
        return -_wide(self.A_log).exp()[:, None] * nn.functional.softplus(x)

    def extra_repr(self) -> str:
        """The rule and the heads' sizes, for printing."""
        return f"rule={self.rule!r}, heads={self.num_heads} × ({self.head_dim}, {self.value_head_dim})"


def _wide(x: Tensor) -> Tensor:
    """In at least float32: decays and strengths are too fine for 16 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
