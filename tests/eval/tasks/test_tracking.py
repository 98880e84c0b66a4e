"""State tracking and recall under load: what a model that knows the answers gets, and counts that are counted again."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qed.data import Generated
from qed.data.generated import given_and_wanted
from qed.eval.counted import packed_bits
from qed.eval.options import Options
from qed.eval.task import MeasuredTask
from qed.eval.tasks import named
from qed.eval.tasks.tracking import edges, words


class Knowing:
    """A model that answers rows it has been told, and forgets after some tokens."""

    device = torch.device("cpu")
    config: Any

    def __init__(self, tokens: Tensor, targets: Tensor, until: int):
        self.known = {tuple(x.tolist()): y for x, y in zip(tokens, targets, strict=True)}
        self.until = until

    def __call__(self, given: Tensor, use_cache: bool) -> Any:
        said = torch.stack([self.known[tuple(x.tolist())] for x in given]).clamp(min=0)
        said[:, self.until :] = 0  # no answer is the token that ends documents
        return SimpleNamespace(logits=torch.nn.functional.one_hot(said, 3000))


def measured(task: str, model: Any, options: Options, data: str) -> tuple[MeasuredTask, dict[str, Any]]:
    row = named(task, MeasuredTask)
    found = row.prepare(model, options, Generated(data).index["tokenizer_sha256"])
    return row, found.run(lambda _: None)


def test_right_up_to_a_letter() -> None:
    model = Knowing(*words("s3", 128, 5), until=64)
    options = Options(lengths=(128,), samples=5, batch=2)
    task, result = measured("tracking_s3", model, options, "generated:tracking:s3")
    assert edges(128) == [0, 32, 64, 128]
    assert [(x["right"], x["asked"]) for x in result["bins"]] == [(160, 160), (160, 160), (0, 320)]
    assert [(x["right"], x["asked"]) for x in result["powers"]] == [(64, 64), (64, 64), (0, 128)]
    task.check(result)
    for part in ("bins", "powers"):
        changed = [dict(x) for x in result[part]]
        changed[-1]["right"] += 1
        with pytest.raises(ValueError, match=f"expected {part} as its answers have them"):
            task.check(result | {part: changed})
    with pytest.raises(ValueError, match="expected answers as packed bits"):
        task.check(result | {"answers": "?"})
    with pytest.raises(ValueError, match="expected 896 answers, got 768"):
        task.check(result | {"answers": packed_bits(np.zeros(768, bool))})


def test_another_groups_model_is_refused() -> None:
    model = Knowing(*words("s3", 32, 1), until=32)
    with pytest.raises(ValueError, match="tracking_z5: expected a model whose tokens are elements of z5"):
        measured("tracking_z5", model, Options(lengths=(32,)), "generated:tracking:s3")
    model.config = SimpleNamespace(vocab_size=66)
    with pytest.raises(ValueError, match="recall_load: expected a model trained on generated:recall:WORDS"):
        measured("recall_load", model, Options(lengths=(64,)), "generated:tracking:s3")


def test_recall_is_counted_by_load() -> None:
    source = Generated("generated:recall:64")
    tokens, targets = given_and_wanted(source.rows(range(3), 64))
    model = Knowing(tokens, targets, until=32)
    model.config = SimpleNamespace(vocab_size=source.vocab_size)
    options = Options(lengths=(64,), samples=3, batch=2)
    task, result = measured("recall_load", model, options, "generated:recall:64")
    assert [(x["from"], x["to"], x["right"], x["asked"]) for x in result["loads"]] == [
        (0, 4, 24, 24),
        (4, 8, 24, 24),
        (8, 16, 0, 48),
    ]
    task.check(result)
    result["loads"][0]["right"] -= 1
    with pytest.raises(ValueError, match="expected the counts of its answers"):
        task.check(result)
    with pytest.raises(ValueError, match="expected the numbers of rows and pairs"):
        task.check({"loads": []})
