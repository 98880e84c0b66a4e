"""Triton's interpreter multiplies matrices as a GPU does: bfloat16 as such (by itself it takes its bits for
integers), and of float32, unless three products are asked for, the upper 19 bits."""

from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")

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

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
