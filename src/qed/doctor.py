"""Is this installation sound? Versions, which form runs where, and every form that can run checked against the loop.

A compiler can be wrong without saying so: the kernels are run forward and backward at the shape that matters, here,
and compared with the float64 loop, before anything is trained with them. Decay is weak, as in a new model, and strong,
as in a trained one, which takes other ways through the kernels. A model's inference, which has kernels of its own, is
compared with the same model as it runs in training.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from .model.causal_lm import QEDForCausalLM
from .model.config import QEDConfig
from .ops import explain
from .ops.forms import IMPLS
from .testing import Case, environment, over_budget, relative_error

DECAYS = {"weak decay": -0.1, "strong decay": -5.0}  # of a token, at most
INFERENCE_BAR = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-4}  # relative, of two ways of rounding


def examine(console: Console, *, device: str, dtype: torch.dtype, heads: int, width: int, tokens: int) -> bool:
    """Print what was found; True if every form that runs here is within its error budget."""
    found = Table("", "", show_header=False)
    for name, value in environment(device).items():
        found.add_row(name, value)
    console.print(found)
    case = Case(batch=2, tokens=tokens, heads=heads, key_width=width, value_width=width)
    cases = {name: replace(case, log_decay=x).inputs(device=device) for name, x in DECAYS.items()}
    inputs = next(iter(cases.values()))
    low = {name: x.to(torch.float32 if name in ("g", "initial_state") else dtype) for name, x in inputs.items()}
    console.print(f"impl='auto' runs {explain(**low)}", markup=False)
    table = Table("form, forward and backward against the float64 loop", *cases)
    sound = True
    for impl in IMPLS[1:]:
        try:
            explain(**low, impl=impl)
        except RuntimeError as cannot:  # no fault: it says so instead of running
            table.add_row(impl, str(cannot))
            continue
        verdicts = []
        for inputs in cases.values():
            try:
                over = over_budget(inputs, impl=impl, dtype=dtype, products=dtype if impl == "triton" else None)
            except RuntimeError as failure:
                sound, verdict = False, str(failure)
            else:
                sound &= not over
                beyond = ", ".join(f"{name} off by {e:.1e}, allowed {budget:.1e}" for name, (e, budget) in over.items())
                verdict = f"wrong: {beyond}" if over else "within budget"
            verdicts.append(verdict)
        table.add_row(impl, *verdicts)
    console.print(table)
    error = inference_error(device, dtype, heads, width, tokens)
    sound &= error <= INFERENCE_BAR[dtype]
    console.print(f"a model's inference is off its training by {error:.1e}, allowed {INFERENCE_BAR[dtype]:.0e}")
    return sound


def inference_error(device: str, dtype: torch.dtype, heads: int, width: int, tokens: int) -> float:
    """Relative, of two layers' logits without a gradient against those with one."""
    torch.manual_seed(0)
    hidden = heads * width
    size = {"hidden_size": hidden, "num_heads": heads, "head_dim": width, "intermediate_size": 2 * hidden}
    # Weights so large that logits are the layers', not the embedding's.
    config = QEDConfig(**size, num_hidden_layers=2, vocab_size=256, initializer_range=hidden**-0.5)
    model = QEDForCausalLM(config).to(device, dtype).eval()
    ids = torch.randint(0, 256, (2, tokens), device=device)
    truth = model(ids).logits.detach()
    with torch.no_grad():
        return relative_error(model(ids).logits, truth)
