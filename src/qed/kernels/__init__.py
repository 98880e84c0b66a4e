"""Every Triton kernel of the package, with the code that launches it.

    recurrence/   the op: forward, backward and one token
    prologue/     from `in_proj` to the op's operands: convolution, gates and erase vector in one pass, with a gradient
    convolution/  the short convolution by itself
    rows/         norms and SwiGLU's product
    decode/       a whole block for one token

Each room has `kernels.py` (recurrence: several files) with the Triton code and `launch.py` with its host code, which
imports Triton when a kernel is first launched. What a kernel has to compute is said by plain torch in `ops/` and
`layers/`; when it is used is said by the tables `ops/routes.py` and `layers/routes.py`, through which alone the rest of
the package comes here.
"""
