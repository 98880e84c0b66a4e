"""How likely texts are to a model: many at a time, without padding, and what several texts begin with is read once.

Each of a question's four answers is a text, and the question is most of it. Such texts form a group: the model reads
what they share, keeps the state, and continues from it with the rest of each. Texts on their own are packed into one
row. Logits are made only where a token is scored.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..model.cache import QEDCache
from ..model.causal_lm import QEDForCausalLM
from .answers import PIECE_TOKENS, read

LEAST_SHARED = 8  # tokens; reading fewer of them once is not worth a second call of the model
LOGITS = {"cpu": 2**23, "cuda": 2**27}  # numbers that are made at once: on a CPU they should stay near


class Text(NamedTuple):
    """Tokens, and the first of them that is scored: 1 or more, since nothing predicts a text's first token."""

    ids: list[int]
    first: int


class Scores(NamedTuple):
    """Of every scored token of a text the logarithm of its probability, and whether it is the likeliest."""

    log_probability: Tensor  # [tokens], float32, on the CPU
    likeliest: Tensor  # [tokens], bool, on the CPU


Found = Iterator[tuple[int, Scores]]  # the number of a text, and its scores


class Group(NamedTuple):
    """Texts that begin with the same tokens."""

    shared: int  # how many tokens are read once; 0 for a text on its own
    members: list[int]


@torch.no_grad()
def scores(model: QEDForCausalLM, texts: Sequence[Text], *, batch: int, wanted: Container[int] | None = None) -> Found:
    """Yield the number of every text with its scores, batch by batch in an order of their lengths.

    Args:
        model: which predicts.
        texts: of at least two tokens each.
        batch: how many groups of texts are read at a time; texts on their own are limited by their tokens alone.
        wanted: numbers of the texts whose scores are still missing; None for all. Batches are the same whatever is
            missing, so that a run that is resumed gives the same numbers as one that was not interrupted.
    """
    wanted = range(len(texts)) if wanted is None else wanted
    for text in texts:
        if not 0 < text.first < len(text.ids):
            raise ValueError(f"first: expected 1 to {len(text.ids) - 1}, a token of the text, got {text.first}")
    found = groups(texts, most=batch)
    alone = sorted((x.members[0] for x in found if not x.shared), key=lambda i: (-len(texts[i].ids), i))
    for some in _filled(alone, [len(texts[i].ids) for i in alone]):
        if any(i in wanted for i in some):
            packed = zip(some, _packed(model, [texts[i] for i in some]), strict=True)
            yield from (x for x in packed if x[0] in wanted)
    together = sorted((x for x in found if x.shared), key=lambda x: (-x.shared, x.members))
    for start in range(0, len(together), batch):
        some_groups = together[start : start + batch]
        members = [i for x in some_groups for i in x.members]
        if any(i in wanted for i in members):
            yield from (x for x in _continued(model, texts, some_groups, batch) if x[0] in wanted)


def groups(texts: Sequence[Text], most: int) -> list[Group]:
    """The texts, at most so many together, grouped where more than half of what stands before their scored tokens is
    the same."""
    found: list[Group] = []
    for i in sorted(range(len(texts)), key=lambda i: texts[i].ids):
        room = texts[i].first - 1  # the token before the first scored one is read with the rest, where logits are made
        if found:
            last = found[-1]
            shared = _common(texts[last.members[0]].ids, texts[i].ids, min(room, last.shared))
            if shared >= LEAST_SHARED and 2 * shared > max(room, last.shared) and len(last.members) < most:
                last.members.append(i)
                found[-1] = Group(shared, last.members)
                continue
        found.append(Group(room, [i]))
    return [x if len(x.members) > 1 else Group(0, x.members) for x in found]


def _common(a: list[int], b: list[int], most: int) -> int:
    """How many tokens two texts begin with alike, up to `most`."""
    if a[:most] == b[:most]:
        return most
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def _filled(items: list[int], sizes: list[int]) -> Iterator[list[int]]:
    """The items in batches of at most PIECE_TOKENS tokens, or of one item that is larger."""
    batch: list[int] = []
    room = PIECE_TOKENS
    for item, size in zip(items, sizes, strict=True):
        if batch and size > room:
            yield batch
            batch, room = [], PIECE_TOKENS
        batch.append(item)
        room -= size
    if batch:
        yield batch


def _packed(model: QEDForCausalLM, texts: list[Text]) -> list[Scores]:
    """Scores of texts in one row; of one long text, piece by piece."""
    if len(texts) == 1:
        return [_piecewise(model, texts[0])]
    sizes = [len(x.ids) - 1 for x in texts]
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    ids = torch.tensor([[token for x in texts for token in x.ids[:-1]]], device=model.device)
    packed = offsets.to(model.device, torch.int32)
    hidden = model.model(ids, cu_seqlens=packed, use_cache=False).last_hidden_state[0]
    places = [torch.arange(x.first - 1, n) + start for x, n, start in zip(texts, sizes, offsets[:-1], strict=True)]
    return _scores(model, hidden, texts, places)


def _piecewise(model: QEDForCausalLM, text: Text) -> Scores:
    """Scores of one text, of which the model reads PIECE_TOKENS tokens at once."""
    cache, pieces = QEDCache(), []
    for start in range(0, len(text.ids) - 1, PIECE_TOKENS):
        ids = text.ids[start : start + PIECE_TOKENS + 1]
        given = torch.tensor([ids[:-1]], device=model.device)
        hidden = model.model(given, past_key_values=cache, use_cache=True).last_hidden_state[0]
        first = max(text.first - start, 1)
        if first < len(ids):
            pieces += _scores(model, hidden, [Text(ids, first)], [torch.arange(first - 1, len(ids) - 1)])
    return Scores(*(torch.cat(x) for x in zip(*pieces, strict=True)))


def _continued(model: QEDForCausalLM, texts: Sequence[Text], some: list[Group], batch: int) -> Found:
    """Scores of the texts of groups: what each group shares is read once, then the rest of every text, those of about
    the same length together."""
    _, cache = read(model, [texts[x.members[0]].ids[: x.shared] for x in some])
    rests = [
        (i, number, Text(texts[i].ids[x.shared :], texts[i].first - x.shared))
        for number, x in enumerate(some)
        for i in x.members
    ]
    rests.sort(key=lambda x: (len(x[2].ids), x[0]))
    for start in range(0, len(rests), batch):
        numbers, rows, parts = zip(*rests[start : start + batch], strict=True)
        continued = cache.copy()
        continued.batch_select_indices(torch.tensor(rows))
        yield from zip(numbers, _rests(model, list(parts), continued), strict=True)


def _rests(model: QEDForCausalLM, texts: list[Text], cache: QEDCache) -> list[Scores]:
    """Scores of texts that continue from the states of a cache."""
    width = max(len(x.ids) for x in texts) - 1
    ids, there = (torch.zeros(len(texts), width, dtype=torch.long) for _ in range(2))
    for row, text in enumerate(texts):
        ids[row, : len(text.ids) - 1] = torch.tensor(text.ids[:-1])
        there[row, : len(text.ids) - 1] = 1
    mask = None if bool(there.all()) else there.to(model.device)
    said = model.model(ids.to(model.device), attention_mask=mask, past_key_values=cache, use_cache=False)
    places = [torch.arange(x.first - 1, len(x.ids) - 1) + row * width for row, x in enumerate(texts)]
    return _scores(model, said.last_hidden_state.flatten(0, 1), texts, places)


def _scores(model: QEDForCausalLM, hidden: Tensor, texts: list[Text], places: list[Tensor]) -> list[Scores]:
    """Scores of texts, whose scored tokens are predicted from rows of `hidden` [tokens, width] at `places`."""
    wanted = torch.tensor([token for x in texts for token in x.ids[x.first :]], device=hidden.device)
    chosen = hidden[torch.cat(places).to(hidden.device)]
    parts, likeliest = [], []
    step = max(1, LOGITS.get(hidden.device.type, LOGITS["cpu"]) // model.config.vocab_size)
    for some, targets in zip(chosen.split(step), wanted.split(step), strict=True):
        logits = model.lm_head(some).float()
        parts.append(logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1))
        likeliest.append(logits.argmax(1) == targets)
    sizes = [len(x.ids) - x.first for x in texts]
    split = (torch.cat(x).cpu().split(sizes) for x in (parts, likeliest))
    return [Scores(*x) for x in zip(*split, strict=True)]
