"""A task is one file: put into the package, it is listed, evaluated, shown, and read by what makes reports."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qed
from qed import QEDConfig, QEDForCausalLM
from qed.data import tokenization
from qed.data.synthetic import documents
from qed.eval.run import tables
from qed.eval.task import NeedleTask, Task
from qed.eval.tasks import TASKS, named, of_kind, reading

ECHO = '''
"""A word, and the same word asked for again."""

from random import Random

from ..task import Draws, NeedleTask, Sample

WORDS = ("bridge", "harbour", "lamp", "letter", "wall")


def generate(length, samples, count, seed):
    draw = Random(seed)
    for _ in range(samples):
        word = draw.choice(WORDS)
        prompt = f"The word is {word}. " + "It rained. " * (length // 16) + "The word is"
        yield Sample(prompt=prompt, answer=word, tokens=count([prompt])[0], depth=0.0)


TASKS = (
    NeedleTask(
        name="echo",
        title="Echo",
        draws=lambda options: Draws(samples=generate, about={"words": len(WORDS)}),
        shortest=64,
        new_tokens=8,
        correct=lambda prediction, answer: answer[0] in prediction,
    ),
)
'''
# What a user would type, one after the other in one process; the last lines are what reports begin with.
COMMANDS = """
import json, sys
from pathlib import Path
from typer.testing import CliRunner
from qed.cli import app

def said(*arguments):
    done = CliRunner().invoke(app, ["eval", *arguments], env={"COLUMNS": "200"})
    return done.exit_code, done.output

checkpoint, out = sys.argv[1:]
options = ("--lengths", "64,128", "--samples", "12", "--out", out)
found = {
    "help": said("--help"),
    "slow": "transformers" in sys.modules,
    "short": said(checkpoint, "--task", "echo", "--lengths", "32", "--out", out),
    "misspelt": said(checkpoint, "--task", "ecko", *options),
    "eval": said(checkpoint, "--task", "echo", *options),
}
from qed.analysis import names, results
from qed.eval.task import NeedleTask
from qed.eval.tasks import named
problems = []
found["results"] = {name: x.result["correct"] for name, x in results.folder(Path(out), problems, 1.0).items()}
found["title"] = names.TITLES["echo"], named("echo", NeedleTask, "--needles").title, "echo" in names.NEEDLES, problems
Path(out, "said.json").write_text(json.dumps(found))
"""


@pytest.mark.slow
def test_a_new_task_is_one_file(tmp_path: Path) -> None:
    shutil.copytree(Path(qed.__file__).parent, tmp_path / "src" / "qed")
    (tmp_path / "src" / "qed" / "eval" / "tasks" / "echo.py").write_text(ECHO)
    checkpoint, out = tmp_path / "model", tmp_path / "out"
    torch.manual_seed(0)
    config = QEDConfig.tiny(vocab_size=512, eos_token_id=0, bos_token_id=None, initializer_range=0.3)
    QEDForCausalLM(config).save_pretrained(checkpoint)
    tokenization.train(itertools.islice(documents(400), 400), 512).save(str(checkpoint / "tokenizer.json"))
    command = [sys.executable, "-c", COMMANDS, str(checkpoint), str(out)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(tmp_path / "src")})
    said = json.loads((out / "said.json").read_text())

    assert said["help"][0] == 0
    assert "echo" in said["help"][1]
    assert not said["slow"]  # who asks for help does not wait for transformers
    assert "--lengths: expected 64 or more, got 32" in said["short"][1]
    misspelt = " ".join(said["misspelt"][1].split())
    assert "--task: expected one of echo, niah_single_1, " in misspelt
    assert "got 'ecko'; the nearest is echo" in misspelt

    status, table = said["eval"]
    assert status == 0, table
    for length in (64, 128):
        (prompts,) = (out / "prompts").glob(f"echo-{length}-*.jsonl")
        asked = [json.loads(line) for line in prompts.read_text().splitlines()]
        rows = [json.loads(line) for line in (out / f"echo-{length}.jsonl").read_text().splitlines()]
        assert len(asked) == len(rows) == 12
        for row in rows:
            assert row["gold"] == asked[row["index"]]["answer"]
            assert row["correct"] == (row["gold"][0] in row["prediction"])
        right = sum(row["correct"] for row in rows)
        assert said["results"][f"echo-{length}"] == right
        (cells,) = [line.split() for line in table.splitlines() if line.startswith(f"│ echo-{length} ")]
        assert cells[3:6:2] == [f"{right / 12:.1%}", "12"]
    assert 0 < sum(said["results"].values()) < 24
    assert said["title"] == ["Echo", "Echo", True, []]


def test_an_unknown_task_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"--task: expected one of niah_single_1, .*, got 'mqra'; the nearest is mqar"):
        named("mqra", Task)
    with pytest.raises(ValueError, match=r"--needles: expected one of niah_single_1, .*, got 'fda'"):
        named("fda", NeedleTask, "--needles")


def test_the_table_of_tasks() -> None:
    assert list(of_kind(NeedleTask)) == list(TASKS)[: len(of_kind(NeedleTask))]
    assert set(reading("essays")) == {"niah_single_2", "niah_single_3", "niah_multikey_1"}
    assert set(reading("data")) == {"fda", "swde", "squad_completion", "positions", "states"}
    with pytest.raises(ValueError, match="name of a task: expected one without a hyphen, got 'a-b'"):
        Task(name="a-b", title="A")
    with pytest.raises(ValueError, match="inputs of a: expected some of words, essays, data, got 'songs'"):
        Task(name="a", title="A", inputs=("songs",))


def test_tasks_with_the_same_columns_share_a_table() -> None:
    scored = {"accuracy": 0.25, "samples": 8, "tokens": {"median": 60}, "seconds": 1.0}
    bins = [{"from": 0, "to": 64, "loss": 2.5}, {"from": 64, "to": 300, "loss": 1.5}]
    results = {
        "pairs-64": scored,
        "positions-300": {"bins": bins, "loss": 1.75, "bits_per_byte": 0.5},
        "fda-A1": scored,
        "mqar": {"accuracy": {"64x4": 1.0, "64x8": 0.5}},
    }
    found = {tuple(str(x.header) for x in table.columns): table for table in tables(results)}
    rows = {
        columns: list(zip(*(column.cells for column in table.columns), strict=True)) for columns, table in found.items()
    }
    score = ("25.0%", "8", "60", "1.0")
    assert rows == {
        ("", "correct", "of", "prompt tokens", "seconds"): [("pairs-64", *score), ("fda-A1", *score)],
        ("", "position", "loss", "bits per byte"): [
            ("positions-300", "0–64", "2.5000", "unknown words"),
            ("positions-300", "64–300", "1.5000", "unknown words"),
            ("positions-300", "all", "1.7500", "0.5000"),
        ],
        ("", "correct"): [("mqar 64x4", "100.0%"), ("mqar 64x8", "50.0%")],
    }
