"""TRL's trainers: packed documents stay separate, preferences are learned from the policy itself, rewards rise.

One import of TRL for all of them, so they are slow together.
"""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from qed import QEDConfig, QEDForCausalLM
from qed.data.tokenization import words
from qed.testing import relative_error

from .test_causal_lm import HYBRID

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.slow
STACKS: dict[str, dict[str, Any]] = {"qed": {}, "hybrid": HYBRID}
TEXTS = [" ".join(f"w{(3 * i + j * (i + 1)) % 40}" for j in range(n)) for i, n in enumerate((6, 1, 13, 4, 9, 2, 7, 5))]
TRAINING = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "bf16": False}
TRAINING |= {"lr_scheduler_type": "constant", "logging_steps": 1, "seed": 0}


def make_tokenizer() -> PreTrainedTokenizerFast:
    made = words([" ".join(f"w{i}" for i in range(40))], 48)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<|other|>", pad_token="<|end|>", eos_token="<|end|>"
    )


def make_model(stack: str = "qed", **changes: Any) -> QEDForCausalLM:
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    return QEDForCausalLM(
        QEDConfig.tiny(**(STACKS[stack] | {"vocab_size": 48, "initializer_range": 0.1} | ends | changes))
    )


def logged(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


@pytest.mark.parametrize("stack", STACKS)
def test_packed_documents_have_the_loss_and_gradient_of_separate_ones(stack: str, tmp_path: Path) -> None:
    model = make_model(stack).double()
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), packing=True, max_length=32, per_device_train_batch_size=2, max_steps=12,
        learning_rate=1e-2, **TRAINING,
    )  # fmt: skip
    data = datasets.Dataset.from_dict({"text": TEXTS})
    trainer = trl.SFTTrainer(model, args=arguments, train_dataset=data, processing_class=make_tokenizer())
    batch = next(iter(trainer.get_train_dataloader()))
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    lengths = [end - start for start, end in zip(starts, [*starts[1:], batch["input_ids"].shape[1]], strict=True)]
    assert len(batch["input_ids"]) == 1
    assert len(lengths) > 3
    model.train()
    parameters = list(model.parameters())
    loss = trainer.compute_loss(model, dict(batch))
    found = torch.autograd.grad(loss, parameters)
    parts = [part for part in batch["input_ids"].split(lengths, 1) if part.shape[1] > 1]
    truth = sum(model(part, labels=part).loss * (part.shape[1] - 1) for part in parts) / sum(n - 1 for n in lengths)
    assert abs(loss.item() - truth.item()) < 1e-6  # TRL takes the loss itself, in float32
    for x, y in zip(found, torch.autograd.grad(truth, parameters), strict=True):
        assert relative_error(x, y) < 1e-5
    trainer.train()
    losses = logged(trainer, "loss")
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("reference", ["a copy", "the adapter switched off", "the folder it came from"])
def test_preferences_start_at_log_two_and_are_learned(reference: str, tmp_path: Path) -> None:
    """The policy is its own reference at first, so that no answer is preferred: the loss is −log σ(0) = log 2."""
    model = make_model()
    options: dict[str, Any] = {"ref_model": copy.deepcopy(model)}
    if reference == "the adapter switched off":
        options = {"peft_config": peft.LoraConfig(r=4, task_type="CAUSAL_LM")}
    elif reference != "a copy":  # TRL finds the class by the `auto_map` of config.json
        model.save_pretrained(tmp_path / "model")
        model, options = QEDForCausalLM.from_pretrained(tmp_path / "model"), {}
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=8, learning_rate=1e-2, beta=0.5, **TRAINING
    )
    rows = [{"prompt": f"w{i} w{i + 1}", "chosen": f" w{i + 2} w{i + 3}", "rejected": f" w{i + 9}"} for i in range(16)]
    options |= {"args": arguments, "train_dataset": datasets.Dataset.from_list(rows)}
    trainer = trl.DPOTrainer(model, processing_class=make_tokenizer(), **options)
    trainer.train()
    losses, margins = logged(trainer, "loss"), logged(trainer, "rewards/margins")
    assert abs(losses[0] - math.log(2)) < 1e-4
    assert abs(margins[0]) < 1e-5
    assert losses[-1] < 0.5 * losses[0]
    assert margins[-1] > 1


def test_rewards_rise(tmp_path: Path) -> None:
    """Completions come from `generate`, with prompts of different lengths padded on the left."""
    model, tokenizer = make_model(), make_tokenizer()
    before = [p.detach().clone() for p in model.parameters()]

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [sum(int(word[1:]) < 20 for word in text.split() if word[1:].isdigit()) / 8 for text in completions]

    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=16, num_generations=8, max_completion_length=8,
        max_steps=12, learning_rate=1e-2, **TRAINING,
    )  # fmt: skip
    data = datasets.Dataset.from_list([{"prompt": "w1 w2"}, {"prompt": "w3"}] * 8)
    trainer = trl.GRPOTrainer(
        model, reward_funcs=reward, args=arguments, train_dataset=data, processing_class=tokenizer
    )  # fmt: skip
    trainer.train()
    rewards, norms = logged(trainer, "reward"), logged(trainer, "grad_norm")
    assert all(math.isfinite(x) for x in norms)
    assert max(norms) > 0
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
    assert all(not torch.equal(x, y) for x, y in zip(before, model.parameters(), strict=True))
