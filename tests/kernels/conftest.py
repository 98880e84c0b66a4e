"""Triton's interpreter computes as a GPU does. It rounds to bfloat16 (by itself it cuts off) and multiplies matrices of
it (by itself it takes the bits for integers); of float32 it takes the upper 19 bits, unless three products are asked
for. Errors come out as they do on a GPU, to two digits."""

from typing import Any

import numpy as np
import pytest
import torch

from qed import routes


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder, cast = interpreter.InterpreterBuilder, interpreter.InterpreterBuilder.cast_impl

    def operand(x: Any, precision: Any) -> np.ndarray:
        kind = str(x.dtype.scalar)
        if kind == "bf16":
            return (x.data.astype(np.uint32) << 16).view(np.float32)
        if kind == "fp32" and str(precision).endswith(".TF32"):
            return (np.ascontiguousarray(x.data).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        return x.data.astype(np.float32)

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, _: Any) -> Any:
        product = np.matmul(operand(a, precision), operand(b, precision))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def rounded(self: Any, x: Any, kind: Any) -> Any:
        if str(x.dtype.scalar) != "fp32" or str(kind.scalar) != "bf16":
            return cast(self, x, kind)
        low = torch.from_numpy(np.ascontiguousarray(x.data)).bfloat16()
        return interpreter.TensorHandle(low.view(torch.uint16).numpy(), kind.scalar)

    monkeypatch.setattr(routes, "INTERPRETED", (*routes.INTERPRETED, torch.bfloat16))
    monkeypatch.setattr(builder, "create_dot", dot)
    monkeypatch.setattr(builder, "cast_impl", rounded)
