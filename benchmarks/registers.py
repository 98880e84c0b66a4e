"""Compile every kernel for a GPU that need not be here, and say what it takes of a multiprocessor.

    python benchmarks/registers.py [--arch 90] [--dtype bfloat16] [--width 128]

Registers per thread, shared memory, stores of spilled registers, matrix instructions and seconds to compile, at the
checked-in settings. Reading these costs no GPU time. Fails if a kernel takes more shared memory than there is.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qed.kernels.convolution import kernels as convolution_kernels
from qed.kernels.convolution import launch as convolution
from qed.kernels.decode import kernels as decode_kernels
from qed.kernels.decode import launch as decode
from qed.kernels.launching import FUSED
from qed.kernels.prologue import kernels as prologue_kernels
from qed.kernels.prologue import launch as prologue
from qed.kernels.recurrence import launch
from qed.kernels.recurrence.settings import SHARED
from qed.kernels.rows import kernels as row_kernels
from qed.kernels.rows import launch as rows
from qed.layers import Mixer, RMSNorm
from qed.layers.sequences import DENSE, Sequences
from qed.ops.arguments import Arguments
from qed.rules import RULES

KERNELS: dict[str, Any] = {  # and where they are launched from
    **dict.fromkeys(("chunk_terms", "chunk_states", "segment_starts", "state_gradients", "pair_gradients"), launch),
    **dict.fromkeys(("chunk_gradients", "decode_step"), launch),
    **dict.fromkeys(("forward_kernel", "backward_kernel", "window_gradients_kernel"), convolution_kernels),
    **dict.fromkeys(("operands_kernel", "gradients_kernel"), prologue_kernels),
    **dict.fromkeys(("norm_kernel", "product_kernel"), row_kernels),
    **dict.fromkeys(("vector_kernel", "mixer_kernel"), decode_kernels),
}
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
}


class Recorder:
    """Stands in for a kernel in the launcher and keeps the arguments of every launch."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.__name__ = kernel.fn.__name__
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: object) -> Any:
        def record(*args: Any, **options: Any) -> None:
            if not any(all(known[name] == x for name, x in options.items()) for known in self.launches):
                self.launches.append(dict(zip(self.kernel.arg_names, args, strict=False)) | options)

        return record

    def compile(self, launched: dict[str, Any], arch: int) -> Any:
        given = dict(launched)
        launch_options = {name: given.pop(name) for name in ("num_warps", "num_stages", *FUSED) if name in given}
        signature, constants, attributes = {}, {}, {}
        for i, name in enumerate(self.kernel.arg_names):
            x = given[name]
            if isinstance(x, torch.Tensor):
                signature[name], attributes[(i,)] = TYPES[x.dtype], [["tt.divisibility", 16]]
            elif isinstance(x, float) and name.islower():
                signature[name] = "fp32"
            elif type(x) is int and name.islower():
                signature[name] = "i32"
                if x % 16 == 0:
                    attributes[(i,)] = [["tt.divisibility", 16]]
            else:
                signature[name], constants[(i,)] = "constexpr", x
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch_options)


def record(dtype: torch.dtype, width: int) -> dict[str, Recorder]:
    """The different launches of every kernel at heads of `width`: for many short sequences, and for one long."""
    found = {name: Recorder(getattr(module, name)) for name, module in KERNELS.items()}
    for name, recorder in found.items():
        setattr(KERNELS[name], name, recorder)
    for batch, tokens in ((32, 64), (1, 1024)):
        q, k, a, u, do = (torch.empty(batch, tokens, 6, width, dtype=dtype) for _ in range(5))
        g, state = torch.empty(batch, tokens, 6, width), torch.empty(batch, 6, width, width)
        arguments = Arguments(q, k, a, u, g, state, None, 0.5)
        _, _, saved = launch.forward(arguments, True)
        launch.backward(do, state, arguments, saved)
    launch.step(q[:, 0], k[:, 0], a[:, 0], u[:, 0], g[:, 0], state, 0.5, state)
    record_layers(dtype, width)
    for name, recorder in found.items():
        setattr(KERNELS[name], name, recorder.kernel)
    return found


def record_layers(dtype: torch.dtype, width: int) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "num_heads": 2, "head_dim": width, "value_head_dim": width}
    for rule in (name for name, row in RULES.items() if row.function is None):
        mixer = Mixer(**sizes, rule=rule).to(dtype)
        inputs = mixer._inputs(torch.empty(1, 64, 64, dtype=dtype), "auto")
        qkv, gates = inputs["qkv"], mixer._gates(inputs, "auto")[0]
        state = qkv[:, :3].contiguous()
        for before, sequences in ((None, DENSE), (state, DENSE), (state, Sequences(cu_seqlens=torch.tensor([0, 64])))):
            prologue.operands(qkv, mixer, before, sequences, gates)
        like = prologue.operands(qkv, mixer, None, DENSE, gates)
        given = prologue.arguments(qkv, mixer, gates)
        prologue.backward(like.q, like.k, like.a, like.u, like.g, *given)
        for batch in (1, 2):
            x, recurrent = torch.empty(batch, 64, dtype=dtype), torch.empty(batch, 2, width, width)
            decode.mix(mixer.in_proj(x), mixer, state, recurrent)
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
    decode.normed_projection(matrix, x[:1], norm)
    decode.times_vector(x[:1], matrix.weight, norm, None, swiglu=True)
    decode.times_vector(x[:1], matrix.weight, None, x[:1], swiglu=False)


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
    parser.add_argument("--arch", type=int, default=90, choices=SHARED)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    table = Table("kernel", "tile", "warps", "registers", "shared KiB", "spill stores", "HGMMA", "HMMA", "seconds")
    table.title = f"sm_{options.arch}, Triton {triton.__version__}, {options.dtype}, K = V = {options.width}"
    too_much = []
    setattr(launch, "architecture", lambda _: options.arch)  # noqa: B010
    recorders = record(getattr(torch, options.dtype), options.width)
    for recorder, launched in ((x, y) for x in recorders.values() for y in x.launches):
        name = recorder.kernel.fn.__name__ + (
            (", cut" if launched.get("LEVELS") else "") + (", maps" if launched.get("MAPS") else "")
        )
        start = time.perf_counter()
        compiled = recorder.compile(launched, options.arch)
        seconds = time.perf_counter() - start
        u, tile = usage(compiled.asm["cubin"]), f"{launched.get('BK', 0)}×{launched.get('BV', 0)}"
        shared = f"{compiled.metadata.shared / 1024:.0f}"
        if compiled.metadata.shared > 1024 * SHARED[options.arch]:
            too_much.append(name)
        row = (name, tile, launched["num_warps"], u["REG"], shared, u["spills"], u["HGMMA"], u["HMMA"])
        table.add_row(*map(str, row), f"{seconds:.1f}")
    Console(width=120).print(table)
    if too_much:
        raise SystemExit(f"more shared memory than sm_{options.arch} has: {', '.join(too_much)}")


if __name__ == "__main__":
    main()
