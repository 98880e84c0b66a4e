"""The arguments that callers of transformers' models pass to `forward`, and what they mean here.

Collators that pack documents without padding say in up to four ways where each document begins: offsets (`cu_seqlens`,
or `cu_seq_lens_q` and `cu_seq_lens_k`), the document that each token belongs to (`seq_idx`), and positions that start
again (`position_ids`). All of them are turned into offsets, and must agree.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..choices import nearest
from .cache import QEDCache
from .config import QEDConfig


@lru_cache
def _names(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [x.name for x in parameters if x.kind is not inspect.Parameter.VAR_KEYWORD and x.name != "self"]


def refuse_unknown(function: Callable[..., Any], given: dict[str, Any]) -> None:
    """Raise TypeError if something was given that `function` does not take."""
    for name in given:
        known = nearest(name, _names(function))
        raise TypeError(f"forward() got an unexpected argument {name!r}; the nearest one it takes is {known!r}")


def wants_hidden_states(config: QEDConfig, output_hidden_states: bool | None, output_attentions: bool | None) -> bool:
    """Return whether a call asks for all hidden states. Attention weights, which there are none of, are refused.

    Args:
        config: the model's configuration, which decides what the call leaves open.
        output_hidden_states, output_attentions: the call's arguments; None leaves the choice open.
    """
    if config.output_attentions if output_attentions is None else output_attentions:
        raise ValueError("output_attentions: a recurrent layer has no attention weights; expected False, got True")
    wanted = config.output_hidden_states if output_hidden_states is None else output_hidden_states
    if not isinstance(wanted, bool | None):
        raise ValueError(f"output_hidden_states: expected True for all layers, or False, got {wanted!r}")
    return bool(wanted)


def given_inputs(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Return the tokens [B, T] or the embeddings [B, T, hidden], whichever a call gives."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("input_ids, inputs_embeds: expected exactly one of them")
    name, expected, x = "input_ids", "[B, T]", input_ids
    if x is None:
        name, expected, x = "inputs_embeds", "[B, T, hidden]", inputs_embeds
    assert x is not None
    if x.dim() != (2 if name == "input_ids" else 3):
        raise ValueError(f"{name}: expected shape {expected}, got {list(x.shape)}")
    if name == "input_ids" and x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"input_ids: expected whole numbers of 32 or 64 bits, got {x.dtype}")
    return x


def mask_of(x: Tensor, mask: Tensor, cache: QEDCache | None) -> Tensor:
    """Return the part of a mask that is about the tokens of a call.

    Args:
        x: the tokens or embeddings of the call, [B, T, …].
        mask: [B, T], or [B, before + T] with the tokens that the cache has read.
        cache: the states after the tokens before, or None.
    """
    before = 0 if cache is None else cache.tokens
    if mask.dim() != 2 or mask.shape[0] != x.shape[0] or mask.shape[1] not in (x.shape[1], before + x.shape[1]):
        expected = f"[{x.shape[0]}, {before + x.shape[1]}]"
        raise ValueError(f"attention_mask: expected shape {expected}, got {list(mask.shape)}")
    return mask[:, mask.shape[1] - x.shape[1] :]


def offsets(
    batch: int,
    tokens: int,
    *,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    seq_idx: Tensor | None = None,
    position_ids: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    continues: bool = False,
) -> Tensor | None:
    """Return the offsets [N + 1] of the sequences packed in one row of tokens; None where every row is one sequence.

    Offsets are taken as they are, without waiting for a GPU. If there is only `seq_idx` or `position_ids`, the host has
    to read it to know how many sequences there are, and waits once for the GPU. If a call says the same thing in
    several ways, these are compared: on a GPU by an assertion on the device, for which the host does not wait.

    Args:
        batch, tokens: shape of the tokens.
        cu_seqlens, cu_seq_lens_q, cu_seq_lens_k: offsets [N + 1].
        seq_idx: [B, T], [1, T] or [T], the number of the document that each token belongs to.
        position_ids: [B, T], [1, T] or [T]. They say where sequences begin only if there is neither a mask nor a cache
            (`continues`); with one of these they are the positions of one sequence's tokens.
        max_length_q, max_length_k: length of the longest sequence, which is checked on a CPU and not used otherwise.
        continues: whether there is an attention mask or a cache.
    """
    said = {"cu_seqlens": cu_seqlens, "cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
    given = {name: x for name, x in said.items() if x is not None}
    said = {"seq_idx": seq_idx, "position_ids": None if continues else position_ids}
    rows = {name: _expanded(name, x, batch, tokens) for name, x in said.items() if x is not None}
    for name in (*given, *rows):
        if continues:
            raise ValueError(f"{name}: packed sequences go with neither an attention_mask nor a cache")
        if batch != 1 and name in given:
            raise ValueError(f"{name}: packed sequences need batch size 1, got {batch}")
    for name, x in given.items():
        _check_offsets(name, x, tokens)
    starts = {name: _starts_of_rows(name, x, waits=not given) for name, x in rows.items()}
    if len(given) + len(rows) > 1:
        _agree({name: _starts_of_offsets(x, tokens) for name, x in given.items()} | starts, waits=not given)
    for x in given.values():
        _check_longest(x, max_length_q=max_length_q, max_length_k=max_length_k)
        return x.to(torch.int64)
    for name, begins in starts.items():
        return _offsets_of(name, begins)
    return None


def _expanded(name: str, x: Tensor, batch: int, tokens: int) -> Tensor:
    """Return `x`, which is [B, T], [1, T] or [T], as [B, T]."""
    shape = list(x.shape)
    x = x[None] if x.dim() == 1 else x
    if x.dim() != 2 or x.shape[1] != tokens or x.shape[0] not in (1, batch):
        raise ValueError(f"{name}: expected shape [{batch}, {tokens}], got {shape}")
    return x.expand(batch, tokens)


def _starts_of_offsets(x: Tensor, tokens: int) -> Tensor:
    """Return where a sequence begins, [1, T]. Empty sequences begin nowhere, and the last offset is the end."""
    begins = torch.zeros(1, tokens + 1, dtype=torch.bool, device=x.device)
    return begins.index_fill_(1, x.to(torch.int64).clamp(0, tokens), True)[:, :tokens]


def _starts_of_rows(name: str, x: Tensor, *, waits: bool) -> Tensor:
    """Return where a sequence begins, [B, T]: where the index changes, or where a position is not one more than the one
    before."""
    begins = torch.ones(x.shape, dtype=torch.bool, device=x.device)
    begins[:, 1:] = x.diff(dim=1) != (1 if name == "position_ids" else 0)
    if name == "position_ids":
        message = "position_ids: expected positions that go on by one or begin again where the first one began"
        _hold(~(begins & (x != x[:, :1])).any(), message, waits)
    return begins


def _agree(starts: dict[str, Tensor], *, waits: bool) -> None:
    first, *others = starts
    for name in others:
        same = (starts[name] == starts[first]).all()
        _hold(same, f"{name}: expected the same sequences as {first} says, got others", waits)


def _check_offsets(name: str, x: Tensor, tokens: int) -> None:
    if x.dim() != 1 or x.shape[0] < 2 or x.dtype not in (torch.int32, torch.int64):
        expected = "whole numbers [N + 1], the offsets of N sequences"
        raise ValueError(f"{name}: expected {expected}, got shape {list(x.shape)} of {x.dtype}")
    right = (x[0] == 0) & (x[-1] == tokens) & (x.diff() >= 0).all()
    message = f"{name}: expected offsets that start at 0, never decrease and end at T = {tokens}"
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        message += f", got {x.tolist()}"
    _hold(right, message, waits=False)


def _check_longest(offsets: Tensor, **limits: int | None) -> None:
    for name, most in limits.items():
        if isinstance(most, int) and offsets.device.type == "cpu" and bool((offsets.diff() > most).any()):
            raise ValueError(f"{name}: expected at least the longest sequence, {int(offsets.diff().max())}, got {most}")


def _hold(condition: Tensor, message: str, waits: bool) -> None:
    """Raise ValueError unless the condition holds. If the host must not wait for the GPU, or the program is compiled
    and cannot look, the device asserts the condition instead."""
    if (condition.device.type != "cpu" or torch.compiler.is_compiling()) and not waits:
        torch._assert_async(condition, message)
    elif not bool(condition):
        raise ValueError(message)


def _offsets_of(name: str, begins: Tensor) -> Tensor | None:
    """Return the offsets of the sequences that begin at `begins` [B, T]; None if every row is one. The host waits for
    the device, because it has to know how many there are."""
    batch, tokens = begins.shape
    if not bool(begins[:, 1:].any()):
        return None
    if batch != 1:
        raise ValueError(f"{name}: packed sequences need batch size 1, got {batch}; put them behind one another")
    first = begins[0].nonzero().flatten()
    return torch.cat([first, first.new_full((1,), tokens)])
