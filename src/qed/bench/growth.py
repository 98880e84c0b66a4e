"""`qed bench growth`: how the cost of training, prefill and decoding grows with the length of a text.

QED stands beside the same stack with softmax attention (flash attention, through torch's) and, if asked, beside
flash-linear-attention's GDN-2. A training step has always as many tokens, in ever fewer and longer rows; every block is
recomputed in the backward pass, so that a row of 128K tokens fits. Prefill and decoding have one sequence.

Nothing is timed before it is right: losses and logits must be those of a plain pass. Then every *cell*, which is a
work, a model and a length, is measured by itself, because two models of this length do not fit side by side. Each is
written at once, and a run with the same settings goes on where the file ends.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..files import write_bytes, write_text
from ..model.causal_lm import QEDForCausalLM
from ..model.config import QEDConfig
from ..model.decoding import Decoder
from ..model.sampling import Chooser
from ..testing import relative_error
from ..train.step import TrainingStep
from . import model as inference
from . import train as training
from .growth_figure import MODELS, WORKS, figure, table
from .measuring import Bench, GateError, Report, milliseconds
from .softmax import SoftmaxStep

DECODED = {"qed": 64, "softmax": 64, "fla": 8}  # tokens in a row that are timed together
Cell = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What is measured: models of one size, lengths in tokens, and how."""

    size: dict[str, Any]  # arguments of QEDConfig
    lengths: tuple[int, ...]
    rounds: int
    compiled: bool

    def __post_init__(self) -> None:
        uneven = [n for n in self.lengths if self.tokens % n]
        if uneven or len(set(self.lengths)) < len(self.lengths):
            raise ValueError(f"--lengths: expected different divisors of the longest one, got {list(self.lengths)}")

    @property
    def tokens(self) -> int:
        """The tokens of a training step: one row of the longest length."""
        return max(self.lengths)

    def config(self, model: str) -> QEDConfig:
        """Return the configuration of "qed" or of "softmax"; fla's model is made from that of QED."""
        return training.transformer(self.size) if model == "softmax" else QEDConfig(**self.size)


def measure(bench: Bench, growth: Growth) -> Report:
    """Measure all cells that the file does not have yet, print and write them with a table and a figure; GateError if
    something is not right."""
    report = _begun(bench, growth)
    cells: dict[str, dict[str, dict[str, Cell]]] = report["cells"]
    missing = [(work, model, n) for work, model, n in _wanted(bench, growth) if str(n) not in cells[work][model]]
    if missing:
        _gates(bench, growth, report)
    for work, model, length in missing:
        cells[work][model][str(length)] = cell = _cell(bench, growth, work, model, length)
        report.add(cells=cells)
        said = ", ".join(f"{name} {x:,.4g}" if isinstance(x, float) else f"{name}: {x}" for name, x in cell.items())
        bench.console.print(f"{work}, {MODELS[model]}, {length}: {said}", markup=False, soft_wrap=True)
    _show(bench, report)
    return report


def _wanted(bench: Bench, growth: Growth) -> Iterator[tuple[str, str, int]]:
    """Yield the cells in their order: what takes least time first, and fla's last, which tunes its kernels."""
    for models in (("qed", "softmax"), ("fla",) if bench.fla else ()):
        for work in ("decoding", "prefill", "training"):
            for length in growth.lengths:
                for model in models:
                    yield work, model, length


def _begun(bench: Bench, growth: Growth) -> Report:
    """Return the report to add to: that of the file, if it has the same settings and comes from such a machine."""
    settings = {"size": growth.size, "lengths": list(growth.lengths), "compiled": growth.compiled}
    settings |= {"training_tokens": growth.tokens, "rounds": growth.rounds}
    report = bench.report(settings=settings, cells={work: {model: {} for model in MODELS} for work in _MEASURES})
    if bench.out is None or not bench.out.exists():
        return report
    try:
        before = json.loads(bench.out.read_text())
        same, cells = before["settings"] == settings, before["cells"]
        complete = all(str(n) in cells[work][model] for work, model, n in _wanted(bench, growth))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--out: expected a new file or one of `qed bench growth`, got {bench.out}") from error
    if not same:
        raise ValueError(f"--out: expected a new file or one with these settings, got {bench.out}, with other ones")
    if not complete and before["environment"] != report["environment"]:
        raise ValueError(f"--out: expected a new file or one from this machine and package, got {bench.out}")
    report |= before
    return report


def _gates(bench: Bench, growth: Growth, report: Report) -> None:
    """Compare losses and logits with plain passes; raise GateError if one is too far away."""
    dtype = torch.bfloat16 if bench.on_gpu else torch.float32
    errors = {"training": training.gate(growth.config("qed"), bench.device, growth.compiled)}
    errors |= inference.gate(growth.config("qed"), bench.device, dtype, compiled=False)
    errors["softmax decoding"] = _softmax_error(growth.config("softmax"), bench.device, dtype)
    report.add(errors=errors)
    bars = {name: training.LOSS_BAR if name == "training" else inference.LOGITS_BAR for name in errors}
    over = {name: x for name, x in errors.items() if not x <= bars[name]}
    if over:
        raise GateError(f"correctness gate: further from a plain float32 pass than allowed: {over}")


@torch.no_grad()
def _softmax_error(config: QEDConfig, device: str, dtype: torch.dtype) -> float:
    """Return the relative error of the logits of the Transformer's captured step."""
    ids = torch.randint(3, config.vocab_size, (1, 65), generator=torch.Generator().manual_seed(0)).to(device)
    model = inference.make(config, device, dtype)
    truth = inference.make(config, device, dtype).float()(ids).logits[:, -1]
    step = SoftmaxStep(model, model(ids[:, :-1], use_cache=True).past_key_values)
    step.tokens.copy_(ids[:, -1:])
    step()
    step()  # captured, on a GPU
    return relative_error(step.logits, truth)


def _cell(bench: Bench, growth: Growth, work: str, model: str, length: int) -> Cell:
    """Measure a cell, or say why it could not be."""
    try:
        measured: Cell = _MEASURES[work](bench, growth, model, length)
    except torch.OutOfMemoryError:
        measured = {"skipped": "it needs more memory than this GPU has"}
    if bench.on_gpu:
        gc.collect()  # graphs and compiled programs hold memory in cycles
        torch.cuda.empty_cache()
    return measured


def _training(bench: Bench, growth: Growth, model: str, length: int) -> Cell:
    torch.compiler.reset()  # so that a length is compiled for as `qed train` would, and not for all lengths
    rows = growth.tokens // length
    before = torch.cuda.memory_allocated() if bench.on_gpu else 0
    step = _step(bench, growth, model)
    step.rows = torch.randint(3, growth.config(model).vocab_size, (rows, length + 1), device=bench.device)
    cell: Cell = training.first_steps(bench, step, before)
    median = bench.take_turns({model: step}, growth.rounds, warm_up=0)[model]["median"]
    return {"tokens_per_s": rows * length / median * 1e3, "step_ms": median} | cell


def _step(bench: Bench, growth: Growth, model: str) -> TrainingStep:
    if model == "fla":
        step = training.fla_step(growth.config(model), bench.device)
        step.model.gradient_checkpointing_enable()
        return step
    return training.qed_step(growth.config(model), bench.device, growth.compiled, recompute="full")


def _prefill(bench: Bench, growth: Growth, model: str, length: int) -> Cell:
    made, ids = _model(bench, growth, model), _ids(bench, growth, length)
    times = bench.take_turns({model: partial(inference.prefill, made, ids)}, growth.rounds)[model]
    return {"us_per_token": times["median"] * 1e3 / length, "prefill_ms": times["median"]}


@torch.no_grad()
def _decoding(bench: Bench, growth: Growth, model: str, length: int) -> Cell:
    made, ids = _model(bench, growth, model), _ids(bench, growth, length)
    cache = made(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
    step, count = _decoding_step(bench, model, made, cache), DECODED[model]

    def steps() -> None:
        for _ in range(count):
            step()

    steps()
    times = sorted(milliseconds(bench.device, steps) for _ in range(growth.rounds))
    return {"ms_per_token": times[len(times) // 2] / count}


def _decoding_step(bench: Bench, model: str, made: Any, cache: Any) -> Callable[[], object]:
    """Return one token of decoding after the tokens of a cache."""
    if model == "softmax":
        return SoftmaxStep(made, cache)
    token = torch.full((1, 1), 3, device=bench.device)
    if model == "qed":
        return partial(Decoder(made, 1).follow, cache, token, Chooser(), 1)
    return partial(made, input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)


def _model(bench: Bench, growth: Growth, model: str) -> Any:
    dtype = torch.bfloat16 if bench.on_gpu else torch.float32
    make: Callable[..., QEDForCausalLM] = inference.fla_model if model == "fla" else inference.make
    return make(growth.config(model), bench.device, dtype)


def _ids(bench: Bench, growth: Growth, length: int) -> Tensor:
    return torch.randint(3, growth.config("qed").vocab_size, (1, length), device=bench.device)


_MEASURES = {"training": _training, "prefill": _prefill, "decoding": _decoding}


def _show(bench: Bench, report: Report) -> None:
    """Print the cells, and write them as a table and a figure beside the report."""
    for work, (_, unit, _) in WORKS.items():
        shown = Table("tokens", *MODELS.values(), title=unit)
        for name, row in table(report, work):
            shown.add_row(name, *row)
        bench.console.print(shown)
    if bench.out is not None:
        report.add()
        write_text(bench.out.with_suffix(".md"), "\n".join(_markdown(report)) + "\n")
        try:
            write_bytes(bench.out.with_suffix(".svg"), figure(report))
        except ModuleNotFoundError as error:  # a machine with a GPU may have little else
            bench.console.print(f"no figure: {error}; run the same command where it is installed, with this file")
    bench.say_written()


def _markdown(report: Report) -> Iterator[str]:
    for i, (work, (_, unit, _)) in enumerate(WORKS.items()):
        yield from ([""] if i else [])
        yield from (f"| {unit} | {' | '.join(MODELS.values())} |", "|---|" + "---|" * len(MODELS))
        yield from (f"| {name} | {' | '.join(row)} |" for name, row in table(report, work))
