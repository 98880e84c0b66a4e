"""Every rule of the table against the recurrence written out once more, in numpy and by matrices."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qed import RULES
from qed.rules import Projections, l2_normalize, qed_attention

from .drawing import Draw, refused, same

TOLERANCES = {torch.float64: 1e-8, torch.float32: 2e-4}
OPTIONAL = ("g", "b", "w", "strength", "direction")


def _projections(draw: Draw, rule: str, dtype: torch.dtype, batch: int, tokens: int) -> Projections:
    row, heads = RULES[rule], draw.randint(1, 3)
    keys, values = draw.choice((1, 2, 5, 8)), draw.choice((1, 3, 8))
    shape = (batch, tokens, heads)
    q, k = (l2_normalize(draw.normal(*shape, keys), eps=0.0).to(dtype) for _ in range(2))

    def gate(width: str, channels: int) -> Tensor | None:
        size = {"none": 0, "head": 1, "channel": channels}[width]
        return draw.uniform(*shape, size, dtype=dtype) if size else None

    decay = gate(row.decay, keys)
    directions = {
        "none": lambda: None,
        "head": lambda: l2_normalize(draw.normal(heads, keys), eps=0.0).to(dtype),
        "token": lambda: l2_normalize(draw.normal(*shape, keys), eps=0.0).to(dtype),
    }
    strength = None
    if row.strength:
        strength = draw.normal(heads, dtype=dtype) if draw.chance(0.5) else draw.choice((0.0, 0.25, -1.0))
    return Projections(
        q=q,
        k=k,
        v=draw.normal(*shape, values, dtype=dtype),
        g=None if decay is None else draw.choice((-3.0, -0.1, -50.0)) * decay,
        b=gate(row.erase, keys),
        w=gate(row.write, values),
        strength=strength,
        direction=directions[row.direction](),
    )


def _written_out(rule: str, x: Projections, b: int, t: int, h: int, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One token of one head, as the README's table has it: S → S, and Sᵀ q."""

    def at(tensor: Tensor) -> np.ndarray:
        return tensor[b, t, h].double().numpy()

    q, k, v = at(x.q), at(x.k), at(x.v)
    identity = np.eye(len(k))
    across_k = identity - np.outer(k, k)
    decay = identity if x.g is None else np.diag(np.exp(np.broadcast_to(at(x.g), k.shape)))
    strength = 0.0
    if x.strength is not None:
        strength = float(x.strength[h]) if isinstance(x.strength, Tensor) and x.strength.dim() else float(x.strength)
    if rule == "eda":
        e, erase, write = at(x.direction), at(x.b), at(x.w)
        state = (identity - np.outer(e, erase * e)) @ decay @ state
        state = (identity - np.outer(k, write * k)) @ state + np.outer(k, write * v)
        return state, state.T @ q
    if rule == "linear":
        erase_vector, written = np.zeros_like(k), v
    else:
        gate = np.broadcast_to(at(x.b), k.shape)
        written = (at(x.w) if x.w is not None else at(x.b)) * v
        correction = {
            "qed": lambda: across_k @ (gate * q),
            "qed-nogate": lambda: across_k @ q,
            "qed-nogate-noproj": lambda: q,
            "qed-rand": lambda: across_k @ (gate * x.direction[h].double().numpy()),
        }.get(rule, lambda: np.zeros_like(k))
        erase_vector = gate * k + strength * correction()
    state = (identity - np.outer(k, erase_vector)) @ decay @ state + np.outer(k, written)
    return state, state.T @ q


def _truth(rule: str, x: Projections, there: Tensor, states: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = x.q.shape
    final, outputs = states.double().numpy().copy(), np.zeros(x.v.shape)
    for b in range(batch):
        for t in range(tokens):
            for h in range(heads):
                if there[b, t]:
                    final[b, h], read = _written_out(rule, x, b, t, h, final[b, h])
                    outputs[b, t, h] = scale * read
    return torch.from_numpy(outputs), torch.from_numpy(final)


def written_out(seed: int) -> None:
    """A rule over tokens, some of which are not there, and then one by one: the recurrence written out."""
    draw = Draw("written_out", seed)
    rule, dtype = draw.choice(list(RULES)), draw.choice((torch.float64, torch.float32))
    batch, tokens = draw.randint(1, 2), draw.randint(1, 7)
    x, scale, impl = (
        _projections(draw, rule, dtype, batch, tokens),
        draw.choice((1.0, 0.3)),
        draw.choice(("auto", "reference")),
    )
    states = draw.normal(batch, x.q.shape[2], x.q.shape[3], x.v.shape[3], dtype=dtype)
    there = draw.uniform(batch, tokens) < draw.choice((0.5, 1.1))
    o, final = RULES[rule].attend(x, scale=scale, initial_state=states, there=there, impl=impl)
    expected, expected_final = _truth(rule, x, there, states, scale)
    same(o[there], expected[there], TOLERANCES[dtype], f"outputs of {rule}")
    same(final, expected_final, TOLERANCES[dtype], f"state of {rule}")
    everywhere, _ = _truth(rule, x, torch.ones_like(there), states, scale)
    for t in range(tokens):
        token = x._replace(**{n: _token(getattr(x, n), t) for n in ("q", "k", "v", "g", "b", "w")})
        token = token._replace(direction=_token(x.direction, t) if RULES[rule].direction == "token" else x.direction)
        one, states = RULES[rule].attend_step(token, state=states, scale=scale, impl=impl)
        same(one[:, 0], everywhere[:, t], TOLERANCES[dtype], f"decoded token {t} of {rule}")


def _token(x: Tensor | None, t: int) -> Any:
    return None if x is None else x[:, t : t + 1]


def _identities(draw: Draw, x: Projections) -> dict[str, Callable[[], tuple[tuple[str, Projections], ...]]]:
    """Pairs of a rule and projections that are the same recurrence; x are qed's."""
    ones, wide = torch.ones_like(x.b), torch.ones_like(x.k)
    head = x.b[..., :1]
    bare = x._replace(strength=None)
    channels = bare._replace(b=head.expand_as(x.b), w=head.expand_as(x.w))
    steady = x.g[..., :1]
    direction = l2_normalize(draw.normal(*x.k.shape[2:]), eps=0.0).to(x.k.dtype)
    across = x._replace(q=l2_normalize(x.q - x.k * (x.k * x.q).sum(-1, keepdim=True), eps=1e-12))
    return {
        "λ = 0 is GDN-2": lambda: (("qed", x._replace(strength=0.0)), ("gdn2", bare)),
        "λ = 0 without gate": lambda: (("qed-nogate", x._replace(strength=0.0)), ("gdn2", bare)),
        "λ = 0 without projection": lambda: (("qed-nogate-noproj", x._replace(strength=0.0)), ("gdn2", bare)),
        "λ = 0 of a random direction": lambda: (
            ("qed-rand", x._replace(strength=0.0, direction=direction)),
            ("gdn2", bare),
        ),
        "one gate of both is KDA": lambda: (("gdn2", channels), ("kda", bare._replace(b=head, w=None))),
        "one decay a head is GDN": lambda: (
            ("kda", bare._replace(b=head, w=None, g=steady.expand_as(x.g))),
            ("gdn", bare._replace(b=head, w=None, g=steady)),
        ),
        "no decay is DeltaNet": lambda: (
            ("gdn", bare._replace(b=head, w=None, g=torch.zeros_like(steady))),
            ("deltanet", bare._replace(b=head, w=None, g=None)),
        ),
        "no erasing is linear attention": lambda: (
            ("gdn2", bare._replace(b=torch.zeros_like(x.b), w=torch.ones_like(x.v), g=torch.zeros_like(x.g))),
            ("linear", bare._replace(b=None, w=None, g=None)),
        ),
        "an open gate is none": lambda: (("qed", x._replace(b=ones)), ("qed-nogate", x._replace(b=ones))),
        "a query across k needs no projection": lambda: (("qed-nogate", across), ("qed-nogate-noproj", across)),
        "nothing erased along e is the delta rule": lambda: (
            (
                "eda",
                bare._replace(b=torch.zeros_like(head), w=head, direction=wide / wide.shape[-1] ** 0.5),
            ),
            ("kda", bare._replace(b=head, w=None)),
        ),
    }


def identities(seed: int) -> None:
    """Rules that contain one another give the same numbers where they do; the operator is the qed rule."""
    draw = Draw("identities", seed)
    dtype = draw.choice((torch.float64, torch.float32))
    batch, tokens = draw.randint(1, 2), draw.choice((1, 3, 33, 65))
    x = _projections(draw, "qed", dtype, batch, tokens)
    state = draw.normal(batch, x.q.shape[2], x.q.shape[3], x.v.shape[3], dtype=dtype)
    table = _identities(draw, x)
    name = draw.choice([*table, "the operator"])
    if name == "the operator":
        first = qed_attention(*x[:3], x.g, x.b, x.w, x.strength, initial_state=state)
        second = RULES["qed"].attend(x._replace(q=l2_normalize(x.q), k=l2_normalize(x.k)), initial_state=state)
    else:
        first, second = (RULES[rule].attend(y, initial_state=state) for rule, y in table[name]())
    same(first[0], second[0], TOLERANCES[dtype], f"{name}: outputs")
    same(first[1], second[1], TOLERANCES[dtype], f"{name}: state")


def wrong_projections(seed: int) -> None:
    """A projection that is missing, superfluous or of another shape is refused, by its name."""
    draw = Draw("wrong_projections", seed)
    rule = draw.choice(list(RULES))
    x = _projections(draw, rule, torch.float32, 2, draw.randint(1, 3))
    name = draw.choice((*OPTIONAL, "v", "k"))
    before = getattr(x, name)
    if before is None:
        wrong: Any = draw.choice((torch.ones(2, 1, x.q.shape[2], 1), torch.zeros(()), x.q))
    elif not isinstance(before, Tensor):
        wrong = draw.choice((None, torch.ones(x.q.shape[2] + 1), torch.ones(1, 1)))
    else:
        wrong = draw.choice(
            (
                torch.cat([before, before[:1]]),
                before.unsqueeze(0),
                torch.cat([before, before, before[..., :1]], -1) if name != "v" else before[:1],
                *([None] if name in OPTIONAL else []),
            )
        )
    refused(lambda: RULES[rule].attend(x._replace(**{name: wrong})), name, kinds=(ValueError, TypeError))
