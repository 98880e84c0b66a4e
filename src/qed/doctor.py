"""Checks an installation: versions, which form of the op runs here, and every form that can run against the loop.

A compiler can be wrong without saying so. So before anything is trained, the kernels are run here, forward and
backward, at the shape that matters, and compared with the float64 loop. Decay is weak, as in a new model, and strong,
as in a trained one, which takes other branches of the kernels. Training, inference and decoding of a model have kernels
of their own, and float64 has none: a small model is compared with itself in float64.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .kernels.recurrence.settings import architecture, origin
from .model.cache import QEDCache
from .model.causal_lm import QEDForCausalLM
from .model.config import QEDConfig
from .model.decoding import LENGTHS, Decoder
from .ops import explain
from .ops.routes import RECURRENCE
from .provenance import environment
from .testing import Case, over_budget, relative_error

DECAYS = {"weak decay": -0.1, "strong decay": -5.0}  # the fastest log-decay of a token
MODEL_BAR = {
    torch.bfloat16: 6e-2,
    torch.float16: 8e-3,
    torch.float32: 1e-4,
}  # relative; twice what rounding makes
DECODED = 8  # tokens that are decoded one by one


def examine(console: Console, *, device: str, dtype: torch.dtype, heads: int, width: int, tokens: int) -> bool:
    """Check the installation and print what was found.

    Args:
        console: Where to print.
        device: Where to run the checks.
        dtype: The precision of the op's inputs and the model's weights.
        heads: Heads of the op, and of the model.
        width: Channels of a head, of keys and of values.
        tokens: Length of the sequences.

    Returns:
        True if every form that runs here, and the model, is within its error budget.
    """
    facts = Table("", "", show_header=False)
    for name, value in environment(device).items():
        facts.add_row(name, value)
    console.print(facts)
    if device.startswith("cuda"):
        console.print(f"launch settings of the kernels: {origin(architecture(torch.device(device)))}", soft_wrap=True)
    case = Case(batch=2, tokens=tokens, heads=heads, key_width=width, value_width=width)
    cases = {name: replace(case, log_decay=x).inputs(device=device) for name, x in DECAYS.items()}
    inputs = next(iter(cases.values()))
    low = {name: x.to(torch.float32 if name in ("g", "initial_state") else dtype) for name, x in inputs.items()}
    console.print(f"impl='auto' runs {explain(**low)}", markup=False)
    table = Table("form, forward and backward against the float64 loop", *cases)
    sound = True
    for impl in RECURRENCE.names:
        try:
            explain(**low, impl=impl)
        except RuntimeError as cannot:  # not a fault: the form says that it does not run here
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
    errors = model_errors(device, dtype, heads, width, max(tokens, 2 * DECODED))
    sound &= all(error <= MODEL_BAR[dtype] for error in errors.values())
    said = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    console.print(f"a model against itself in float64: {said}, allowed {MODEL_BAR[dtype]:.0e}", soft_wrap=True)
    return sound


def model_errors(device: str, dtype: torch.dtype, heads: int, width: int, tokens: int) -> dict[str, float]:
    """Compare a model of two layers with itself in float64.

    Args:
        device: Where to run it.
        dtype: The precision of its weights.
        heads: Heads of a layer.
        width: Channels of a head.
        tokens: Length of the sequences; the last DECODED of them are also decoded one by one.

    Returns:
        Relative errors of the logits in training, inference, after captured prompts and in decoding, and of all
        gradients together.
    """
    torch.manual_seed(0)
    hidden = heads * width
    size = {"hidden_size": hidden, "num_heads": heads, "head_dim": width, "intermediate_size": 2 * hidden}
    # Weights are so large that the layers decide the logits, not the embedding.
    config = QEDConfig(**size, num_hidden_layers=2, vocab_size=256, initializer_range=hidden**-0.5)
    model = QEDForCausalLM(config).to(device, dtype).eval()
    ids = torch.randint(0, 256, (2, tokens), device=device)

    def in_training(model: QEDForCausalLM) -> tuple[Tensor, Tensor]:
        output = model(ids, labels=ids)
        gradients = torch.autograd.grad(output.loss, list(model.parameters()))
        return output.logits.detach(), torch.cat([x.double().flatten() for x in gradients])

    (logits, gradient), (truth, true_gradient) = in_training(model), in_training(copy.deepcopy(model).double())
    with torch.no_grad():
        inferred = model(ids).logits
        decoder = Decoder(model, len(ids))
        prompt = ids[:, : LENGTHS[-1]]
        read = torch.stack([decoder.read(QEDCache(), prompt).clone() for _ in range(3)], 1)  # the second is captured
        decoder.start(model(ids[:, :-DECODED], use_cache=True).past_key_values)
        decoded = torch.stack([decoder.step(ids[:, i : i + 1]).clone() for i in range(tokens - DECODED, tokens)], 1)
    return {
        "training": relative_error(logits, truth),
        "gradients": relative_error(gradient, true_gradient),
        "inference": relative_error(inferred, truth),
        "prompts": relative_error(read, truth[:, [prompt.shape[1] - 1] * 3]),
        "decoding": relative_error(decoded, truth[:, -DECODED:]),
    }
