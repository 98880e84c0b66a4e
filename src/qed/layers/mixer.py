"""The token mixer: any row of the rule table as a layer.

    x → q, k, v → short convolution, SiLU → L2 norm of q and k
      → decay g = −exp(A_log)·softplus(W_f x + dt_bias), gates b = σ(W_b x), w = σ(W_w x), strength λ_h = λ_max·σ(θ_h)
      → rule → S_t = (I − k aᵀ) Diag(exp g) S_{t−1} + k uᵀ,  o_t = scale · Sᵀ q
      → RMSNorm of each head, times a gate → W_o

A rule's row says which of these it takes and how wide they are; the layer has parameters for those alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops.affine import segment
from ..rules import RULES, Operands, Projections, l2_normalize
from . import prologue, prologue_operator
from .context import Context
from .convolution import ShortConvolution, last_inputs
from .fused import fused, pays
from .linear import Linear, ResidualProjection, onto
from .norm import GatedRMSNorm, RMSNorm
from .sequences import DENSE, Sequences


class MixerState(NamedTuple):
    """Of fixed size, whatever has been read."""

    conv: Tensor  # [N, W − 1, 2·H·K + H·V] the last inputs of the convolution
    recurrent: Tensor  # [N, H, K, V] float32


class Gates(NamedTuple):
    """What becomes the erase gate, the write gate, the decay and a direction, and λ; None where a rule has none."""

    b: Tensor | None
    w: Tensor | None
    f: Tensor | None
    e: Tensor | None
    strength: Tensor | None


class Mixer(nn.Module):
    random_direction: Tensor
    context: Context | None = None  # where a sequence is spread over processes

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
        read_scale: float = 1.0,
        decay_rank: int | None = None,
        output_gate: str | None = "silu",
        output_gate_rank: int | None = None,
        norm_eps: float = 1e-5,
    ):
        """
        Args:
            rule: a name of `RULES`.
            read_scale: factor on the read o = scale · Sᵀ q.
            decay_rank: width of the bottleneck of W_f where the decay is per channel; None for `head_dim`.
            output_gate: "silu", "sigmoid", or None for the norm alone.
            output_gate_rank: width of the gate's bottleneck; None for `value_head_dim`, 0 for one full matrix.
        """
        super().__init__()
        if rule not in RULES:
            raise ValueError(f"rule: expected one of {', '.join(RULES)}, got {rule!r}")
        self.rule, self.row = rule, RULES[rule]
        self.num_heads, self.head_dim, self.value_head_dim = num_heads, head_dim, value_head_dim
        self.lambda_max, self.read_scale, self.strength_scale = lambda_max, read_scale, 1.0
        keys, values = num_heads * head_dim, num_heads * value_head_dim
        decay_rank = decay_rank or head_dim
        gate_rank = value_head_dim if output_gate_rank is None else output_gate_rank
        gate_inputs = 0 if output_gate is None else gate_rank or values

        def width(wanted: str, channels: int) -> int:
            return {"none": 0, "head": num_heads, "channel": channels}[wanted]

        # One matrix for all that comes from x: its rows, by name. q, k and v lie side by side for the convolution.
        self.rows = {"qkv": 2 * keys + values}
        self.rows |= {"b": width(self.row.erase, keys), "w": width(self.row.write, values)}
        self.rows |= {"f": width(self.row.decay, decay_rank), "g": gate_inputs}
        self.rows |= {"e": keys if self.row.direction == "token" else 0}
        self.in_proj = Linear(hidden_size, sum(self.rows.values()), bias=False)
        self.conv = ShortConvolution(2 * keys + values, conv_size)
        self.f_proj = Linear(decay_rank, keys, bias=False) if self.row.decay == "channel" else None
        self.g_proj = Linear(gate_rank, values) if gate_inputs and gate_rank else None
        if self.row.decay != "none":
            self.A_log = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))
            self.dt_bias = nn.Parameter(torch.empty(width(self.row.decay, keys), dtype=torch.float32))
        if self.row.strength:
            self.theta = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))
        if self.row.direction == "head":
            self.register_buffer("random_direction", torch.empty(num_heads, head_dim, dtype=torch.float32))
        self.o_norm = (
            GatedRMSNorm(value_head_dim, output_gate, norm_eps) if output_gate else RMSNorm(value_head_dim, norm_eps)
        )
        self.o_proj = ResidualProjection(values, hidden_size, bias=False)

    def strength(self) -> Tensor:
        """λ_h [H], scaled by `strength_scale` (the paper's s)."""
        return self.strength_scale * self.lambda_max * torch.sigmoid(_wide(self.theta))

    def forward(
        self,
        x: Tensor,
        state: MixerState | None = None,
        sequences: Sequences = DENSE,
        *,
        residual: Tensor | None = None,
        inplace: bool = False,
        impl: str = "auto",
    ) -> tuple[Tensor, MixerState]:
        """x [B, T, hidden] and where it left off → outputs like x, and where it leaves off. `residual`: as in
        `ResidualProjection`. `inplace` is for one token: the recurrent state is written over."""
        inputs = self._inputs(x)
        qkv = inputs["qkv"]
        if self.context is not None:
            state = self._state_from_context(qkv, state, sequences)
        gates, output_gate = self._gates(inputs)
        operands, conv = self._operands(qkv, None if state is None else state.conv, sequences, gates)
        if self.context is not None and state is not None:
            state = state._replace(recurrent=self.context.start(segment(*operands[1:], impl=impl)))
        if state is not None and x.shape[1] == 1 and sequences.cu_seqlens is None and sequences.lengths is None:
            o, recurrent = self.row.run_step(
                operands, state=state.recurrent, scale=self.read_scale, inplace=inplace, impl=impl
            )
        else:
            o, recurrent = self.row.run(
                operands,
                scale=self.read_scale,
                initial_state=None if state is None else state.recurrent,
                cu_seqlens=sequences.cu_seqlens,
                there=sequences.there(x.shape[1]),
                impl=impl,
            )
        normal = self.o_norm(o) if output_gate is None else self.o_norm(o, output_gate)
        return onto(residual, self.o_proj, normal.flatten(-2)), MixerState(conv, recurrent)

    def projections(self, x: Tensor) -> Projections:
        """What the rule takes for tokens x [B, T, hidden] from a sequence's beginning: to look at."""
        inputs = self._inputs(x)
        return self._projections(self.conv(inputs["qkv"])[0], self._gates(inputs)[0])

    def _inputs(self, x: Tensor) -> dict[str, Tensor]:
        """x's projections by name. Split once: then one concatenation is the gradient's way back."""
        return dict(zip(self.rows, self.in_proj(x).split(list(self.rows.values()), -1), strict=True))

    def _state_from_context(self, qkv: Tensor, state: MixerState | None, sequences: Sequences) -> MixerState:
        """The convolution's first inputs, from the process before; the recurrent state follows after the rule."""
        before = self.conv.weight.shape[1] - 1
        if state is not None or sequences != DENSE:
            raise ValueError("a sequence over several processes starts from nothing, without padding or packing")
        if qkv.shape[1] < before:
            raise ValueError(f"expected at least {before} tokens in each process, got {qkv.shape[1]}")
        assert self.context is not None
        conv = self.context.before(qkv[:, qkv.shape[1] - before :])
        return MixerState(conv, conv.new_empty(0))

    def _gates(self, inputs: dict[str, Tensor]) -> tuple[Gates, Tensor | None]:
        """What else the rule takes, before any function of it, and the output's gate."""
        b, w, f, gate, e = (inputs[name] if self.rows[name] else None for name in "bwfge")
        if f is not None:
            f = f if self.f_proj is None else self.f_proj(f)
        if gate is not None:
            gate = self._heads(gate if self.g_proj is None else self.g_proj(gate))
        return Gates(b, w, f, e, self.strength() if self.row.strength else None), gate

    def _heads(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (self.num_heads, -1))

    def _operands(
        self, qkv: Tensor, state: Tensor | None, sequences: Sequences, gates: Gates
    ) -> tuple[Operands, Tensor]:
        """What the op takes, and where the convolution leaves off."""
        if prologue.fits(self) and pays(qkv):
            after = last_inputs(qkv, self.conv.weight.shape[1] - 1, state, sequences)
            return prologue.operands(qkv, self, state, sequences, gates), after
        if prologue_operator.trains(self, qkv, state, sequences):
            after = last_inputs(qkv, self.conv.weight.shape[1] - 1, None, sequences)
            return prologue_operator.differentiable_operands(qkv, self, gates), after
        qkv, state = self.conv(qkv, state, sequences)
        return self._from_convolved(qkv, gates), state

    @fused
    def _from_convolved(self, qkv: Tensor, gates: Gates) -> Operands:
        return self.row.operands(self._projections(qkv, gates))

    def _projections(self, qkv: Tensor, gates: Gates) -> Projections:
        heads, (b, w, f, e, strength) = self._heads, gates
        keys = self.num_heads * self.head_dim
        q, k, v = (heads(y) for y in qkv.split([keys, keys, self.rows["qkv"] - 2 * keys], -1))
        direction = None if e is None else l2_normalize(heads(e))
        if self.row.direction == "head":
            direction = self.random_direction.to(qkv.dtype)
        return Projections(
            l2_normalize(q),
            l2_normalize(k),
            v,
            g=None if f is None else self._log_decay(heads(_wide(f) + _wide(self.dt_bias))),
            b=None if b is None else heads(torch.sigmoid(b)),
            w=None if w is None else heads(torch.sigmoid(w)),
            strength=strength,
            direction=direction,
        )

    def _log_decay(self, x: Tensor) -> Tensor:
        return -_wide(self.A_log).exp()[:, None] * nn.functional.softplus(x)

    def extra_repr(self) -> str:
        return f"rule={self.rule!r}, heads={self.num_heads} × ({self.head_dim}, {self.value_head_dim})"


def _wide(x: Tensor) -> Tensor:
    """In at least float32: decays and strengths are too fine for 16 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
