"""Long documents, tokenised piece by piece to exactly the tokens of the whole, in memory that a piece needs.

A tokenizer takes about a hundred bytes for every character, so that a document of 100 MB would take 10 GB at once. It
may be cut wherever no token can reach over the cut and nothing before it has an influence on what comes after:

- Tokenizers that first part a text into words (the patterns in PATTERNS, byte-level BPE, words of `words:N`): between a
  letter and a space. None of these patterns has a match in which a letter is followed by a space, none looks back, and
  the one that looks ahead, over white space, does so only at white space. So a word ends at the cut in any case, and
  the words on either side are the same as in the whole text.
- BPE over the whole text as one word, with spaces as "▁", as SentencePiece has it: between two characters that stand
  beside each other in no piece of the vocabulary. A piece over the cut would have to contain both, so no merge ever
  joins the sides, and merges of either side do not depend on the other. Only the first piece gets the "▁" that such
  tokenizers put before a text.

Other tokenizers, and texts without such a place, are refused above LONGEST characters.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from tokenizers import Tokenizer

PIECE = 1_000_000  # characters after which a document is cut at the next place
LONGEST = 4_000_000  # characters that are tokenised at once where there is no such place
TOGETHER = 4  # pieces at a time, in parallel

SPACE = "▁"
# Of GPT-4 and Llama 3, with up to three digits in a word, and of Qwen 2 and later, with one.
PATTERNS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
}

May = Callable[[str, str], bool]  # whether a text may be cut between two characters


def between_words(left: str, right: str) -> bool:
    """Whether a text may be cut between two characters, where words are all that counts: after a letter, at a space."""
    return right == " " and left in string.ascii_letters


def cut(text: str, may: May | None) -> Iterator[str]:
    """Pieces that make up the text. ValueError if one would be longer than LONGEST. None: it may not be cut."""
    start = 0
    while len(text) - start > PIECE and may is not None:
        places = range(start + PIECE, min(start + LONGEST, len(text)))
        end = next((i for i in places if may(text[i - 1], text[i])), None)
        if end is None:
            break
        yield text[start:end]
        start = end
    if len(text) - start > LONGEST:
        why = "this tokenizer's documents cannot be cut" if may is None else "no place where it may be cut was found"
        raise ValueError(
            f"SOURCE: expected documents of at most {LONGEST:,} characters, or such as can be tokenised in pieces, got "
            f"one of {len(text):,} that begins with {text[:40]!r}: {why} from character {start:,} on"
        )
    yield text[start:]


class Encoder:
    """Texts into token ids, however long they are."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        tokenizer.encode_special_tokens = True  # "<s>" in a text is three characters, not a token

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        short = _encoded(self.tokenizer, [text for text in texts if len(text) <= PIECE])
        return [self._long(text) if len(text) > PIECE else next(short) for text in texts]

    def _long(self, text: str) -> np.ndarray:
        may, rest = self._rule
        pieces = cut(text, may)
        tokens = list(_encoded(self.tokenizer, [next(pieces)]))
        while some := list(islice(pieces, TOGETHER)):
            tokens += _encoded(rest, some)
        return np.concatenate(tokens)

    @cached_property
    def _rule(self) -> tuple[May | None, Tokenizer]:
        """Where texts may be cut, and the tokenizer for all pieces but the first."""
        about = json.loads(self.tokenizer.to_str())
        normalizers, parted = _flat(about["normalizer"], "normalizers"), _flat(about["pre_tokenizer"], "pretokenizers")
        if any(not token["special"] for token in about["added_tokens"]):  # found in texts before all else
            return None, self.tokenizer
        if _parts_words(parted) and all(x["type"] == "NFC" for x in normalizers):
            return between_words, self.tokenizer
        if parted or not _merges_only(about["model"]) or not all(map(_plain_normalizer, normalizers)):
            return None, self.tokenizer
        left = [x for x in normalizers if x["type"] != "Prepend"]
        about["normalizer"] = {"type": "Sequence", "normalizers": left}
        rest = Tokenizer.from_str(json.dumps(about))
        rest.encode_special_tokens = True
        return _between_pieces(about["model"]["vocab"], spaces=bool(left)), rest


def _encoded(tokenizer: Tokenizer, texts: list[str]) -> Iterator[np.ndarray]:
    """Over all cores."""
    return (np.array(x.ids, np.uint32) for x in tokenizer.encode_batch_fast(texts, add_special_tokens=False))


def _flat(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [y for x in part[name] for y in _flat(x, name)] if part["type"] == "Sequence" else [part]


def _parts_words(parted: list[dict[str, Any]]) -> bool:
    if len(parted) == 1:
        kind = parted[0]["type"]
        return kind in ("Whitespace", "WhitespaceSplit") or (kind == "ByteLevel" and parted[0]["use_regex"])
    if len(parted) != 2 or [x["type"] for x in parted] != ["Split", "ByteLevel"]:
        return False
    split, level = parted
    known = split["pattern"].get("Regex") in PATTERNS and split["behavior"] == "Isolated" and not split["invert"]
    return known and not level["use_regex"] and not level["add_prefix_space"]


def _plain_normalizer(x: dict[str, Any]) -> bool:
    return x["type"] == "Prepend" or x == {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


def _merges_only(model: dict[str, Any]) -> bool:
    """BPE whose tokens are what merges make of characters."""
    others = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
    return model["type"] == "BPE" and not any(model.get(name) for name in others)


def _between_pieces(vocabulary: dict[str, int], spaces: bool) -> May:
    joined = {piece[i : i + 2] for piece in vocabulary for i in range(len(piece) - 1)}
    seen = {" ": SPACE} if spaces else {}

    def may(left: str, right: str) -> bool:
        left, right = seen.get(left, left), seen.get(right, right)
        # Characters without a piece of their own become bytes or an unknown token, which may join with another one.
        return left in vocabulary and right in vocabulary and left + right not in joined

    return may
