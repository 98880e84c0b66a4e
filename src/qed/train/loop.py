"""The loop: batches, gradients, steps, checkpoints. A run is a function of its configuration; killed, it resumes.

The global batch of a step is cut into pieces that fit into memory; their gradients add up, and the loss is the mean
over the whole batch. The last checkpoint has all that decides the next step: weights, the optimiser's state, the number
of the step. Nothing else has a state: data and learning rate are functions of the step.
"""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import files, locks
from ..data import Loader, ReadAhead
from ..data.generated import given_and_wanted
from ..model.causal_lm import QEDForCausalLM, compile_blocks
from ..ops import value_checks
from ..provenance import check_imported, occasion, provenance
from . import checkpoints, optimizers
from .captured import Captured
from .config import CHANGEABLE_ON_RESUME, TrainConfig
from .display import Display
from .exporting import write_model
from .inputs import open_inputs, validation_blocks
from .loggers import LoggedRun, Loggers
from .metrics import strengths, utilisation
from .objective import SummedLoss
from .parallel import Parallel
from .probes import ranges
from .schedule import learning_rate
from .step import recompute_in_backward

STOPPED = 75  # exit status of a run that was asked to stop and can be resumed


class Diverged(RuntimeError):  # noqa: N818
    """Too many steps in a row without a finite gradient."""


class StepResult(NamedTuple):
    """What is known after an optimiser step."""

    loss: float
    norm: float  # of the gradient, before clipping
    finite: bool  # whether loss and norm are; if not, the weights were left as they are
    strength: dict[str, float]  # mean λ of every layer that has one, before the step


Watch = Callable[[QEDForCausalLM], dict[str, float]]  # measures a model in training; what it returns is logged


class Trainer:
    """A run in its folder: made anew, or resumed from the folder's last checkpoint."""

    def __init__(
        self,
        config: TrainConfig,
        out: Path,
        device: str,
        console: Console,
        watch: Watch | None = None,
        lines: bool = False,
    ):
        """
        Args:
            config: the run; a folder that holds a run with other numbers is refused.
            out: the run's folder.
            device: "cpu" or "cuda".
            console: where progress is reported, by the first process.
            watch: called with the model whenever the run is validated.
            lines: print a line per step on a terminal too, instead of a bar.
        """
        self.loggers = Loggers(config.loggers)
        self.parallel = Parallel(config.parallel, device, config.context)
        self.config, self.out, self.device = config, out, self.parallel.device
        self.display = Display(console if self.parallel.first else Console(quiet=True), config, lines=lines)
        self.watch, self.stopping = watch, False
        self.lock: locks.Lock | None = None
        self.inputs = open_inputs(config)
        self.loader = Loader(
            self.inputs.training,
            tokens=config.sequence,
            batch=config.batch,
            seed=config.seed,
            rank=self.parallel.batch_rank,
            world=self.parallel.batch_world,
        )
        self.batches = ReadAhead(self.loader, self.device)
        torch.manual_seed(config.seed)
        self.model = QEDForCausalLM(config.model_config()).to(self.device).train()
        recompute_in_backward(self.model, config.activation_checkpointing)
        self.loss = self.parallel.wrap(SummedLoss(self.model))
        self.optimizers = optimizers.make(self.model, config)
        self.step, self.skipped = 0, 0
        self.validation_loss: float | None = None
        self._remember()
        self._resume()
        self.parallel.prepare_gradients(self.loss)
        self.captured: Captured | None = None
        if config.compile:
            compile_blocks(self.model)
            if self.device.startswith("cuda") and self.parallel.can_be_captured:
                self.captured = Captured()

    def _remember(self) -> None:
        """Write config.json once, by the first process. A folder that holds another run is refused."""
        self.parallel.barrier()
        self.out.mkdir(parents=True, exist_ok=True)
        file = self.out / "config.json"
        before = files.read_json(file) if file.exists() else None
        self.parallel.barrier()
        now = json.loads(self.config.to_json())
        if before is not None:
            self._check_same(file, before, now)
        elif self.parallel.first:
            about = provenance(self.device) | {"platform": platform.platform()} | occasion()
            files.write_json(file, {"config": now, "identities": self.inputs.identities} | about)

    def _check_same(self, file: Path, before: Any, now: dict[str, Any]) -> None:
        if not isinstance(before, dict) or not isinstance(before.get("config"), dict):
            raise ValueError(f"{file}: expected what `qed train` wrote, got {str(before)[:100]}")
        # A field that the version which wrote the file did not have has its default.
        written = json.loads(TrainConfig(name="", data="").to_json()) | before["config"]
        changed = sorted(name for name in set(now) - CHANGEABLE_ON_RESUME if written[name] != now[name])
        if changed:
            raise ValueError(f"--out: {self.out} holds a run with another {', '.join(changed)}; use another folder")
        self.inputs.check_same(before.get("identities"), self.config)
        check_imported(before.get("imported"), self.out)

    def _resume(self) -> None:
        last = checkpoints.newest(self.out / "checkpoints", self.display.say)
        if last is None:
            return
        weights = dict(last.weights)
        if self.model.config.tie_word_embeddings:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        self.parallel.fill(self.loss, self.optimizers, weights, last.optimizer)
        self.step, self.skipped = last.state["step"], last.state["skipped"]
        self.validation_loss = last.state["validation_loss"]
        self.display.say(f"resuming at step {self.step:,}")

    def save(self) -> None:
        """Write a checkpoint of the step that the run has reached. OSError if it cannot be written."""
        weights, moments = self.parallel.state(self.loss, self.optimizers)
        if self.model.config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)  # it is the embedding, which is saved
        state = {"skipped": self.skipped, "validation_loss": self.validation_loss}
        if self.parallel.first:
            if self.lock is not None:
                self.lock.check()
            try:
                checkpoints.save(self.out / "checkpoints", self.step, weights, moments, state)
            except OSError as error:
                message = f"{self.out}: step {self.step} could not be saved, the checkpoint before is whole"
                raise OSError(f"{message}: {error}") from error
        self.parallel.barrier()

    def run(self) -> None:
        """Train to the last step and export the model, or until `stopping` is set. Diverged if gradients stay bad."""
        config = self.config
        if self.parallel.first:
            about = json.loads(config.to_json())
            self.loggers.start(LoggedRun(about, self.out, self.step, config.steps, self.display.say))
        in_a_row, stop = 0, self._asked_to_stop()
        try:
            while self.step < config.steps and not stop:
                start = time.perf_counter()
                result = self._step()
                self.step += 1
                stop = self._asked_to_stop()
                in_a_row = 0 if result.finite else in_a_row + 1
                self.skipped += not result.finite
                row = self._row(result, time.perf_counter() - start)
                if self.step % config.validate_every == 0 or self.step == config.steps:
                    self.validation_loss = row["validation_loss"] = self.validate()
                    row |= self._watched()
                    row["strength_by_head"] = {layer: x.tolist() for layer, x in strengths(self.model).items()}
                    if self.parallel.mode != "fsdp" and self.parallel.context is None:
                        given, _ = given_and_wanted(self.loader.step(self.step - 1)[:1])
                        row["ranges"] = ranges(self.model, given.to(self.device))
                self.loggers.log(row)
                self.display.step(row)
                if in_a_row >= config.stop_after_skipped:
                    self._report_divergence()
                if self.step % config.save_every == 0 or self.step == config.steps or stop:
                    self.save()
        finally:
            self.loggers.finish()
        if self.step == config.steps:
            self.export()

    def _asked_to_stop(self) -> bool:
        """Whether any process was, by a signal or by its closed terminal, so that all stop at the same step."""
        return self.parallel.any(self.stopping or self.display.closed)

    @torch.no_grad()
    def _watched(self) -> dict[str, float]:
        if self.watch is None:
            return {}
        self.model.eval()
        with self._autocast(), torch.compiler.set_stance("force_eager"):  # its shapes are compiled for no step
            measured = self.watch(self.model)
        self.model.train()
        return measured

    def _step(self) -> StepResult:
        """Take one optimiser step, unless its gradient is not finite."""
        config = self.config
        optimizers.set_rate(self.optimizers, learning_rate(config, self.step))
        pieces = self.batches.step(self.step).split(max(1, config.micro_tokens // config.sequence))
        total = torch.zeros((), device=self.device)
        for i, piece in enumerate(pieces):
            self.parallel.before_piece(self.loss, last=i == len(pieces) - 1)
            total += self.captured(self._piece, piece) if self.captured else self._piece(piece)
        self.parallel.sum_gradients()
        total = self.parallel.sum(total)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        strength = {layer: heads.mean() for layer, heads in strengths(self.model).items()}
        # This is the only place in a step that waits for the device.
        loss, size, *means = torch.stack([total, norm, *strength.values()]).tolist()
        finite = math.isfinite(loss) and math.isfinite(size)
        for optimizer in self.optimizers:
            if finite:
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)  # the captured graph adds to gradients where they are in memory
        return StepResult(loss, size, finite, dict(zip(strength, means, strict=True)))

    def _piece(self, rows: Tensor) -> Tensor:
        """Add the gradients of one piece to those before, and return its share of the batch's mean loss."""
        loss = self._loss(rows) * (self.parallel.divisor / self.loader.targets)
        loss.backward()
        return loss.detach().float() / self.parallel.divisor

    def _loss(self, rows: Tensor) -> Tensor:
        """The loss, summed over the tokens of a piece."""
        with self._autocast(), value_checks(False):  # values that are not finite show in the loss and are counted
            return self.loss(self.parallel.share(rows))

    def _autocast(self) -> torch.autocast:
        low = self.config.precision == "bfloat16"
        return torch.autocast(self.device.split(":")[0], dtype=torch.bfloat16, enabled=low)

    @torch.no_grad()
    def validate(self) -> float | None:
        """The mean loss of the first tokens of the held-out corpus, or None if there is none."""
        config, source = self.config, self.inputs.validation
        if source is None:
            return None
        blocks, together = validation_blocks(source, config)
        self.model.eval()
        total = torch.zeros((), device=self.device)
        for first in range(0, blocks, self.parallel.batch_world):  # every process takes part in every call
            i = first + self.parallel.batch_rank
            begin = min(i, blocks - 1) * together
            rows = source.rows(range(begin, begin + together), config.sequence)
            loss = self._loss(rows.to(self.device)).float()
            total += loss if i < blocks else 0 * loss
        self.model.train()
        return float(self.parallel.sum(total)) / source.targets(blocks * together, config.sequence)

    def _row(self, result: StepResult, seconds: float) -> dict[str, Any]:
        row = {
            "step": self.step - 1,
            "tokens": self.step * self.config.batch_tokens,
            "loss": result.loss,
            "learning_rate": learning_rate(self.config, self.step - 1),
            "gradient_norm": result.norm,
            "tokens_per_s": self.config.batch_tokens / seconds,
            "utilisation": utilisation(self.model, self.config.batch_tokens / seconds, self.device),
            "skipped": self.skipped,
            "strength": result.strength,
        }
        return row if result.finite else row | {"loss": None, "gradient_norm": None}

    def report_stop(self) -> None:
        """Say that a run which was asked to stop can be resumed."""
        saved = f"saved at step {self.step:,}" if self.step else "stopped before the first step"
        self.display.say(f"{saved}; the same command resumes")

    def _report_divergence(self) -> None:
        """Save the batch and the ranges of the weights, so that the step can be repeated, and raise Diverged."""
        folder = self.out / f"diverged-{self.step - 1:08d}"
        weights, _ = self.parallel.state(self.loss, self.optimizers)
        if self.parallel.first:
            files.new_folder(folder)
            save_file({"rows": self.loader.step(self.step - 1)}, folder / "batch.safetensors")
            files.make_plain(folder / "batch.safetensors")
            ranges_of_weights = {
                name: {"least": float(x.min()), "most": float(x.max()), "finite": bool(x.isfinite().all())}
                for name, x in weights.items()
            }
            files.write_json(folder / "ranges.json", ranges_of_weights)
            files.write_text(folder / "replay.txt", f"qed replay {folder}\n")
        self.parallel.barrier()
        count = self.config.stop_after_skipped
        raise Diverged(f"{count} steps in a row without a finite gradient; see {folder}. The last checkpoint is whole.")

    def export(self) -> None:
        """Write a folder for `from_pretrained`, with the tokenizer."""
        weights, _ = self.parallel.state(self.loss, self.optimizers)
        target = self.out / "export"
        if not self.parallel.first or target.exists():
            return
        part = files.new_folder(self.out / f"export{files.PART}")
        write_model(self.model, part, tokenizer=self.inputs.tokenizer(self.out), weights=weights)
        part.rename(target)


def train(
    config: TrainConfig, out: Path, *, device: str, console: Console, watch: Watch | None = None, lines: bool = False
) -> int:
    """Train to the end, or until a SIGTERM, SIGINT or SIGHUP comes or the console's pipe is closed.

    Args:
        config: the run.
        out: its folder; if it holds a checkpoint of the same run, that is resumed.
        device: "cpu" or "cuda".
        console: where progress is reported.
        watch: called with the model whenever the run is validated; what it returns is logged.
        lines: print a line per step on a terminal too, instead of a bar.

    Returns:
        The exit status: 0, or `STOPPED` if the run was asked to stop before its last step.
    """
    if os.environ.get("RANK", "0") != "0":  # of several processes the first one holds the folder's lock
        return _run(Trainer(config, out, device, console, watch, lines))
    with locks.held(out, "train") as lock:
        trainer = Trainer(config, out, device, console, watch, lines)
        trainer.lock = lock
        return _run(trainer)


def _run(trainer: Trainer) -> int:
    def stop(*_: Any) -> None:
        trainer.stopping = True

    wanted = [x for x in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(x) != signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, stop) for number in wanted}  # nohup ignores SIGHUP
    try:
        with trainer.display.running(trainer.step, trainer.validation_loss):
            trainer.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        trainer.parallel.close()
    if trainer.step == trainer.config.steps:
        return 0
    trainer.report_stop()
    return STOPPED
