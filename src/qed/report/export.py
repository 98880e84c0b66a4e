"""`qed export`: a model as a folder to send on, checked by a process that has never heard of this package.

The folder is made and checked under another name, and takes its place when it is right. Of what was there before, only
files that the export has too, weights in other files and a model card that nobody edited are replaced.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from .. import files
from ..data import tokenization
from ..data.tokenizer_files import TOKENIZER
from ..eval.run import matching_tokenizer
from ..model.card import CARD, is_ours
from ..model.causal_lm import QEDForCausalLM
from ..model.loading import load
from ..train.exporting import write_model
from .card import describe

TOKENS = 64  # of the row whose logits are compared
TEXTS = ("A text, with  two spaces.", " naïve 你好 🎉 e\u0301\n\t", "<|end|></s><s><unk>", "0x1F600 don't ▁ \u0000")
# What a program does that knows transformers alone.
FRESH = """
import json, sys
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, out, size, tokens, texts, *imports = sys.argv[1:]
for path in imports:
    exec(compile(open(path, "rb").read(), path, "exec"), {"__name__": "imported"})
ids = torch.arange(int(tokens))[None] % int(size)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
with torch.no_grad():
    found = {"logits": model(ids).logits}
if texts:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    for name in ("bos", "eos", "pad"):
        assert getattr(tokenizer, name + "_token_id") is not None, "the tokenizer has no " + name
    for i, text in enumerate(json.loads(texts)):
        found[str(i)] = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids, dtype=torch.int64)
save_file(found, out)
"""


class Export(NamedTuple):
    """What became of an export."""

    files: list[str]
    kept_card: bool  # a card of somebody else, or one that was edited
    tokenizer: bool
    difference: float  # the largest between logits here and in the fresh process
    problems: list[str]  # results that cannot be read


def export(
    checkpoint: Path, out: Path, *, place: Path, tokenizer: str | None = None, imports: Sequence[Path] = ()
) -> Export:
    """Write a model into a folder that loads anywhere; ValueError, and nothing is written, if it does not.

    Args:
        checkpoint: a folder that `save_pretrained` wrote.
        out: the folder to write.
        place: the folder of the checkpoint's run, with metrics and results, or the checkpoint itself.
        tokenizer: a tokenizer's file, if the checkpoint has none.
        imports: files that add the model's rules to the package.
    """
    model = load(checkpoint, dtype="auto", device="cpu")
    source = _tokenizer(checkpoint, tokenizer, model.config.vocab_size)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = files.new_folder(out.with_name(f"{out.name}.{secrets.token_hex(4)}{files.PART}"))
    try:
        write_model(model, part, tokenizer=source)
        _, problems = describe(part, place)
        difference = _check(model, part, imports)
        kept = (out / CARD).exists() and not is_ours(out / CARD)
        names = _put(part, out, kept)
    finally:
        files.remove(part)
    return Export(names, kept, source is not None, difference, problems)


def _tokenizer(checkpoint: Path, given: str | None, vocabulary: int) -> Path | None:
    """Return the tokenizer's file, the checkpoint's own if it has one; ValueError if another one is given, or one with
    more tokens than the model has."""
    own = checkpoint / TOKENIZER
    if given is None and not own.is_file():
        return None
    size = matching_tokenizer(checkpoint, given).get_vocab_size()
    if size > vocabulary:
        raise ValueError(f"--tokenizer: expected at most the model's {vocabulary} tokens, got {size}")
    return own if own.is_file() else Path(str(given))


def _check(model: QEDForCausalLM, folder: Path, imports: Sequence[Path]) -> float:
    """Load a folder in a fresh process, as any program would, and return the largest difference between its logits and
    the model's own. ValueError if it does not load, or gives other logits or tokens."""
    written = folder / TOKENIZER
    texts = json.dumps(TEXTS) if written.is_file() else ""
    size = model.config.vocab_size
    with tempfile.TemporaryDirectory() as place:
        answer = Path(place) / "answer.safetensors"
        command = [sys.executable, "-c", FRESH, str(folder.absolute()), str(answer), str(size), str(TOKENS), texts]
        command += [str(path.absolute()) for path in imports]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": place}
        done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise ValueError(f"the export does not load in a fresh process, and is not kept: {said}")
        found = load_file(answer)
    with torch.no_grad():
        logits = model(torch.arange(TOKENS)[None] % size).logits
    difference = (found["logits"].float() - logits.float()).abs().max().item()
    if not difference <= 1e-3 * max(1.0, logits.float().abs().max().item()):
        raise ValueError(f"the export gives other logits in a fresh process, by up to {difference:g}, and is not kept")
    if not texts:
        return difference
    encoder = tokenization.load(str(written))
    for i, text in enumerate(TEXTS):
        ours, theirs = encoder.encode(text, add_special_tokens=False).ids, found[str(i)].tolist()
        if ours != theirs:
            raise ValueError(
                f"transformers' tokenizer does not give our tokens of {text!r}, and the export is not kept: "
                f"expected {ours}, got {theirs}"
            )
    return difference


def _put(part: Path, out: Path, kept_card: bool) -> list[str]:
    """Move the files of an export to their place, and return their names."""
    out.mkdir(exist_ok=True)
    if kept_card:
        (part / CARD).unlink()
    names = sorted(x.name for x in part.iterdir())
    for name in sorted(names, key=lambda name: name == "config.json"):  # last, as it says what the others are
        (part / name).replace(out / name)
    stale = [x for x in (*out.glob("model*.safetensors"), *out.glob("model*.index.json")) if x.name not in names]
    for path in stale:
        files.remove(path)
    files.flush(out)
    return names
