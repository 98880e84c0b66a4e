"""What the other examples start from: a text without a file, and a tiny model that learns it in seconds.

The text tells the colours of things. Colours change, and questions ask for the newest one, so a model has to remember
what it read and to forget what is no longer true:

    the lamp is blue. the door is red. the lamp? blue. the lamp is green. the lamp? green.
"""

import random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from qed import QEDConfig, QEDForCausalLM
from qed.data.tokenization import words

THINGS = ["lamp", "door", "wall", "bridge", "box", "boat", "chair", "hat"]
COLOURS = ["blue", "red", "green", "white", "black", "yellow", "brown", "pink"]
SENTENCES = 10  # in a document; each has five tokens
ROWS = 32  # documents in a batch
torch.set_num_threads(1)  # a model this small gains nothing from more threads, and loses time where cores are shared


def document(draw: random.Random, answer: str = "newest") -> str:
    """Return statements about three things, and questions that ask for the "newest" or the "oldest" colour of one."""
    colours: dict[str, list[str]] = {}
    things, sentences = draw.sample(THINGS, 3), []
    for _ in range(SENTENCES):
        thing = draw.choice(things)
        if thing in colours and draw.random() < 0.6:
            said = colours[thing][-1 if answer == "newest" else 0]
            sentences.append(f"the {thing}? {said}.")
        else:
            colours.setdefault(thing, []).append(draw.choice(COLOURS))
            sentences.append(f"the {thing} is {colours[thing][-1]}.")
    return " ".join(sentences)


def documents(count: int, seed: int = 0, answer: str = "newest") -> list[str]:
    """Return the first documents of a seed."""
    draw = random.Random(seed)
    return [document(draw, answer) for _ in range(count)]


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token for each word and mark of the text."""
    return words(documents(200), 64)


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Return the tokens of texts that are equally long, [texts, tokens]."""
    return torch.tensor([tokenizer.encode(text).ids for text in texts])


def make_model(tokenizer: Tokenizer) -> QEDForCausalLM:
    """Return an untrained QED model with two layers of width 64 and this tokenizer's vocabulary."""
    torch.manual_seed(0)
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    # The usual initial weights are those of wide models. With larger ones, a narrow model learns much sooner.
    return QEDForCausalLM(QEDConfig.tiny(vocab_size=tokenizer.get_vocab_size(), initializer_range=0.1, **ends))


def train(model: Any, rows: Tensor, *, steps: int, learning_rate: float = 5e-3) -> list[float]:
    """Train on `rows` [N, T], from the first on, and return the loss of every step."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    theta = [p for name, p in trained.items() if name.endswith("theta")]
    rest = [p for name, p in trained.items() if not name.endswith("theta")]
    # θ, which λ is made of, has ten times the learning rate of the rest, as in the paper.
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": theta, "weight_decay": 0.0}])
    rates = [learning_rate, 10 * learning_rate]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps)
    losses = []
    model.train()
    for step in range(steps):
        batch = rows[torch.arange(ROWS * step, ROWS * (step + 1)) % len(rows)]
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    return losses


def trained_model(tokenizer: Tokenizer, steps: int = 100) -> QEDForCausalLM:
    """Return a model that has learned the text, which takes some ten seconds on two cores."""
    model = make_model(tokenizer)
    train(model, encode(tokenizer, documents(ROWS * steps)), steps=steps)
    return model


@torch.no_grad()
def accuracy(model: Any, tokenizer: Tokenizer, answer: str = "newest") -> float:
    """Return the share of right answers to the questions of 200 documents that no model was trained on."""
    rows = encode(tokenizer, documents(200, seed=1, answer=answer))
    output = model(rows)
    guesses = getattr(output, "logits", output).argmax(-1)  # of the next token, at every token
    asked = rows[:, :-1] == tokenizer.token_to_id("?")
    return (guesses[:, :-1] == rows[:, 1:])[asked].float().mean().item()
