"""Norms of states: those of one pass over the whole text, and a rule whose state grows is found out."""

import math
from types import SimpleNamespace

import pytest
import torch

from qed import QEDCache, QEDConfig, QEDForCausalLM
from qed.eval.tasks import states
from qed.rules import RULES, Operands, Rule


def growing(x: SimpleNamespace) -> Operands:
    """Each token adds to what its key holds, where others erase: a is −k, so that k's row doubles."""
    return Operands(q=x.q, k=x.k, a=-x.k, u=x.w * x.v, g=None)


@pytest.mark.parametrize("tokens", [states.SHORTEST, states.SHORTEST + 37])
def test_norms_are_those_of_one_pass(tokens: int) -> None:
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny(initializer_range=0.3)).eval()
    ids, cache, steps = torch.randint(3, 256, (tokens,)), QEDCache(), []
    found = states.norms(model, ids, lambda: steps.append(1))
    with torch.no_grad():
        model(ids[None], past_key_values=cache)
    assert len(found) == len(steps) == states.POINTS
    assert found[-1]["tokens"] == tokens
    assert found[-1]["finite"]
    assert found[-1]["norms"].keys() == {str(i) for i in range(model.config.num_hidden_layers)}
    for layer, norms in found[-1]["norms"].items():
        truth = cache.get(int(layer)).recurrent[0].flatten(1).norm(dim=1)
        assert torch.allclose(torch.tensor(norms), truth, rtol=1e-4)


def test_a_state_that_grows_without_end_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that comes again and again doubles its key's part of every state: after 300 no number is finite."""
    monkeypatch.setitem(RULES, "growing", Rule(function=growing, erase_vector="−k", decay="none"))
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny(rule="growing", initializer_range=0.3)).eval()
    found = states.norms(model, torch.full((states.SHORTEST,), 5))
    assert found[0]["finite"]
    assert not found[-1]["finite"]
    first = found[0]["norms"]["0"]
    assert all(math.log2(x) > 50 for x in first)  # 64 tokens, of which the first ones fill the convolution
    rows = states.table_rows("states-1024", {"texts": {"noise": found}})
    assert rows[0][2].startswith(f"{sum(map(len, found[0]['norms'].values()))} of ")
    assert rows[0][4] == "not finite"
    assert rows[0][6] == "not finite"


def test_the_table_says_how_fast_the_fastest_head_grows() -> None:
    points = [
        {"tokens": 128 * (i + 1), "norms": {"0": [3.0, 2.0], "2": [5.0, 2.0 ** ((i + 1) / 2)]}, "finite": True}
        for i in range(states.POINTS)
    ]
    (row,) = states.table_rows("states-2048", {"texts": {"corpus": points}})
    assert row == ("states-2048", "corpus", "1 of 4", "layer 2, head 1", "256", "256 tokens", "finite")
    states.check({"texts": {"corpus": points}})


@pytest.mark.parametrize("result", [{}, {"texts": {}}, {"texts": {"noise": [3]}}, {"texts": {"noise": [{}]}}])
def test_other_results_are_refused(result: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected norms of states"):
        states.check(result)
