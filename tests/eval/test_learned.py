"""A tiny model that has learned to find a needle scores high; its answers against others' golds score by chance."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from qed import QEDConfig, QEDForCausalLM
from qed.eval.answers import answers
from qed.eval.tasks.niah import correct

NOISE = [f"n{i}" for i in range(12)]
KEYS = [f"k{i}" for i in range(8)]
VALUES = [f"v{i:02d}" for i in range(16)]
WORDS = ["<|end|>", "needle", "ask", *NOISE, *KEYS, *VALUES]


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({x: i for i, x in enumerate(WORDS)}, unk_token="<|end|>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.WordPiece(prefix="@@")
    return made


def sample(random: torch.Generator, length: int) -> tuple[str, str]:
    """needle KEY VALUE somewhere in noise, then ask KEY."""

    def pick(words: list[str]) -> str:
        return words[int(torch.randint(len(words), (), generator=random))]

    key, value = pick(KEYS), pick(VALUES)
    noise = [pick(NOISE) for _ in range(length - 5)]
    place = int(torch.randint(length - 5, (), generator=random))
    return " ".join([*noise[:place], "needle", key, value, *noise[place:], "ask", key]), value


@pytest.mark.slow
def test_right_is_told_from_wrong() -> None:
    torch.manual_seed(0)
    random, encoder = torch.Generator().manual_seed(0), tokenizer()
    sizes = {"vocab_size": len(WORDS), "hidden_size": 32, "num_heads": 2, "head_dim": 16, "intermediate_size": 64}
    model = QEDForCausalLM(QEDConfig.tiny(**sizes, num_hidden_layers=2, eos_token_id=0)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(250):
        made = [sample(random, 24) for _ in range(64)]
        ids = torch.tensor([encoder.encode(f"{prompt} {value} <|end|>").ids for prompt, value in made])
        labels = ids.clone()
        labels[:, :-2] = -100
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.02:
            break
    model.eval()
    test = [sample(random, 24 + i % 16) for i in range(200)]
    prompts = [encoder.encode(prompt).ids for prompt, _ in test]
    said = [encoder.decode(x.tokens) for x in answers(model, prompts, new_tokens=4, ends={0}, batch=200)]
    golds = [value for _, value in test]
    right = sum(correct(x, gold) for x, gold in zip(said, golds, strict=True)) / 200
    shuffled = sum(correct(x, gold) for x, gold in zip(said, golds[7:] + golds[:7], strict=True)) / 200
    assert right > 0.95, loss.item()
    assert shuffled < 0.15  # one in sixteen
