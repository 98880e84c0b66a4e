"""Why a kernel cannot take a rule, a matrix or a block: what the tables of `routes.py` ask about layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..kernels.prologue import launch as prologue
from ..rules import COLUMNS, Rule


def rule_obstacle(rule: Rule) -> str | None:
    """Why kernels that make the operands cannot make those of a rule: they know a list of columns and values, and the
    rule's row has another. A new column is refused until it is put on that list."""
    if type(rule) is not Rule:
        return f"the rule is a {type(rule).__name__}, which may compute anything"
    for name in COLUMNS:  # not its __dict__, which torch.compile of torch 2.11 cannot trace
        value, known = getattr(rule, name), prologue.KNOWN_COLUMNS.get(name)
        if value not in ((rule.default(name),) if known is None else known):
            shown = getattr(value, "__name__", repr(value))
            return f"the kernels do not know the rule's {name} = {shown}"
    if rule.write == "none" and rule.erase != "head":
        return "the kernels do not know a rule whose one gate is not one number per head"
    return None


def mixer_obstacle(mixer: Any) -> str | None:
    """Why kernels that make the operands cannot make those of a mixer."""
    if mixer.erase_max != 1:
        return f"the kernels know an erase gate in (0, 1), and this one is in (0, {mixer.erase_max:g})"
    return rule_obstacle(mixer.row)


def plain_linear_obstacle(linear: Any) -> str | None:
    """Why a matrix product must be left to its module: it is quantised, adapted, or somebody listens to its calls."""
    if type(linear) is not nn.Linear:
        name = type(linear).__name__
        return f"it takes an nn.Linear, and this matrix was quantised, adapted or replaced: it is a {name}"
    if type(linear.weight) not in (nn.Parameter, Tensor):
        name = type(linear.weight).__name__
        return f"it takes plain weights, and these are quantised or spread over processes: they are a {name}"
    if must_be_called(linear):
        return "the module has hooks or a forward of its own, which have to be called"
    return None


def trace_obstacle(block: Any) -> str | None:
    """Why a block may not be one compiled program: it has modules of packages that torch.compile cannot always trace,
    or that need another program for every setting, as adapters do when they are switched."""
    for part in block.modules():
        package = type(part).__module__.partition(".")[0]
        if package in ("bitsandbytes", "peft"):
            return (
                f"a matrix was quantised or adapted: it is a {type(part).__name__} of {package}, which is not compiled"
            )
    return None


def must_be_called(module: nn.Module) -> bool:
    """Whether somebody would notice that a module's weights are used without calling it: it has hooks, also for its
    gradient, there are hooks of all modules, or its `forward` was replaced."""
    own, of_all = module.__dict__, torch_module
    forward = own["_forward_hooks"] or own["_forward_pre_hooks"]
    forward = forward or of_all._global_forward_hooks or of_all._global_forward_pre_hooks
    backward = own["_backward_hooks"] or own["_backward_pre_hooks"]
    backward = backward or of_all._global_backward_hooks or of_all._global_backward_pre_hooks
    return bool("forward" in own or forward or backward)


def convolution_obstacle(convolution: Any) -> str | None:
    """Why a kernel cannot convolve by a module's weights itself."""
    from .convolution import ShortConvolution

    if type(convolution) is not ShortConvolution:
        return f"it takes a ShortConvolution, and this is a {type(convolution).__name__}"
    if must_be_called(convolution):
        return "the convolution has hooks or a forward of its own, which have to be called"
    return None


def block_parts_obstacle(block: Any) -> str | None:
    """The kernels take a block apart, so every part has to be the package's own, and run as its class says."""
    from .block import QEDBlock
    from .convolution import ShortConvolution
    from .mixer import Mixer
    from .mlp import SwiGLU
    from .norm import GatedRMSNorm, RMSNorm

    mixer, mlp = getattr(block, "mixer", None), getattr(block, "mlp", None)
    if type(block) is not QEDBlock or type(mixer) is not Mixer or type(mlp) is not SwiGLU:
        return "it takes a block of a Mixer and a SwiGLU"
    norms = (block.mixer_norm, block.mlp_norm)
    kinds = all(type(x) is RMSNorm for x in norms) and type(mixer.o_norm) in (RMSNorm, GatedRMSNorm)
    if not kinds or type(mixer.conv) is not ShortConvolution:
        return "a part of the block has been replaced"
    for part in (block, mixer, mlp, *norms, mixer.o_norm, mixer.conv):
        if must_be_called(part):
            return "a part of the block has hooks or a forward of its own, which have to be called"
    unbiased = (mixer.in_proj, mixer.f_proj, mixer.o_proj, mlp.gate_up_proj, mlp.down_proj)
    for matrix in (x for x in (*unbiased, mixer.g_proj) if x is not None):
        why_not = plain_linear_obstacle(matrix)
        if why_not is None and (matrix.bias is not None) != (matrix is mixer.g_proj):
            why_not = "a matrix of the block has a bias that the kernels do not know, or lacks one"
        if why_not is not None:
            return why_not
    return contiguity_obstacle(block)


def contiguity_obstacle(module: nn.Module) -> str | None:
    """Why kernels cannot read the weights of a module: they take whole rows, one behind the other."""
    if all(x.is_contiguous() for x in (*module.parameters(), *module.buffers())):
        return None
    return "a weight is not contiguous in memory, as a transposed view of another matrix is"
