"""The public surface: signatures that stay, forms that never fall back, explanations that say why."""

import inspect
import logging
import subprocess
import sys

import pytest
import torch

from qed.ops import api, erase_write, erase_write_step, explain
from qed.rules import qed_attention
from qed.testing import Case

SIGNATURES = {
    erase_write: "(q, k, a, u, g=None, *, scale=1.0, initial_state=None, cu_seqlens=None, impl='auto')",
    explain: "(q, k, a, u, g=None, *, scale=1.0, initial_state=None, cu_seqlens=None, impl='auto')",
    erase_write_step: "(q, k, a, u, g=None, *, state, scale=1.0, inplace=False, impl='auto')",
    qed_attention: "(q, k, v, g, b, w, strength, *, normalize_qk=True, gate=True, project=True, direction=None, "
    "scale=1.0, initial_state=None, cu_seqlens=None, impl='auto')",
}


@pytest.mark.parametrize("function", SIGNATURES)
def test_signatures_are_the_published_ones(function: object) -> None:
    parameters = inspect.signature(function).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert str(inspect.Signature(bare)) == SIGNATURES[function]


def test_explain_names_the_form_and_why_not_the_others() -> None:
    inputs = Case().inputs()
    choice = explain(**inputs)
    assert choice.route == "chunkwise"
    assert "needs CUDA tensors, and these are on cpu" in choice.passed_over["triton"]
    assert set(choice.passed_over) == {"triton", "reference"}
    assert str(choice).startswith("chunkwise: ")
    asked = explain(**inputs, impl="reference")
    assert asked.route == "reference"
    assert asked.passed_over["chunkwise"] == "impl='reference' was asked for"


def test_explain_computes_nothing_and_checks_its_arguments() -> None:
    inputs = Case().inputs()
    with pytest.raises(ValueError, match="impl: expected one of"):
        explain(**inputs, impl="fast")
    with pytest.raises(ValueError, match="k: expected q's shape"):
        explain(**(inputs | {"k": inputs["k"][:, 1:]}))


def test_triton_on_cpu_raises_and_does_not_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qed.routes.TRITON_INTERPRETS", False)
    inputs = Case(tokens=1).inputs()
    with pytest.raises(RuntimeError, match="cannot run here: recurrence: it needs CUDA tensors, and these are on cpu"):
        erase_write(**inputs, impl="triton")
    state = inputs.pop("initial_state")
    token = {name: None if x is None else x[:, 0] for name, x in inputs.items()}
    with pytest.raises(RuntimeError, match="impl='triton' cannot run here"):
        erase_write_step(**token, state=state, impl="triton")


def test_auto_says_once_what_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    api._announced.clear()
    with caplog.at_level(logging.INFO, "qed"):
        for _ in range(3):
            erase_write(**Case().inputs())
    assert [r.getMessage().splitlines()[0] for r in caplog.records if r.name == "qed"] == [
        "impl='auto' on cpu runs chunkwise: matrix products over chunks of tokens; any device, dtype and shape"
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("impl", ["reference", "chunkwise"])
def test_dtypes_in_and_out(impl: str, dtype: torch.dtype) -> None:
    o, state = erase_write(**Case().inputs(dtype), impl=impl)
    assert o.dtype == dtype
    assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_the_package_works_without_triton_and_imports_no_heavy_package() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, qed; x = torch.randn(1, 4, 1, 8)\n"
        "qed.erase_write(x, x, x, x)\n"
        "print([m for m in ('transformers', 'matplotlib', 'typer', 'fla') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
