"""The model card: README.md of a model's folder, for people and, in its head, for programs.

A card of ours ends in a line with the sha256 of all before it. Only such a card is ever replaced: one that somebody
else wrote, or edited, stays as it is.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import write_text
from ..rules import RULES

if TYPE_CHECKING:
    from .config import QEDConfig

CARD = "README.md"
SIGNATURE = "<!-- Written by qed. A later save replaces this file unless it was edited: sha256 {} -->\n"
PAPER = (
    "Dhruman Gupta, Aritra Das, Debayan Gupta. *The Query Knows What to Forget: A Second Erase Direction for Linear "
    "Attention.*"
)
LOADING = """\
The model's code is the Python package `qed-attention` (`pip install qed-attention`), with transformers 5.17 or newer.
With it imported, nothing in this folder is run as code:

```python
import qed
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/of/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/of/this/folder")
```

Programs that do not import `qed`, such as `lm_eval --model hf`, load it with `trust_remote_code=True`. Then
transformers runs `modeling_qed.py` of this folder, which only imports the package: read it first, as in any folder.
"""
LIMITS = (
    "The weights are what training made of its data: nothing was done to make answers true, safe or polite.",
    "No licence of the weights is stated here: it is for whoever publishes them, and depends on the data.",
)


def card(
    config: QEDConfig,
    parameters: int,
    *,
    facts: dict[str, str] | None = None,
    sections: dict[str, str] | None = None,
    limits: Sequence[str] = (),
) -> str:
    """Return the text of a model card.

    Args:
        config: the model's configuration.
        parameters: how many it has.
        facts: rows of the table of what the model is, before those that the configuration gives.
        sections: more text by heading, such as training and evaluation.
        limits: what the model cannot do, besides what holds for all.
    """
    rules = sorted({rule for rule in config.layer_rules or () if rule})
    rows = (facts or {}) | _described(config) | {"parameters": f"{parameters:,}"}
    table = "\n".join(f"| {name} | {cell(value)} |" for name, value in rows.items())
    tags = "".join(f"- {tag}\n" for tag in ("linear-attention", *sorted({"qed", *rules})))
    limits = [*limits, *LIMITS]
    parts = {"Load it": LOADING, **(sections or {}), "Limits": "\n".join(f"- {x}" for x in limits)}
    body = "\n\n".join(f"## {heading}\n\n{text.strip()}" for heading, text in parts.items())
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n{tags}---\n\n"
        f"# A language model with linear attention, {_rounded(parameters)} parameters\n\n"
        f"| | |\n|---|---|\n{table}\n\n{body}\n\n## Paper\n\n{PAPER}\n\n"
    )


def cell(text: str) -> str:
    """Return a text as it stands in a cell of a table."""
    return " ".join(text.replace("|", r"\|").split())


def _described(config: QEDConfig) -> dict[str, str]:
    """Return what a configuration says, in words, by what it is about."""
    kinds = [rule or kind for kind, rule in zip(config.layer_types or (), config.layer_rules or (), strict=True)]
    layers = ", ".join(f"{count} {name}" for name, count in Counter(kinds).items())
    said = {"layers": f"{config.num_hidden_layers}: {layers}"}
    for name in dict.fromkeys(rule for rule in config.layer_rules or () if rule):
        said[f"erase vector of {name}"] = f"a = {RULES[name].erase_vector}"
        if RULES[name].strength:
            said["strength λ"] = f"learned for every head, at most {config.lambda_max:g}"
    heads = f"{config.num_heads} heads of {config.head_dim} key and {config.value_head_dim} value channels"
    return said | {"width": f"{config.hidden_size}; {heads}", "vocabulary": f"{config.vocab_size:,} tokens"}


def _rounded(parameters: int) -> str:
    return f"{parameters / 1e6:.0f}M" if parameters >= 1e7 else f"{parameters / 1e6:.1f}M"


def write_card(folder: Path, text: str) -> bool:
    """Write a card into a model's folder, unless there is one that somebody else wrote or edited; return whether it
    was written."""
    path = folder / CARD
    if (path.exists() or path.is_symlink()) and not is_ours(path):
        return False
    write_text(path, text + SIGNATURE.format(_digest(text)))
    return True


def is_ours(path: Path) -> bool:
    """Return whether a README.md is a card of ours that nobody has edited."""
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return False
    match = re.fullmatch("(.*)" + re.escape(SIGNATURE).replace(r"\{\}", "([0-9a-f]{64})"), text, re.DOTALL)
    return match is not None and _digest(match[1]) == match[2]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
