"""A tokenizer's files beside a model: those that transformers' `AutoTokenizer` reads.

tokenizer.json is kept byte for byte, since its sha256 tells which tokens results were made of. tokenizer_config.json
says which tokens begin and end a text and which one fills a row:

| tokenizer | bos | eos | pad |
|---|---|---|---|
| SentencePiece, such as Llama-2's | `<s>` | `</s>` | `<unk>`, which no text becomes where bytes are pieces |
| bpe:N and words:N | `<|end|>` | `<|end|>` | `<|end|>`, their one token that is no text: it stands between documents |

No token is added when a text is encoded: transformers' tokenizer gives the same tokens as ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..files import read_json, write_bytes, write_json
from . import tokenization

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
# What else transformers may write beside a tokenizer.
OTHERS = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "tokenizer.model")
FILLING = ("<pad>", "<unk>")


def special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the tokens that begin, end and fill up texts, as transformers names them."""
    begin, end = (x if x is None else tokenizer.id_to_token(x) for x in tokenization.ends(tokenizer))
    fills = next((name for name in FILLING if tokenizer.token_to_id(name) is not None), end)
    unknown = getattr(tokenizer.model, "unk_token", None)
    named = {"bos_token": begin or end, "eos_token": end, "pad_token": fills, "unk_token": unknown}
    return {name: token for name, token in named.items() if token is not None}


def as_transformers(tokenizer: Tokenizer) -> Any:
    """Return a tokenizer of transformers that gives the same tokens and knows the special ones."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens(tokenizer))


def write_tokenizer(source: Path, folder: Path) -> dict[str, int]:
    """Write a tokenizer's files into a model's folder, and return the numbers that the model's configuration should
    have for the tokens which begin, end and fill up texts, such as `eos_token_id`.

    Settings that lie beside the source, as transformers wrote them, are kept; they must not ask for code. Then no
    numbers are returned: whoever chose the settings has chosen the model's numbers too.

    Args:
        source: a tokenizer.json, or a SentencePiece .model.
        folder: the model's folder.
    """
    tokenizer = tokenization.load(str(source))
    settings = source.with_name(SETTINGS)
    as_it_is = source.suffix == ".json"
    write_bytes(folder / TOKENIZER, source.read_bytes() if as_it_is else tokenizer.to_str(pretty=True).encode())
    if source.name == TOKENIZER and settings.is_file():
        asked = read_json(settings, "a tokenizer's settings").get("auto_map")
        if asked is not None:
            raise ValueError(f"{settings}: expected a tokenizer that needs no code, got auto_map={asked!r}")
        for name in (SETTINGS, *OTHERS):
            if (file := source.with_name(name)).is_file():
                write_bytes(folder / name, file.read_bytes())
        return {}
    special = special_tokens(tokenizer)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / SETTINGS, about | special)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return {f"{name}_id": vocabulary[token] for name, token in special.items() if name != "unk_token"}
