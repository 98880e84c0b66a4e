"""What FP8 would gain in prefill: the products of a model with rows and columns scaled to 8 bits, beside bfloat16.

    python benchmarks/fp8.py [--batch 16 --tokens 4096] [--out benchmarks/results/fp8_h200.json]

Every matrix of every block becomes float8_e4m3fn with a scale for each of its rows, and so does every row that it is
multiplied with, as it comes. Measured side by side: the prefill as it is; the prefill with matrices in FP8, where rows
are quantised by a kernel of its own; and the kernels that could quantise inside (RMSNorm, SwiGLU's product), from which
follows what the prefill would take if they did. Before anything is timed, logits are held against the same weights in
float32. On a CPU the same is done with numbers rounded to 8 bits, which checks the script and says nothing of speed.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from rich.console import Console
from torch import Tensor, nn

from qed import QEDConfig
from qed.bench.measuring import Bench
from qed.bench.model import make, prefill
from qed.kernels.launching import power_of_two
from qed.kernels.rows.launch import rms_norm, silu_product
from qed.layers import functions
from qed.testing import relative_error

LARGEST = 448.0  # the largest number of float8_e4m3fn
LEAST = 1e-12  # of a scale, for rows of zeros


@triton.jit  # type: ignore[untyped-decorator]
def quantise_kernel(  # type: ignore[no-untyped-def]
    x, weight, rows, scales, n_rows, eps,
    WIDTH: tl.constexpr, KIND: tl.constexpr, LARGEST: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Round rows to 8 bits, relative to the largest number of each: of x (KIND 0), of RMSNorm(x) (1), or of
    silu(left half of x) ⊙ right half (2)."""
    row, column = tl.program_id(0) * BR + tl.arange(0, BR)[:, None], tl.arange(0, BW)[None, :]
    inside = (row < n_rows) & (column < WIDTH)
    at = row.to(tl.int64) * (2 * WIDTH if KIND == 2 else WIDTH) + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == 1:
        scale = tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / WIDTH + eps)
        value *= scale * tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if KIND == 2:
        value *= tl.sigmoid(value) * tl.load(x + at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(value), 1, keep_dims=True) / LARGEST, 1e-12)
    tl.store(rows + row.to(tl.int64) * WIDTH + column, (value / largest).to(rows.dtype.element_ty), mask=inside)
    tl.store(scales + row, largest, mask=row < n_rows)


def quantised(x: Tensor, kind: int = 0, weight: Tensor | None = None, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """Rows [M, width] in 8 bits and their scales [M, 1]; `kind` as in `quantise_kernel`."""
    x = x.flatten(0, -2)
    width = x.shape[1] // 2 if kind == 2 else x.shape[1]
    if x.device.type == "cpu":
        if kind == 1:
            assert weight is not None
            x = functions.rms_norm(x, weight, eps)
        value = (functions.silu_product(x) if kind == 2 else x).float()
        scales = (value.abs().amax(1, keepdim=True) / LARGEST).clamp(min=LEAST)
        return (value / scales).to(torch.float8_e4m3fn), scales
    rows = torch.empty(x.shape[0], width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(x.shape[0], 1, device=x.device)
    each = max(1, 4096 // power_of_two(width))
    grid, sizes = (-(-x.shape[0] // each),), {"BR": each, "BW": power_of_two(width)}
    quantise_kernel[grid](x, weight, rows, scales, x.shape[0], eps, WIDTH=width, KIND=kind, LARGEST=LARGEST, **sizes)
    return rows, scales


class Float8Linear(nn.Module):
    """A matrix in 8 bits, which quantises the rows that it is multiplied with."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.rows, scales = quantised(linear.weight.detach())
        self.scales, self.bias, self.dtype = scales.t().contiguous(), linear.bias, linear.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        """W x, whose rows are quantised first."""
        return self.product(*quantised(x)).unflatten(0, x.shape[:-1])

    def product(self, rows: Tensor, scales: Tensor) -> Tensor:
        """W x of rows that are quantised already."""
        if rows.device.type == "cpu":
            y = (rows.float() * scales) @ (self.rows.float() * self.scales.t()).t()
            return (y if self.bias is None else y + self.bias).to(self.dtype)
        options: dict[str, Any] = {"bias": self.bias, "out_dtype": self.dtype, "use_fast_accum": True}
        return torch._scaled_mm(rows, self.rows.t(), scale_a=scales, scale_b=self.scales, **options)


def in_float8(model: Any) -> Any:
    """Put matrices in 8 bits in place of the large ones of every block, those that multiply the residual stream or are
    added to it; return the model."""
    for block in model.model.layers:
        for part, name in ((block.mixer, "in_proj"), (block.mixer, "o_proj"), (block.mlp, "gate_up_proj")):
            setattr(part, name, Float8Linear(getattr(part, name)))
        block.mlp.down_proj = Float8Linear(block.mlp.down_proj)
    return model


def calls_of(block: Any, eight: Any, tokens: int, device: str) -> dict[str, Any]:
    """One block's products and the kernels before them, in bfloat16 and in 8 bits, by name."""
    calls: dict[str, Any] = {}
    for part, name in (("mixer", "in_proj"), ("mixer", "o_proj"), ("mlp", "gate_up_proj"), ("mlp", "down_proj")):
        linear, small = (getattr(getattr(x, part), name) for x in (block, eight))
        x = torch.randn(tokens, linear.weight.shape[1], dtype=linear.weight.dtype, device=device)
        calls[name] = partial(linear, x)
        calls[f"{name}, 8 bits"] = partial(small.product, *quantised(x))
        calls[f"rows of {name}, quantised alone"] = partial(quantised, x)
    norm, both = block.mlp_norm, torch.randn(tokens, block.mlp.gate_up_proj.weight.shape[0], device=device)
    x = torch.randn(tokens, norm.weight.shape[0], dtype=norm.weight.dtype, device=device)
    both = both.to(norm.weight.dtype)
    if device != "cpu":
        calls["RMSNorm"] = partial(rms_norm, x, norm.weight, norm.eps)
        calls["SwiGLU's product"] = partial(silu_product, both)
    calls["RMSNorm, quantised inside"] = partial(quantised, x, 1, norm.weight, norm.eps)
    calls["SwiGLU's product, quantised inside"] = partial(quantised, both, 2)
    return calls


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="A tiny model, to check the script.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    bench = Bench(console=Console(), device=device, out=options.out)
    config = QEDConfig.tiny() if options.tiny else QEDConfig()
    usual, eight = make(config, device, dtype), in_float8(make(config, device, dtype))
    ids = torch.randint(3, config.vocab_size, (2, 300), device=device)
    truth = make(config, device, dtype).float()(ids).logits
    errors = {n: relative_error(x(ids).logits, truth) for n, x in (("usual", usual), ("8 bits", eight))}
    report = bench.report(config=config.to_diff_dict(), batch=options.batch, tokens=options.tokens, errors=errors)
    bench.console.print(f"relative errors of logits: {errors}")
    ids = torch.randint(3, config.vocab_size, (options.batch, options.tokens), device=device)
    whole = bench.take_turns(
        {"usual": partial(prefill, usual, ids), "8 bits": partial(prefill, eight, ids)}, options.rounds
    )
    blocks = (usual.model.layers[0], eight.model.layers[0])
    parts = bench.take_turns(calls_of(*blocks, ids.numel(), device), options.rounds)
    ms = {name: x["median"] for name, x in (whole | parts).items()}
    alone = sum(ms[f"rows of {name}, quantised alone"] for name in ("in_proj", "gate_up_proj", "down_proj"))
    if device == "cuda":
        inside = 2 * (ms["RMSNorm, quantised inside"] - ms["RMSNorm"])
        inside += ms["SwiGLU's product, quantised inside"] - ms["SwiGLU's product"]
        ms["8 bits, quantised inside, predicted"] = ms["8 bits"] - config.num_hidden_layers * (alone - inside)
    report.add(ms=ms)
    for name, took in ms.items():
        bench.console.print(f"{took:9.3f} ms  {name}")
    bench.say_written()


if __name__ == "__main__":
    main()
