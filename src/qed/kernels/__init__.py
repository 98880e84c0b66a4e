"""Every Triton kernel of the package, with the code that launches it.

    recurrence/   the op: forward, backward and one token
    prologue/     from `in_proj` to the op's operands: convolution, gates and erase vector in one pass, with a gradient
    convolution/  the short convolution by itself
    rows/         norms and SwiGLU's product
    decode/       a whole block for one token

Each folder has `kernels.py` (recurrence: several files) with the Triton code and `launch.py` with its host code, which
imports Triton when a kernel is first launched. Plain torch in `ops/` and `layers/` defines what a kernel has to
compute. The tables `ops/routes.py` and `layers/routes.py` say when it is used; the rest of the package reaches kernels
through these tables alone.
"""
