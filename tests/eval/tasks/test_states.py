"""Norms of states: those of one pass over the whole text, and a rule whose state grows is found out."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from qed import QEDCache, QEDConfig, QEDForCausalLM
from qed.data.prepare import prepare
from qed.data.shards import TokenShards
from qed.eval.options import Options
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
    result = {"texts": {"corpus": points(*({"0": [3.0, 2.0], "2": [5.0, 2.0 ** (i / 2)]} for i in range(1, 17)))}}
    (row,) = states.table_rows("states-1024", result)
    assert row == ("states-1024", "corpus", "1 of 4", "layer 2, head 1", "256", "128 tokens", "finite")
    states.check(result)


def points(*norms: object) -> list[dict[str, object]]:
    return [{"tokens": 64 * (i + 1), "norms": x, "finite": True} for i, x in enumerate(norms)]


@pytest.mark.parametrize(
    "texts",
    [
        None,
        {},
        {"noise": [3, 3]},
        {"noise": points({"0": [1.0]})},  # of one point nothing can be said
        {"noise": points({"0": [1.0]}, {"1": [1.0]})},
        {"noise": points({"0": [1.0]}, {"0": [1.0, 2.0]})},
        {"noise": points({"0": [1.0]}, {"0": ["1"]})},
        {"noise": points({}, {})},
    ],
)
def test_other_results_are_refused(texts: object) -> None:
    with pytest.raises(ValueError, match="expected norms of states"):
        states.check({"texts": texts})
    states.check({"texts": {"noise": points({"0": [1.0, None]}, {"0": [2.0, None]})}})


def test_a_model_that_has_no_states_and_a_tokenizer_without_the_words_are_refused(tmp_path: Path) -> None:
    """Before anything is read."""
    prepare("synthetic:60", tokenizer="words:300", out=tmp_path, console=Console(quiet=True))
    options = Options(lengths=(1024,), data={"states": tmp_path})
    identity = TokenShards(tmp_path).index["tokenizer_sha256"]
    tiny = QEDConfig.tiny()
    with pytest.raises(ValueError, match="knows all words of 'The grass is green"):
        states.prepare(QEDForCausalLM(tiny), options, identity)
    softmax = QEDConfig.tiny(layer_types=["full_attention"] * tiny.num_hidden_layers)
    with pytest.raises(ValueError, match="expected a model with recurrent layers"):
        states.prepare(QEDForCausalLM(softmax), options, identity)
    with pytest.raises(ValueError, match="expected tokens of the checkpoint's tokenizer"):
        states.prepare(QEDForCausalLM(tiny), options, "another")
    with pytest.raises(ValueError, match="expected states=FOLDER"):
        states.prepare(QEDForCausalLM(tiny), Options(lengths=(1024,)), identity)
