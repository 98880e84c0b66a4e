"""`qed look`: a page that shows what every token of a text reads, and what the query made the layers forget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor

from ..analysis.look import STATES, look_inside
from ..data import tokenization
from ..eval.prompts import progress
from ..eval.run import matching_tokenizer
from ..files import write_text
from ..layers import Mixer
from ..model.causal_lm import QEDForCausalLM
from ..model.loading import load
from ..pages import render
from ..rules import RULES
from .thinning import STATE_ROWS, bytes_per_token, head

MOST_TOKENS = 1024
MOST_BYTES = 5_000_000  # of the page …
OTHER_BYTES = 200_000  # … of which this is for everything but the heads
LEAST_SOURCES, MOST_SOURCES = 4, 64  # that a page keeps of each token
EXPECTED = 3  # the likeliest next tokens that are named


@dataclass(frozen=True)
class Text:
    """A text as tokens."""

    ids: list[int]
    labels: list[str]  # the text's own characters up to the end of each token; the token's name where it has none
    unknown: list[int]  # places of words that the tokenizer does not know


def read_text(text: str, tokenizer: Tokenizer) -> Text:
    """Return a text as the tokens that a model reads, from the first token of a document on.

    A text without tokens, or with more than a page can show, raises ValueError.
    """
    if text != text.encode(errors="replace").decode():
        raise ValueError("TEXT: expected text in UTF-8, got bytes that are none")
    encoding = tokenizer.encode(text, add_special_tokens=False)
    begin, _ = tokenization.ends(tokenizer)
    if not encoding.ids:
        raise ValueError(f"TEXT: expected at least one token, got none in {text!r}")
    ids: list[int] = [] if begin is None else [begin]
    labels, before = [_name(tokenizer, token) for token in ids], 0
    if len(encoding.ids) + len(ids) > MOST_TOKENS:
        count = len(encoding.ids) + len(ids)
        raise ValueError(f"TEXT: expected at most {MOST_TOKENS:,} tokens, which a page can show, got {count:,}")
    for token, (_, end) in zip(encoding.ids, encoding.offsets, strict=True):
        ids.append(token)
        labels.append(text[before:end] or _name(tokenizer, token))  # part of a character has no text of its own
        before = max(before, end)
    name = getattr(tokenizer.model, "unk_token", None)
    unknown = None if name is None else tokenizer.token_to_id(name)
    return Text(ids, labels, [i for i, token in enumerate(ids) if token == unknown])


def sources_for(heads: int, tokens: int) -> int:
    """Return how many sources of each token fit on a page. ValueError, with the number of tokens that would fit, if
    these are too many for a model with so many heads."""
    count = _fitting(heads, tokens)
    if count < LEAST_SOURCES:
        most = next((n for n in range(tokens, 0, -1) if _fitting(heads, n) >= LEAST_SOURCES), 0)
        raise ValueError(
            f"TEXT: expected at most {most:,} tokens, which a page can show of a model with {heads} heads, "
            f"got {tokens:,}"
        )
    return count


def _fitting(heads: int, tokens: int) -> int:
    """Return how many sources of each token fit on a page, at most MOST_SOURCES."""
    states = 4 * heads * STATE_ROWS * min(STATES, tokens) // 3
    room = (MOST_BYTES - OTHER_BYTES - states) / (heads * tokens)
    return sum(bytes_per_token(n) <= room for n in range(1, MOST_SOURCES + 1))


@torch.no_grad()
def expectations(model: QEDForCausalLM, ids: Tensor, tokenizer: Tokenizer) -> list[list[tuple[str, float]]]:
    """Return the likeliest next tokens after each token, with their probabilities.

    Args:
        model: the model that reads.
        ids: tokens [1, T].
        tokenizer: the model's own.
    """
    shares, tokens = (x.tolist() for x in model(ids, use_cache=False).logits[0].float().softmax(-1).topk(EXPECTED))
    return [
        [(_name(tokenizer, token), round(share, 4)) for token, share in zip(*row, strict=True)]
        for row in zip(tokens, shares, strict=True)
    ]


def _name(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as text, or by its name if it has none, as special tokens and parts of characters do."""
    text = tokenizer.decode([token])
    return tokenizer.id_to_token(token) or f"token {token}" if not text.strip() or "\ufffd" in text else text


def collect(model: QEDForCausalLM, text: Text, tokenizer: Tokenizer, console: Console) -> dict[str, Any]:
    """Return everything that the page shows, as JSON.

    Args:
        model: a model with recurrent layers.
        text: the text to look at.
        tokenizer: the model's own.
        console: where progress is shown.
    """
    mixers = {i: block.mixer for i, block in enumerate(model.model.layers) if isinstance(block.mixer, Mixer)}
    if not mixers:
        kinds = ", ".join(sorted(set(model.config.layer_types)))
        raise ValueError(f"CHECKPOINT: expected a model with recurrent layers, got {kinds}")
    count = sources_for(sum(mixer.num_heads for mixer in mixers.values()), len(text.ids))
    ids = torch.tensor([text.ids], device=model.device)
    heads: list[dict[str, Any]] = []
    with progress(console) as bar:
        for i, look in bar.track(look_inside(model, ids), total=len(mixers), description="layers"):
            about = {"layer": i, "rule": mixers[i].rule}
            heads += [about | head(look, number, count) for number in range(mixers[i].num_heads)]
    heads.sort(key=lambda x: -(x["change"] or 0.0))
    expected = expectations(model, ids, tokenizer)
    scales = {mixer: mixer.strength_scale for mixer in mixers.values()}
    model.set_strength_scale(0.0)
    without = expectations(model, ids, tokenizer)
    for mixer, scale in scales.items():
        mixer.strength_scale = scale
    return {
        "tokens": text.labels,
        "unknown": text.unknown,
        "expected": expected,
        "without": without if any(x["lost"] for x in heads) else None,
        "heads": heads,
        "sources": min(count, len(text.ids)),
        "bound": model.config.lambda_max,
    }


def remarks(shown: dict[str, Any], layers: int) -> list[str]:
    """Return, in sentences, what the page of a model with so many layers cannot show."""
    rules = {x["layer"]: RULES[x["rule"]] for x in shown["heads"]}
    said, recurrent = [], sorted(rules)
    without = [i for i in recurrent if not rules[i].strength]
    if without:
        said.append(
            f"{_layers(without, recurrent)} no λ: there is no correction of the erase vector to leave out, and so no "
            "map of what one made the layer forget."
        )
    softmax = [i for i in range(layers) if i not in rules]
    if softmax:
        said.append(f"{_layers(softmax, [])} softmax attention and no state, and cannot be shown.")
    if shown["unknown"]:
        said.append(
            f"The tokenizer does not know {len(shown['unknown'])} of the {len(shown['tokens'])} tokens, which have a "
            "dotted line: the model reads its token for unknown words in their place."
        )
    return said


def _layers(numbers: list[int], all_of_them: list[int]) -> str:
    if numbers == all_of_them:
        return "The layers of this model have"
    if len(numbers) == 1:
        return f"Layer {numbers[0]} has"
    return f"Layers {', '.join(map(str, numbers[:-1]))} and {numbers[-1]} have"


def _values(checkpoint: Path, model: QEDForCausalLM, shown: dict[str, Any]) -> dict[str, Any]:
    """Return what the page says about the model."""
    rules = {x["rule"]: RULES[x["rule"]] for x in shown["heads"]}
    corrected = [rule for rule in rules.values() if rule.strength]
    source = "a fixed random direction" if any(rule.direction != "none" for rule in corrected) else "the query"
    sizes = f"{model.config.num_hidden_layers} layers, {model.config.num_heads} heads in each"
    parts = {name: rule.erase_vector.partition(" + ") for name, rule in rules.items()}
    return {
        "title": f"What {source} made it forget" if corrected else "What every token reads",
        "source": source if corrected else "",
        "erases": [{"rule": name, "plain": plain, "correction": more} for name, (plain, _, more) in parts.items()],
        "model": {
            "name": checkpoint.parent.name if checkpoint.name == "export" else checkpoint.name,
            "described": f"rule {' and '.join(rules)}, {sizes}, {model.num_parameters():,} parameters",
        },
    }


def write_look(checkpoint: Path, text: str, out: Path, *, tokenizer: str | None, device: str, console: Console) -> Path:
    """Write the page of one text, and return its path. Whatever is wrong raises before anything is written.

    Args:
        checkpoint: a folder that `save_pretrained` wrote.
        text: what the model reads.
        out: the HTML file to write.
        tokenizer: a file, where the checkpoint has none.
        device: where the model runs.
        console: where progress is shown, and what the page cannot show is said.
    """
    encoder = matching_tokenizer(checkpoint, tokenizer)
    read = read_text(text, encoder)
    model = load(checkpoint, dtype=torch.float32, device=device)
    size = model.config.vocab_size
    if max(read.ids) >= size:
        raise ValueError(f"--tokenizer: expected at most the model's {size} tokens, got token {max(read.ids)}")
    shown = collect(model, read, encoder, console)
    said = remarks(shown, model.config.num_hidden_layers)
    for remark in said:
        console.print(remark, style="yellow", soft_wrap=True, highlight=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, render("look.html", data=shown, remarks=said, **_values(checkpoint, model, shown)))
    return out
