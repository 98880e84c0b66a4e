"""An independent implementation agrees: flash-linear-attention's torch functions, rule by rule.

Its recurrences are written for one rule each and run in float32, so agreement is to float32's rounding.
"""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from qed import RULES, erase_write
from qed.rules import Projections
from qed.testing import Case, relative_error

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("fla")
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.gdn2.naive import naive_recurrent_gdn2
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
    from fla.ops.kda.naive import naive_recurrent_kda

B, T, H, K, V = 2, 70, 3, 16, 12
IMPLS = ("reference", "chunkwise")


@pytest.fixture
def x() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    unit = torch.nn.functional.normalize
    return {
        "q": unit(normal(B, T, H, K), dim=-1),
        "k": unit(normal(B, T, H, K), dim=-1),
        "v": normal(B, T, H, V),
        "g": -normal(B, T, H, K).abs(),
        "g_head": -normal(B, T, H, 1).abs(),
        "b": normal(B, T, H, K).sigmoid(),
        "w": normal(B, T, H, V).sigmoid(),
        "beta": normal(B, T, H, 1).sigmoid(),
        "state": normal(B, H, K, V),
    }


def agree(found: tuple[Tensor, Tensor], o: Tensor, state: Tensor) -> None:
    assert relative_error(found[0], o) < 1e-5
    assert relative_error(found[1], state) < 1e-5


def attend(name: str, x: dict[str, Tensor], impl: str, **gates: Any) -> tuple[Tensor, Tensor]:
    given = Projections(x["q"], x["k"], x["v"], **gates)
    return RULES[name].attend(given, scale=K**-0.5, initial_state=x["state"], impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_deltanet(x: dict[str, Tensor], impl: str) -> None:
    heads_first = (y.transpose(1, 2) for y in (x["q"], x["k"], x["v"], x["beta"].squeeze(-1)))
    o, state = delta_rule_recurrence(*heads_first, initial_state=x["state"])
    agree(attend("deltanet", x, impl, b=x["beta"]), o.transpose(1, 2), state)


@pytest.mark.parametrize("impl", IMPLS)
def test_gated_deltanet(x: dict[str, Tensor], impl: str) -> None:
    beta, g = x["beta"].squeeze(-1), x["g_head"].squeeze(-1)
    o, state = naive_recurrent_gated_delta_rule(
        x["q"], x["k"], x["v"], beta, g, initial_state=x["state"], output_final_state=True
    )
    agree(attend("gdn", x, impl, g=x["g_head"], b=x["beta"]), o, state)


@pytest.mark.parametrize("impl", IMPLS)
def test_kimi_delta_attention(x: dict[str, Tensor], impl: str) -> None:
    beta = x["beta"].squeeze(-1)
    o, state = naive_recurrent_kda(
        x["q"], x["k"], x["v"], x["g"], beta, initial_state=x["state"], output_final_state=True
    )
    agree(attend("kda", x, impl, g=x["g"], b=x["beta"]), o, state)


@pytest.mark.parametrize("impl", IMPLS)
def test_gated_deltanet_2(x: dict[str, Tensor], impl: str) -> None:
    o, state = naive_recurrent_gdn2(
        x["q"], x["k"], x["v"], x["g"], x["b"], x["w"], initial_state=x["state"], output_final_state=True
    )
    agree(attend("gdn2", x, impl, g=x["g"], b=x["b"], w=x["w"]), o, state)


@pytest.mark.parametrize("impl", IMPLS)
def test_any_erase_vector_is_a_diagonal_plus_low_rank_recurrence(impl: str) -> None:
    """QED's general a, which no delta rule of theirs can express: S ← Diag(e^g) S + k (−e^g∘a)ᵀ S + k uᵀ."""
    inputs = Case(batch=B, tokens=T, heads=H, key_width=K, value_width=V, strength=1.0).inputs(torch.float32)
    q, k, a, u, g, start = (t for t in inputs.values() if t is not None)
    erase = -a * g.exp()
    heads_first = (t.transpose(1, 2) for t in (q, k, u, erase, k, g))
    o, state = dplr_recurrence(*heads_first, initial_state=start, output_final_state=True)
    agree(erase_write(q, k, a, u, g, scale=K**-0.5, initial_state=start, impl=impl), o.transpose(1, 2), state)
