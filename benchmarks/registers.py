"""Compile every kernel for a GPU that need not be here, and say what it takes of a multiprocessor.

    python benchmarks/registers.py [--arch 90] [--dtype bfloat16] [--width 128] [--shipped]

Registers per thread, shared memory, stores of spilled registers, matrix instructions and seconds to compile, at the
checked-in settings. Reading these costs no GPU time. Fails if a kernel takes more shared memory than there is. With
--shipped only what QED's own models run: no other rules, and no packed sequences.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qed.kernels.convolution import launch as convolution
from qed.kernels.decode import launch as decode
from qed.kernels.launching import Prepared
from qed.kernels.prologue import launch as prologue
from qed.kernels.recurrence import launch
from qed.kernels.recurrence.settings import ARCHITECTURES
from qed.kernels.rows import launch as rows
from qed.layers import Mixer, RMSNorm
from qed.layers.sequences import DENSE, Sequences
from qed.ops.arguments import Arguments
from qed.rules import RULES

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
}


class Launch(NamedTuple):
    """What a kernel is launched with."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name, with what it is compiled for where that is not its usual work."""
        of = self.constants
        return self.kernel.fn.__name__ + ", cut" * bool(of.get("LEVELS")) + ", maps" * bool(of.get("MAPS"))

    def compiled(self, arch: int) -> Any:
        """Compile the kernel for a compute capability, with addresses that are multiples of 16, as torch's are."""
        signature, constants, attributes = {}, {}, {}
        for i, (name, x) in enumerate(zip(self.kernel.arg_names, self.arguments, strict=False)):
            if isinstance(x, torch.Tensor):
                signature[name], attributes[(i,)] = TYPES[x.dtype], [["tt.divisibility", 16]]
            elif isinstance(x, float):
                signature[name] = "fp32"
            elif x is None or x == 1:
                signature[name], constants[(i,)] = "constexpr", x
            else:
                signature[name] = "i32"
                if x % 16 == 0 and name not in (self.kernel.do_not_specialize or ()):
                    attributes[(i,)] = [["tt.divisibility", 16]]
        options = dict(self.constants)
        for i, name in enumerate(self.kernel.arg_names[len(self.arguments) :], len(self.arguments)):
            signature[name], constants[(i,)] = "constexpr", options.pop(name)
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def record(dtype: torch.dtype, width: int, arch: int, shipped: bool) -> list[Launch]:
    """Return the different launches of all kernels at heads of `width`: for many short sequences, for one long, for
    packed ones, for one token, and for the pieces of a layer."""
    found: dict[str, Launch] = {}

    def keep(self: Prepared, grid: object, *arguments: Any) -> None:
        given = [x.dtype if isinstance(x, torch.Tensor) else type(x) for x in arguments]
        found.setdefault(str((self.kernel, given, self.constants)), Launch(self.kernel, arguments, self.constants))

    with ExitStack() as patched:
        for target, name, stand_in in (
            (Prepared, "__call__", keep),
            (launch, "compile_together", lambda *_: None),
            (launch, "architecture", lambda _: arch),
            (decode, "early", lambda _: {"EARLY": True, "launch_pdl": True} if arch >= 90 else {"EARLY": False}),
        ):
            patched.enter_context(patch.object(target, name, stand_in))
        record_recurrence(dtype, width, shipped)
        record_layers(dtype, width, ["qed"] if shipped else [name for name, x in RULES.items() if x.function is None])
    return list(found.values())


def record_recurrence(dtype: torch.dtype, width: int, shipped: bool) -> None:
    packed = [] if shipped else [(1, 128, torch.tensor([0, 128]))]
    for batch, tokens, offsets in ((32, 64, None), (1, 1024, None), *packed):
        q, k, a, u, do = (torch.empty(batch, tokens, 6, width, dtype=dtype) for _ in range(5))
        g, state = torch.empty(batch, tokens, 6, width), torch.empty(batch, 6, width, width)
        arguments = Arguments(q, k, a, u, g, state, offsets, 0.5)
        launch.forward(arguments, False)
        _, _, saved = launch.forward(arguments, True)
        launch.backward(do, state, arguments, saved)
    launch.step(q[:, 0], k[:, 0], a[:, 0], u[:, 0], g[:, 0], state, 0.5, state)


def record_layers(dtype: torch.dtype, width: int, rules: list[str]) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "num_heads": 2, "head_dim": width, "value_head_dim": width}
    for rule in rules:
        mixer = Mixer(**sizes, rule=rule).to(dtype)
        inputs = mixer._inputs(torch.empty(1, 64, 64, dtype=dtype), "auto")
        qkv, gates = inputs["qkv"], mixer._gates(inputs, "auto")
        state = qkv[:, :3].contiguous()
        for before, sequences in ((None, DENSE), (state, DENSE), (state, Sequences(cu_seqlens=torch.tensor([0, 64])))):
            prologue.operands(qkv, mixer, before, sequences, gates)
        like = prologue.operands(qkv, mixer, None, DENSE, gates)
        given = prologue.arguments(qkv, mixer, gates)
        prologue.backward(like.q, like.k, like.a, like.u, like.g, *given)
        x, recurrent = torch.empty(2, 64, dtype=dtype), torch.empty(2, 2, width, width)
        decode.mix(mixer.in_proj(x), mixer, state, recurrent)
        decode.mix_alone(mixer.in_proj(x[:1]).float(), mixer, recurrent[:1])
    place = torch.empty(64, dtype=torch.int32)
    convolution.forward(qkv[0], mixer.conv.weight, state, place, place)
    convolution.backward(qkv[0], qkv[0], mixer.conv.weight, state, place, place)
    x, weight = torch.empty(64, width, dtype=dtype), torch.empty(width, dtype=dtype)
    for gate, activation in ((None, None), (x, "silu"), (x, "sigmoid")):
        rows.rms_norm(x, weight, 1e-5, gate, activation)
    rows.silu_product(x)
    rows.silu_product_gradient(x[:, : width // 2], x)
    x, norm = x.view(-1, 8 * width), RMSNorm(8 * width).to(dtype)
    matrix = torch.nn.Linear(8 * width, 8 * width, bias=False, dtype=dtype)
    heads = decode.Parts(x[:1], torch.empty(1, 8, 4), width, 1e-5)
    decode.times_vector(x[:1], matrix.weight, norm, convolved=(mixer.conv.weight[: 4 * width], state))
    decode.times_vector(heads, matrix.weight, residual=x[:1])
    decode.times_vector(x[:1], matrix.weight, norm, swiglu=True)
    decode.times_vector(x[:1], matrix.weight, residual=x[:1])
    decode.write_likeliest(torch.empty(2, 32000, dtype=dtype), torch.empty(2, 1, dtype=torch.long))


def usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
        code = subprocess.run([tool, "--dump-sass", file.name], capture_output=True, text=True).stdout
    found = {name: int(x) for name, x in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return found | {"HGMMA": code.count("HGMMA"), "HMMA": code.count("HMMA"), "spills": code.count("STL")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90, choices=ARCHITECTURES)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--shipped", action="store_true")
    options = parser.parse_args()
    table = Table("kernel", "tile", "warps", "registers", "shared KiB", "spill stores", "HGMMA", "HMMA", "seconds")
    table.title = f"sm_{options.arch}, Triton {triton.__version__}, {options.dtype}, K = V = {options.width}"
    too_much = []
    for launched in record(getattr(torch, options.dtype), options.width, options.arch, options.shipped):
        start, of = time.perf_counter(), launched.constants
        compiled = launched.compiled(options.arch)
        seconds, shared = time.perf_counter() - start, compiled.metadata.shared / 1024
        if shared > ARCHITECTURES[options.arch].shared:
            too_much.append(launched.name)
        used, tile = usage(compiled.asm["cubin"]), f"{of.get('BK', 0)}×{of.get('BV', 0)}"
        row = (launched.name, tile, of.get("num_warps", 4), used["REG"], f"{shared:.0f}")
        table.add_row(*map(str, (*row, used["spills"], used["HGMMA"], used["HMMA"])), f"{seconds:.1f}")
    Console(width=120).print(table)
    if too_much:
        raise SystemExit(f"more shared memory than sm_{options.arch} has: {', '.join(too_much)}")


if __name__ == "__main__":
    main()
