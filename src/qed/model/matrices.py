"""The matrices of a model as other packages leave them: converted by a quantiser, or wrapped by an adapter of PEFT.

Both find matrices by their names and classes, and say little when they find none. What they did is checked here.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor, nn

MATRICES = (
    "in_proj",
    "f_proj",
    "g_proj",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_up_proj",
    "down_proj",
    "lm_head",
)
ADAPTED_PREFIX = "base_model.model."  # of this model's parameters inside a model of PEFT


def matrices(model: nn.Module) -> dict[str, nn.Module]:
    """Return the matrices of a model by their names, without the adapters around them."""
    named = ((name, module) for name, module in model.named_modules() if name.rpartition(".")[2] in MATRICES)
    return {name: getattr(module, "base_layer", module) for name, module in named}


def converted(model: nn.Module) -> dict[str, str]:
    """Return the matrices that are no longer floating-point numbers in an `nn.Linear`, with the class that they or
    their weights have now, such as Linear4bit or Int8Tensor."""
    kinds = {}
    for name, matrix in matrices(model).items():
        if type(matrix) is not nn.Linear:
            kinds[name] = type(matrix).__name__
        elif type(matrix.weight) not in (nn.Parameter, Tensor):
            kinds[name] = type(matrix.weight).__name__
    return kinds


def listed(model: nn.Module) -> str:
    """Say which matrices a model has, and how many of each."""
    counts = Counter(name.rpartition(".")[2] for name in matrices(model))
    return ", ".join(f"{counts[name]} {name}" for name in MATRICES if counts[name])


def check_quantised(model: Any) -> None:
    """Raise ValueError if a model was loaded with a quantisation that has converted none of its matrices, or one that
    takes the embedding for a quantised matrix."""
    if not getattr(model, "is_quantized", False):
        return
    kinds, head = converted(model), getattr(model, "lm_head", None)
    if head is not None and "lm_head" in kinds and head.weight is model.get_input_embeddings().weight:
        raise ValueError(
            "quantization_config: lm_head is the embedding (tie_word_embeddings), which is not quantised; "
            f"expected it among the modules that are left out, got a {kinds['lm_head']} in its place"
        )
    if kinds:
        return
    settings = model.config.quantization_config
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    excluded = settings.get("modules_to_not_convert") or settings.get("llm_int8_skip_modules")
    raise ValueError(
        f"quantization_config: expected {settings.get('quant_method')} to convert some matrices of {listed(model)}; "
        f"it has converted none, as it was told to leave out {excluded}"
    )


def keep_order(model: nn.Module) -> None:
    """Let bitsandbytes compute with 4-bit weights in the order in which they were quantised, where it cannot reorder
    them. For CPUs with AVX512-BF16 it reorders weights when they are first used, and back when they are saved. It fails
    if rows are no multiple of 32, as with gates of one number per head, or columns no multiple of the weights that
    share a scale, as in a narrow `f_proj`; and it leaves scales in wrong places if they are not quantised too."""
    found: list[Any] = list(matrices(model).values())
    for matrix in found:
        state = getattr(matrix.weight, "quant_state", None)
        if state is None:
            continue
        if matrix.out_features % 32 or matrix.in_features % state.blocksize or not state.nested:
            matrix.support_avx512bf16_for_cpu = False


def check_adapter_keys(module: nn.Module, keys: Any) -> None:
    """Raise ValueError if an adapter has weights for modules that a model does not have. PEFT would leave them out
    without a word. This is a hook of `load_state_dict`, through which PEFT loads adapters.

    Args:
        module: the model.
        keys: torch's lists of missing and unexpected keys.
    """
    foreign = [key.removeprefix(ADAPTED_PREFIX) for key in keys.unexpected_keys if key.startswith(ADAPTED_PREFIX)]
    if foreign:
        raise ValueError(
            f"adapter: expected weights for modules of this model, got {len(foreign)} tensors for others, "
            f"such as {foreign[0]}; the model has {listed(module)}"
        )
