"""The language model: random small stacks, whose ways to read the same tokens must give the same numbers."""

import tempfile
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from qed import RULES, QEDConfig, QEDForCausalLM
from qed.model.cache import QEDCache
from qed.model.config import ATTENTION
from qed.model.decoding import stream

from .drawing import Draw, identical, refused, same

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
PAD = 0


def drawn_config(draw: Draw, *, recurrent: bool = False) -> QEDConfig:
    layers = draw.randint(1, 3)
    kinds = [*RULES, *(() if recurrent else ATTENTION)]
    head_dim = draw.choice((2, 4, 6))  # rotary embeddings need an even one
    return QEDConfig(
        vocab_size=draw.randint(5, 40),
        hidden_size=draw.choice((3, 8, 12)),
        num_hidden_layers=layers,
        num_heads=draw.randint(1, 3),
        head_dim=head_dim,
        expand_v=draw.choice((0.5, 1.0, 2.0)),
        intermediate_size=draw.choice((4, 9)),
        layer_types=[draw.choice(kinds) for _ in range(layers)],
        lambda_max=draw.choice((0.0, 0.25, 1.0)),
        theta_init=draw.choice((-2.0, 1.0)),
        conv_size=draw.randint(1, 5),
        read_scale=draw.choice((0.5, 1.0)),
        output_gate=draw.choice(("silu", "sigmoid", None)),
        output_gate_rank=draw.choice((None, 0, 3)),
        decay_rank=draw.choice((None, 3)),
        sliding_window=draw.randint(1, 6),
        tie_word_embeddings=draw.chance(0.5),
        eos_token_id=None,
        pad_token_id=PAD,
    )


def drawn_model(draw: Draw, *, recurrent: bool = False) -> QEDForCausalLM:
    """With weights large enough for every part to matter."""
    torch.manual_seed(draw.getrandbits(31))
    model = QEDForCausalLM(drawn_config(draw, recurrent=recurrent)).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.add_(0.3 * draw.normal(*x.shape, dtype=x.dtype))
            if name.endswith("dt_bias"):
                x.clamp_(max=1.0)
    return model.to(draw.choice((torch.float64, torch.float64, torch.float32)))


def _tokens(draw: Draw, model: QEDForCausalLM, batch: int, length: int) -> Tensor:
    return draw.integers(model.config.vocab_size, batch, length)


def _same(model: QEDForCausalLM, found: Tensor, truth: Tensor, what: str, roundings: float = 1.0) -> None:
    """`roundings`: how many times as sensitive to rounding it is as a logit."""
    same(found, truth, roundings * TOLERANCES[model.lm_head.weight.dtype], f"{what} of {model.config.layer_rules}")


def _rows(draw: Draw, model: QEDForCausalLM, width: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A padded batch, its mask and the rows without padding, which lies on the left, the right or anywhere."""
    batch, side = draw.randint(1, 3), draw.choice(("left", "right", "anywhere"))
    mask = draw.uniform(batch, width) < 0.6
    for row in mask:
        row[draw.randrange(width)] = True
    if side != "anywhere":
        mask = mask.sort(1, descending=side == "right").values
    ids = torch.where(mask, _tokens(draw, model, batch, width), draw.randrange(model.config.vocab_size))
    return ids, mask.to(draw.choice((torch.int64, torch.bool, torch.float32))), [ids[i][mask[i]] for i in range(batch)]


def padded_is_unpadded(draw: Draw) -> None:
    """Cold and warm, whole and in pieces of which some are a single column that is padding."""
    model = drawn_model(draw)
    width = draw.randint(1, 12)
    ids, mask, rows = _rows(draw, model, width)
    cache, found = QEDCache(), []
    pieces = [slice(0, width)] if draw.chance(0.4) else draw.pieces(width)
    whole_mask = draw.chance(0.5)  # of all columns so far, as `generate` has it, or of the piece's own
    for piece in pieces:
        part = mask[:, : piece.stop] if whole_mask else mask[:, piece]
        found.append(model(ids[:, piece], attention_mask=part, past_key_values=cache, use_cache=True).logits)
    logits = torch.cat(found, 1)
    for i, row in enumerate(rows):
        _same(model, logits[i][mask[i].bool()], model(row[None]).logits[0], f"row {i}, padded")


def packed_is_separate(draw: Draw) -> None:
    """By our offsets or by what collators send: outputs, the loss and a gradient."""
    model = drawn_model(draw)
    lengths = [draw.randint(1, 6) for _ in range(draw.randint(1, 4))]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    ids = _tokens(draw, model, 1, int(offsets[-1]))
    narrow = offsets.to(torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    owners = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    limits = {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    ways: dict[str, dict[str, Any]] = {
        "cu_seqlens": {"cu_seqlens": draw.choice((offsets, narrow))},
        "position_ids": {"position_ids": positions},
        "cu_seq_lens_q": {"cu_seq_lens_q": narrow, "cu_seq_lens_k": narrow} | limits,
        "everything": {"cu_seq_lens_q": narrow, "cu_seq_lens_k": narrow, "position_ids": positions} | limits,
        "seq_idx": {"seq_idx": owners.to(torch.int32), "position_ids": positions},
    }
    way = draw.choice(list(ways))
    found = model(ids, labels=ids, use_cache=False, **ways[way])
    total, count = torch.zeros((), dtype=found.logits.dtype), 0
    for start, end in pairwise(offsets.tolist()):
        alone = model(ids[:, start:end]).logits
        _same(model, found.logits[:, start:end], alone, f"tokens {start} to {end}, packed by {way},")
        targets = ids[0, start + 1 : end]
        total = total + torch.nn.functional.cross_entropy(alone[0, :-1], targets, reduction="sum")
        count += len(targets)
    if count:
        _same(model, found.loss, total / count, "loss")
        weight = model.model.layers[0].mlp_norm.weight
        truth, gradient = (torch.autograd.grad(x, weight)[0] for x in (total / count, found.loss))
        _same(model, gradient, truth, "gradient", roundings=20)


def pieces_are_one_prefill(draw: Draw) -> None:
    model = drawn_model(draw)
    ids = _tokens(draw, model, draw.randint(1, 2), draw.randint(2, 14))
    truth, cache, found = model(ids).logits, None, []
    for piece in draw.pieces(ids.shape[1]):
        output = model(ids[:, piece], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    _same(model, torch.cat(found, 1), truth, "pieces")
    assert cache.get_seq_length() == ids.shape[1]


def copies_and_reordered_caches(draw: Draw) -> None:
    """A copy goes on from where it was made; rows that are chosen, repeated or swapped take their states along."""
    model = drawn_model(draw)
    batch, length = draw.randint(1, 3), draw.randint(1, 6)
    ids, first, second = (_tokens(draw, model, batch, n) for n in (length, draw.randint(1, 4), draw.randint(1, 4)))
    cache = model(ids, use_cache=True).past_key_values
    copied = cache.copy()
    for more, state in ((first, cache), (second, copied)):
        found = model(more, past_key_values=state, use_cache=True).logits
        _same(model, found, model(torch.cat([ids, more], 1)).logits[:, length:], "after a copy")
    cache = model(ids, use_cache=True).past_key_values
    rows = draw.integers(batch, batch)
    how = draw.choice(("reorder", "select", "repeat"))
    if how == "repeat":
        cache.batch_repeat_interleave(2)
        rows = torch.arange(batch).repeat_interleave(2)
    elif how == "select":
        rows = rows[: draw.randint(1, batch)]
        cache.batch_select_indices(rows)
    else:
        cache.reorder_cache(rows)
    token = _tokens(draw, model, len(rows), 1)
    found = model(token, past_key_values=cache, use_cache=True).logits
    _same(model, found, model(torch.cat([ids[rows], token], 1)).logits[:, -1:], f"after {how}")


@torch.no_grad()
def _greedy(model: QEDForCausalLM, ids: Tensor, count: int) -> tuple[list[int], float]:
    """Everything computed anew for every token; with the least distance between the two likeliest."""
    margin = float("inf")
    for _ in range(count):
        logits = model(ids[None], use_cache=False).logits[0, -1]
        best = logits.topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        ids = torch.cat([ids, best.indices[:1]])
    return ids[-count:].tolist(), margin


def generated_is_recomputed(draw: Draw) -> None:
    """`generate` on a left-padded batch, and `stream`, choose what a model without cache and padding would."""
    model = drawn_model(draw)
    rows = [_tokens(draw, model, 1, draw.randint(1, 6))[0] for _ in range(draw.randint(1, 3))]
    width, count = max(map(len, rows)), draw.randint(1, 5)
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0), value=PAD) for row in rows])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (width - len(row), 0)) for row in rows])
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)[:, width:]
    streamed = torch.cat(list(stream(model, ids, attention_mask=mask, max_new_tokens=count)), 1)
    for i, row in enumerate(rows):
        expected, margin = _greedy(model, row, count)
        if margin > 1e-3:  # otherwise rounding may choose
            assert generated[i].tolist() == expected, f"generate, row {i} of {model.config.layer_rules}"
            assert streamed[i].tolist() == expected, f"stream, row {i} of {model.config.layer_rules}"


def beams_add_up(draw: Draw) -> None:
    """The score of a beam is its tokens' log-likelihood, read anew: states followed their beams."""
    model = drawn_model(draw)
    beams, count = draw.randint(2, 4), draw.randint(2, 5)
    ids = _tokens(draw, model, draw.randint(1, 2), draw.randint(1, 4))
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        num_beams=beams,
        do_sample=False,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    likelihoods = model(found.sequences, use_cache=False).logits.double().log_softmax(-1)
    chosen = likelihoods[:, :-1].gather(2, found.sequences[:, 1:, None])[:, ids.shape[1] - 1 :, 0].sum(1)
    same(found.sequences_scores.double(), chosen, 1e-4, f"scores of beams of {model.config.layer_rules}")


def interleaved_streams_are_apart(draw: Draw) -> None:
    model = drawn_model(draw, recurrent=draw.chance(0.8))
    batch, count = draw.randint(1, 2), draw.choice((4, 18, 34))
    prompts = [_tokens(draw, model, batch, draw.randint(1, 6)) for _ in range(2)]
    alone = [torch.cat(list(stream(model, ids, max_new_tokens=count)), 1) for ids in prompts]
    open_streams = [stream(model, ids, max_new_tokens=count) for ids in prompts]
    found: list[list[Tensor]] = [[], []]
    left = [0, 1]
    while left:
        i = draw.choice(left)
        part = next(open_streams[i], None)
        if part is None:
            left.remove(i)
        else:
            found[i].append(part)
    for i in (0, 1):
        identical(torch.cat(found[i], 1), alone[i], f"stream {i} beside another, {model.config.layer_rules}")


def saved_is_loaded(draw: Draw) -> None:
    model = drawn_model(draw, recurrent=draw.chance(0.5))
    ids = _tokens(draw, model, 1, 4)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        kind = draw.choice((QEDForCausalLM, AutoModelForCausalLM))
        loaded = kind.from_pretrained(folder, dtype=model.lm_head.weight.dtype).eval()
    for name, x in model.state_dict().items():
        identical(loaded.state_dict()[name].to(x.dtype), x, name)
    same(loaded(ids).logits, model(ids).logits, 1e-3, "a loaded model")  # decays are loaded in float32


def outputs_as_asked(draw: Draw) -> None:
    """Hidden states, tuples, single positions, and a loss over the items of several batches."""
    model = drawn_model(draw)
    ids = _tokens(draw, model, draw.randint(1, 2), draw.randint(2, 6))
    plain = model(ids, labels=ids)
    found = model(ids, output_hidden_states=True)
    assert len(found.hidden_states) == model.config.num_hidden_layers + 1
    _same(model, model.lm_head(found.hidden_states[-1]), plain.logits, "the last hidden state")
    as_tuple = model(ids, labels=ids, return_dict=False)
    assert isinstance(as_tuple, tuple)
    _same(model, as_tuple[0], plain.loss, "the loss in a tuple")
    _same(model, as_tuple[1], plain.logits, "logits in a tuple")
    kept = draw.randint(1, ids.shape[1])
    _same(model, model(ids, logits_to_keep=kept).logits, plain.logits[:, -kept:], "kept logits")
    items = draw.randint(1, 50)
    summed = plain.loss * (ids[:, 1:].numel())
    _same(model, model(ids, labels=ids, num_items_in_batch=items).loss, summed / items, "loss of items")


LAWS = (
    padded_is_unpadded,
    padded_is_unpadded,
    packed_is_separate,
    packed_is_separate,
    pieces_are_one_prefill,
    copies_and_reordered_caches,
    generated_is_recomputed,
    beams_add_up,
    interleaved_streams_are_apart,
    saved_is_loaded,
    outputs_as_asked,
)


def readings(seed: int) -> None:
    """Padding, packing, pieces, caches, generation, beams, streams and files: the same numbers every way."""
    draw = Draw("readings", seed)
    law = draw.choice(LAWS)
    try:
        law(draw)
    except AssertionError as error:
        raise AssertionError(f"{law.__name__}: {error}") from error


def hostile_calls(seed: int) -> None:
    """Arguments that cannot be meant are refused by name, before a wrong number comes out."""
    draw = Draw("hostile_calls", seed)
    model = drawn_model(draw)
    batch, length = draw.randint(2, 3), draw.randint(2, 5)
    ids = _tokens(draw, model, batch, length)
    mask, warm = torch.ones_like(ids), model(ids, use_cache=True).past_key_values
    offsets = torch.tensor([0, length])
    calls: dict[str, dict[str, Any]] = {
        "attention_masks": {"attention_masks": mask},
        "labls": {"labls": ids},
        "output_attentions": {"output_attentions": True},
        "input_ids": {"input_ids": None},
        "inputs_embeds": {"inputs_embeds": torch.zeros(batch, length, model.config.hidden_size)},
        "attention_mask": {
            "attention_mask": draw.choice((mask[:, 1:], mask[:1], mask[None], mask[..., None, None], mask.repeat(1, 3)))
        },
        "past_key_values": {"past_key_values": draw.choice(((), [], {}, ((1, 2),), "cache"))},
        "cu_seqlens": {"cu_seqlens": offsets} | draw.choice(({}, {"attention_mask": mask}, {"past_key_values": warm})),
        "logits_to_keep": {"logits_to_keep": 1, "labels": ids},
        "label": {"labels": draw.choice((ids[:, 1:], ids[:1], ids[0]))},
    }
    name = draw.choice(list(calls))
    kinds = (
        (TypeError,)
        if name in ("attention_masks", "labls")
        else (ValueError, TypeError, RuntimeError, NotImplementedError)
    )
    refused(lambda: model(**({"input_ids": ids} | calls[name])), name, kinds=kinds)


def hostile_configs(seed: int) -> None:
    """A field that is misspelt, of another type or beyond its range is refused by its name."""
    draw = Draw("hostile_configs", seed)
    good = drawn_config(draw).to_dict()
    sizes = (
        "vocab_size",
        "hidden_size",
        "num_heads",
        "head_dim",
        "intermediate_size",
        "conv_size",
        "num_hidden_layers",
    )
    kind = draw.choice(("misspelt", "size", "rule", "gate", "layers", "expand_v", "format", "number"))
    fields = {name: good[name] for name in ("vocab_size", "hidden_size", "num_heads", "head_dim", "layer_types")}
    fields |= {"num_hidden_layers": good["num_hidden_layers"], "intermediate_size": 4}
    name = {"rule": "rule", "gate": "output_gate", "layers": "layer_types", "expand_v": "expand_v"}.get(kind, "")
    value: Any = draw.choice(("", "QED", "softmax", 3))
    if kind == "misspelt":
        known = draw.choice(("lambda_max", "hidden_size", "theta_init", "sliding_window", "norm_eps", "conv_size"))
        at = draw.randrange(1, len(known))
        name, value = known[:at] + known[at + 1 :], good[known]  # one letter is missing
    elif kind == "size":
        name, value = draw.choice(sizes), draw.choice((0, -1, 1.5, "8", None, True, [8]))
    elif kind == "layers":
        value = draw.choice(
            ([], ["qed"] * (good["num_hidden_layers"] + 1), ["nothing"] * good["num_hidden_layers"], "qed")
        )
    elif kind == "expand_v":
        value = draw.choice((0, -1.0, 1 / 7, "1", float("nan"), float("inf")))
    elif kind == "format":
        name, value = "format_version", draw.choice((0, 2, "1", None))
    elif kind == "number":
        name, value = draw.choice(("lambda_max", "norm_eps", "rope_theta", "theta_init")), draw.choice(("x", None, [1]))
    anything = (Exception,)  # transformers' strict data classes have error types of their own
    refused(lambda: QEDConfig(**(fields | {name: value})), name, kinds=anything)
