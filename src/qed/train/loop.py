"""The loop: batches, gradients, steps, checkpoints. A run is a function of its configuration; killed, it goes on.

A step's global batch is cut into pieces that fit; gradients add up, and the loss is the mean over the whole batch. What
decides the next step is in the last checkpoint: weights, optimiser, step. Nothing else has a state: data and learning
rate are functions of the step.
"""

from __future__ import annotations

import json
import math
import platform
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from ..data import Loader, TokenShards
from ..model.causal_lm import QEDForCausalLM
from ..testing import environment
from . import checkpoints, optimizer
from .config import TrainConfig
from .loss import linear_cross_entropy
from .metrics import MetricsFile, strengths
from .schedule import learning_rate

STOPPED = 75  # exit status of a run that was asked to stop and can go on


class Diverged(RuntimeError):  # noqa: N818
    """Too many steps in a row without a finite gradient."""


class Trainer:
    def __init__(self, config: TrainConfig, out: Path, device: str, console: Console):
        self.config, self.out, self.device, self.console = config, out, device, console
        self.stopping = False
        self.loader = Loader(TokenShards(config.data), tokens=config.sequence, batch=config.batch, seed=config.seed)
        vocabulary = self.loader.shards.index["vocab_size"]
        size = config.model_config().vocab_size
        if vocabulary > size:
            raise ValueError(f"model.vocab_size: expected at least the corpus's {vocabulary}, got {size}")
        self._remember()
        torch.manual_seed(config.seed)
        self.model = QEDForCausalLM(config.model_config()).to(device).train()
        if config.activation_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.optimizer = optimizer.make(self.model, config)
        self.names = {id(x): name for name, x in self.model.named_parameters()}
        self.step, self.skipped = 0, 0
        self.validation_loss: float | None = None
        self._resume()
        if config.compile:
            for block in self.model.model.layers:
                block.compile()

    def _remember(self) -> None:
        """config.json: written once; a folder of another run is refused."""
        self.out.mkdir(parents=True, exist_ok=True)
        file = self.out / "config.json"
        if file.exists():
            before = json.loads(file.read_text())["config"]
            now = json.loads(self.config.to_json())
            changed = sorted(name for name in now if before.get(name) != now[name])
            if changed:
                raise ValueError(f"--out: {self.out} holds a run with another {', '.join(changed)}; use another folder")
            return
        part = file.with_suffix(".part")
        about = {"environment": environment(self.device), "platform": platform.platform(), "git": _git()}
        part.write_text(json.dumps({"config": json.loads(self.config.to_json())} | about, indent=2) + "\n")
        part.replace(file)

    def _resume(self) -> None:
        found = checkpoints.newest(self.out / "checkpoints", self.console.print)
        if found is None:
            return
        missing, unexpected = self.model.load_state_dict(found.weights, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise ValueError(f"{found.folder}: expected this run's weights, got others: {missing}, {unexpected}")
        checkpoints.fill_optimizer(self.optimizer, self.names, found.optimizer)
        self.step, self.skipped = found.state["step"], found.state["skipped"]
        self.validation_loss = found.state["validation_loss"]
        self.console.print(f"going on from step {self.step:,}")

    def save(self) -> None:
        weights = {
            name: x for name, x in self.model.state_dict().items() if name != "lm_head.weight" or not self._tied()
        }
        state = {"skipped": self.skipped, "validation_loss": self.validation_loss}
        moments = checkpoints.flat_optimizer(self.optimizer, self.names)
        if self._tied():
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        try:
            checkpoints.save(self.out / "checkpoints", self.step, weights, moments, state)
        except OSError as error:
            raise OSError(
                f"{self.out}: step {self.step} could not be saved, the checkpoint before is whole: {error}"
            ) from error

    def _tied(self) -> bool:
        return bool(self.model.config.tie_word_embeddings)

    def run(self) -> None:
        config = self.config
        metrics = MetricsFile(self.out / "metrics.jsonl", self.step)
        in_a_row = 0
        try:
            while self.step < config.steps and not self.stopping:
                start = time.perf_counter()
                loss, norm, finite = self._step()
                self.step += 1
                in_a_row = 0 if finite else in_a_row + 1
                self.skipped += not finite
                row = self._row(loss, norm, finite, time.perf_counter() - start)
                if self.step % config.validate_every == 0 or self.step == config.steps:
                    self.validation_loss = row["validation_loss"] = self.validate()
                metrics.write(row)
                if self.step % config.log_every == 0:
                    self._line(row)
                if in_a_row >= config.stop_after_skipped:
                    self._report_divergence()
                if self.step % config.save_every == 0 or self.step == config.steps or self.stopping:
                    self.save()
        finally:
            metrics.close()
        if self.step == config.steps:
            self.export()

    def _step(self) -> tuple[float, float, bool]:
        """One optimiser step: the loss, the gradient's norm, and whether it was taken."""
        config = self.config
        optimizer.set_rate(self.optimizer, learning_rate(config, self.step))
        rows = self.loader.step(self.step)
        pieces = rows.split(max(1, config.micro_tokens // config.sequence))
        total = torch.zeros((), device=self.device)
        for piece in pieces:
            loss = self._loss(piece.to(self.device)) / (rows.shape[0] * config.sequence)
            loss.backward()
            total += loss.detach().float()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        finite = math.isfinite(float(norm)) and math.isfinite(float(total))
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(total), float(norm), finite

    def _loss(self, rows: Tensor) -> Tensor:
        """Summed over a piece's tokens."""
        with self._autocast():
            hidden = self.model.model(rows[:, :-1], use_cache=False).last_hidden_state
        return linear_cross_entropy(hidden.flatten(0, 1), self.model.lm_head.weight, rows[:, 1:].flatten())

    def _autocast(self) -> torch.autocast:
        low = self.config.precision == "bfloat16"
        return torch.autocast(self.device.split(":")[0], dtype=torch.bfloat16, enabled=low)

    @torch.no_grad()
    def validate(self) -> float | None:
        """Mean loss of the first tokens of the held-out corpus."""
        config = self.config
        if config.validation is None:
            return None
        shards = TokenShards(config.validation)
        windows = min((len(shards) - 1) // config.sequence, max(1, config.validation_tokens // config.sequence))
        self.model.eval()
        total, count = 0.0, 0
        for i in range(windows):
            rows = torch.from_numpy(shards.read(i * config.sequence, config.sequence + 1))[None].to(self.device)
            total += float(self._loss(rows))
            count += config.sequence
        self.model.train()
        return total / count

    def _row(self, loss: float, norm: float, finite: bool, seconds: float) -> dict[str, Any]:
        row = {
            "step": self.step - 1,
            "tokens": self.step * self.config.batch_tokens,
            "loss": loss,
            "learning_rate": learning_rate(self.config, self.step - 1),
            "gradient_norm": norm,
            "tokens_per_s": self.config.batch_tokens / seconds,
            "skipped": self.skipped,
            "strength": strengths(self.model),
        }
        return row if finite else row | {"loss": None, "gradient_norm": None}

    def _line(self, row: dict[str, Any]) -> None:
        left = (self.config.steps - self.step) * self.config.batch_tokens / row["tokens_per_s"]
        loss = "not finite, skipped" if row["loss"] is None else f"{row['loss']:.4f}"
        held_out = f"  held out {row['validation_loss']:.4f}" if row.get("validation_loss") is not None else ""
        self.console.print(
            f"step {self.step:,}/{self.config.steps:,}  {row['tokens']:,} tokens  loss {loss}{held_out}  "
            f"rate {row['learning_rate']:.2e}  {row['tokens_per_s']:,.0f} tokens/s  {left / 60:.0f} min left",
            highlight=False,
        )

    def _report_divergence(self) -> None:
        """Save what it takes to look at the step again, and stop."""
        rows = self.loader.step(self.step - 1)
        folder = self.out / f"diverged-{self.step - 1:08d}"
        folder.mkdir(exist_ok=True)
        save_file({"rows": rows}, folder / "batch.safetensors")
        ranges = {
            name: {"least": float(x.min()), "most": float(x.max()), "finite": bool(x.isfinite().all())}
            for name, x in self.model.state_dict().items()
        }
        (folder / "ranges.json").write_text(json.dumps(ranges, indent=2))
        count = self.config.stop_after_skipped
        raise Diverged(f"{count} steps in a row without a finite gradient; see {folder}. The last checkpoint is whole.")

    def export(self) -> None:
        """A folder for `from_pretrained`, with the tokenizer."""
        part = self.out / "export.part"
        self.model.save_pretrained(part)
        tokenizer = Path(self.config.data) / "tokenizer.json"
        if tokenizer.exists():
            (part / "tokenizer.json").write_bytes(tokenizer.read_bytes())
        target = self.out / "export"
        if not target.exists():
            part.rename(target)


def train(config: TrainConfig, out: Path, *, device: str, console: Console) -> int:
    """Run to the end, or to a SIGTERM; returns the exit status."""
    trainer = Trainer(config, out, device, console)

    def stop(*_: Any) -> None:
        trainer.stopping = True

    before: dict[int, Any] = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        trainer.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return STOPPED if trainer.stopping and trainer.step < config.steps else 0


def _git() -> str:
    """The commit, and whether files differ from it; empty outside a repository."""

    def ask(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=Path(__file__).parent)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = ask("rev-parse", "HEAD")
    return commit + (" changed" if commit and ask("status", "--porcelain") else "")
