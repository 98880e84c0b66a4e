"""The command line: one wrong word among right ones is refused in a line, and nothing is left behind.

Every command has a line that is right and small, and for each option words that are wrong. What is wrong must be found
before anything runs: a call that is not refused at once would take longer than a case may.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from typer.testing import CliRunner

from qed.cli import app

from . import training
from .drawing import Draw

COUNTS = ("abc", "", "0", "-1", "1.5", "nan", "1e3", "99999999999999999999999", "٣x", "1,2")
FACTORS = ("abc", "", "nan", "inf", "1,5")
DEVICES = ("gpu", "cuda:99", "cuda:x", "", "CPU", "tpu", "cpu:x", *(() if torch.cuda.is_available() else ("cuda",)))
NAMES = ("", "nothing", "QED", "../qed", "[/b]", "qed,")
SETTINGS = (
    *("nonsense", "=", "=3", "log_every=0", "total_tokens=abc", "total_tokens=-5", "betas=5", "betas=[0.9]", "betas=x"),
    *(
        "seed=-1",
        "seed=x",
        "seed=1.5",
        "learning_rate=null",
        "learning_rate=x",
        "learning_rate=-1",
        "clip=x",
        "clip=[]",
    ),
    *(
        "sequence=7",
        "sequence=0",
        "batch_tokens=33",
        "micro_tokens=0",
        "precision=float8",
        "parallel=none",
        "context=3",
    ),
    *(
        "model.lamda_max=1",
        "model.hidden_size=-3",
        "model.rule=none",
        "model.head_dim=x",
        "model.=3",
        "model.num_heads=0",
    ),
    *(
        "model.layer_types=[]",
        "model.vocab_size=3",
        "arm=none",
        "data=nowhere",
        "validation=nowhere",
        "name=x",
        "model=3",
    ),
    *("warmup_fraction=x", "weight_decay=x", "epsilon=x", "save_every=0", "validate_every=x", "stop_after_skipped=x"),
    *("activation_checkpointing=some", "decay_start_tokens=99999999999", "validation_tokens=x", "compile=maybe"),
)


class Line:
    """A command that would run: its words, its options, and what is wrong for each of them."""

    def __init__(self, words: list[str], options: dict[str, str], wrong: dict[str, tuple[str, ...]]):
        self.words, self.options, self.wrong = words, options, wrong
        # Options that may be given more than once; of others the last one counts.
        self.many = {"train": {"--set"}, "eigenvalues": set()}.get(words[0], {"--data", "--task"})


def _lines() -> list[Line]:
    """The folder they run in has a checkpoint `model`, a corpus `data`, runs, and things that are none of these."""
    no_folder = ("nowhere", "file.txt", "", "file.txt/below")
    no_target = ("file.txt/below", "file.txt", "x" * 300, "/proc/nothing/here")
    device = {"--device": DEVICES}
    return [
        Line(
            ["train", "mini"],
            {"--out": "out", "--device": "cpu", "--set": "data=data"},
            {"--set": SETTINGS, "--out": no_target, "mini": NAMES} | device,
        ),
        Line(
            ["prepare", "text.txt"],
            {"--out": "out", "--tokenizer": "words:64"},
            {
                "text.txt": (
                    "nowhere.txt",
                    "",
                    "hf:",
                    "synthetic:",
                    "synthetic:x",
                    "synthetic:-1",
                    "data/index.json",
                    "empty",
                ),
                "--tokenizer": (
                    "words:",
                    "words:x",
                    "words:-1",
                    "bpe:0",
                    "bpe:x",
                    "nowhere.json",
                    "file.txt",
                    "",
                    "data",
                ),
                "--out": no_target,
                "--shard-tokens": COUNTS,
                "--limit": COUNTS,
                "--part": ("held", "held:", "held:x", "held:0", "rest:-1", "all:3", ":"),
                "--practice": (*FACTORS, "-0.1", "1.5"),
            },
        ),
        Line(
            ["generate", "model", "one two"],
            {"--device": "cpu", "--max-new-tokens": "1"},
            {
                "model": (*no_folder, "empty", "data", "../model"),
                "one two": ("",),
                "--max-new-tokens": COUNTS,
                "--temperature": (*FACTORS, "-1"),
                "--top-k": ("abc", "", "-1", "1.5"),
                "--top-p": (*FACTORS, "-0.5", "0", "1.5"),
                "--strength": FACTORS,
                "--seed": ("abc", "", "1.5", "-1", "99999999999999999999999"),
                "--tokenizer": (*no_folder, "empty"),
            }
            | device,
        ),
        Line(
            ["eval", "model"],
            {"--task": "pairs", "--lengths": "64", "--samples": "2", "--device": "cpu", "--out": "out"},
            {
                "model": (*no_folder, "empty", "data"),
                "--task": (*NAMES, "pairs,", "fda", "niah_single_2", "positions"),
                "--lengths": ("", "abc", "64,", "0", "-64", "3", "1e3", "64,x", "64.5"),
                "--samples": COUNTS,
                "--tokenizer": ("nowhere", "file.txt", ""),
                "--words": ("nowhere", "file.txt"),
                "--data": ("fda", "=", "pairs=file.txt", "fda=nowhere", "nothing=file.txt"),
                "--variant": (*NAMES, "C"),
                "--context": COUNTS,
                "--max-length": COUNTS,
                "--sizing": NAMES,
                "--seed": ("abc", "", "1.5", "-1"),
                "--strength": FACTORS,
                "--batch": COUNTS,
                "--harness": ("none", "lm_eval"),
                "--suite": (*NAMES, "commonsense,", "ruler,x"),
                "--out": no_target,
            }
            | device,
        ),
        Line(
            ["strength", "model"],
            {
                "--task": "pairs",
                "--lengths": "64",
                "--samples": "2",
                "--scales": "0,1",
                "--device": "cpu",
                "--out": "out",
            },
            {
                "model": (*no_folder, "empty", "data"),
                "--scales": ("", "abc", "0", "1,", "1,x", "nan,1", "inf,1"),
                "--task": NAMES,
                "--lengths": ("", "abc", "0"),
                "--samples": COUNTS,
                "--batch": COUNTS,
                "--out": no_target,
            }
            | device,
        ),
        Line(
            ["eigenvalues", "model"],
            {"--data": "data", "--out": "found.json", "--device": "cpu", "--tokens": "64"},
            {
                "model": (*no_folder, "empty", "data"),
                "--data": (*no_folder, "empty", "model"),
                "--tokens": COUNTS,
                "--out": ("file.txt/below", "data", "/proc/nothing/here"),
            }
            | device,
        ),
        Line(["report", "runs"], {"--out": "out"}, {"runs": (*no_folder, "empty", "data"), "--out": no_target}),
        Line(
            ["convert", "model/model.safetensors", "out.safetensors"],
            {"--kind": "gdn2", "--to": "fla"},  # the layers are not of this kind: it is refused as it is
            {
                "model/model.safetensors": ("nowhere", "file.txt", "", "data"),
                "out.safetensors": ("file.txt", "file.txt/below", "data"),
                "--kind": (*NAMES, "kda"),
                "--to": NAMES,
            },
        ),
        Line(["replay", "run"], {"--device": "cpu"}, {"run": (*no_folder, "empty", "data")} | device),
        Line(
            ["reproduce"],
            {"--out": "out", "--device": "cpu", "--minutes": "0"},
            {
                "--scale": NAMES,
                "--arms": ("none", "qed@", "qed@x", "qed@-1", "@", "qed,none", ","),
                "--seeds": ("x", "-1", "0,x", ","),
                "--jobs": COUNTS,
                "--only": ("nothing-0", "qed", ","),
                "--minutes": ("abc", "-1", ""),
                "--words": ("nowhere", "file.txt"),
                "--essays": ("nowhere", "empty"),
                "--data": ("fda", "nothing=file.txt", "fda=nowhere"),
                "--out": no_target,
            }
            | device,
        ),
        Line(
            ["doctor"],
            {"--device": "cpu", "--tokens": "4", "--heads": "1", "--width": "2"},
            {"--dtype": NAMES, "--heads": COUNTS, "--width": COUNTS, "--tokens": COUNTS} | device,
        ),
        Line(
            ["bench", "ops"],
            {"--device": "cpu", "--tokens": "4", "--heads": "1", "--width": "2", "--batch": "1", "--rounds": "1"},
            {
                "--impl": NAMES,
                "--against": ("none", "FLA"),
                "--rounds": COUNTS,
                "--tokens": COUNTS,
                "--batch": COUNTS,
                "--out": ("file.txt/below", "data", "/proc/nothing/here"),
            }
            | device,
        ),
        Line(
            ["bench", "model"],
            {"--device": "cpu", "--size": "tiny", "--rounds": "1"},
            {"--size": NAMES, "--against": ("none",), "--rounds": COUNTS, "--out": ("file.txt/below", "data")} | device,
        ),
        Line(
            ["bench", "train"],
            {"--device": "cpu", "--size": "tiny", "--rounds": "1", "--batch": "1", "--tokens": "8"},
            {"--size": NAMES, "--rounds": COUNTS, "--batch": COUNTS, "--tokens": COUNTS, "--against": ("none",)}
            | device,
        ),
    ]


@cache
def _template() -> Path:
    """What commands are pointed at: made once, then seen through links to folders that nothing should write to."""
    place = training.scratch() / "things"
    place.mkdir()
    shutil.copytree(training.whole() / "export", place / "model")
    shutil.copytree(training.corpus(), place / "data")
    (place / "empty").mkdir()
    (place / "runs").mkdir()
    shutil.copytree(training.whole(), place / "runs" / "qed-0")
    (place / "file.txt").write_text("nothing that any command expects")
    (place / "text.txt").write_text("one two three\n" * 20)
    return place


def _seen(place: Path) -> dict[str, str]:
    """Every file below, by what it holds."""
    found = {}
    for path in sorted(place.rglob("*")):
        held = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "a folder"
        found[str(path.relative_to(place))] = held
    return found


@contextlib.contextmanager
def _standing_in(place: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(place)
    try:
        yield
    finally:
        os.chdir(before)


def _mutated(draw: Draw, line: Line) -> tuple[list[str], str]:
    """The words of a call with one thing wrong, and that thing."""
    words, options = list(line.words), dict(line.options)
    kind = draw.choice(("value", "value", "value", "value", "value", "unknown", "extra", "without"))
    said: list[tuple[str, str]] = []
    if kind == "value":
        name = draw.choice(sorted(line.wrong))
        value = draw.choice(line.wrong[name])
        what = f"{name} {value[:40]!r}"
        if name in words:
            words[words.index(name)] = value
        elif name in line.many and draw.chance(0.7):
            said.append((name, value))  # beside the right one
        else:
            options[name] = value
    elif kind == "unknown":
        what = draw.choice(("--nothing", "--Out", "-z"))
        words.append(what)
    elif kind == "extra":
        what = "an argument too many"
        words += ["superfluous"] * 3
    else:
        what = "an option without its value"
        return [*words, *(word for pair in options.items() for word in pair), draw.choice(sorted(line.options))], what
    said = [*options.items(), *said]
    draw.shuffle(said)
    return [*words, *(word for pair in said for word in pair)], what


def wrong_words(seed: int) -> None:
    """Refused with a message, an exit status other than 0 and no traceback; no file is there that was not before."""
    draw = Draw("wrong_words", seed)
    template = _template()
    with training.workplace() as outside:
        place = outside / "place"
        shutil.copytree(template, place)
        words, what = _mutated(draw, draw.choice(_lines()))
        before = _seen(outside)
        with _standing_in(place):
            found = CliRunner(env={"COLUMNS": "4000"}).invoke(app, words)
        call = f"qed {' '.join(map(repr, words))[:500]}"
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise AssertionError(f"{call}: a traceback, {found.exception!r}") from found.exception
        assert found.exit_code != 0, f"{call}: taken in spite of {what}; said {found.output[-200:]!r}"
        assert found.output.strip(), f"{call}: refused without a word"
        assert "Traceback" not in found.output, f"{call}: a traceback"
        after = _seen(outside)
        left = sorted(name for name in after.keys() | before.keys() if after.get(name) != before.get(name))
        assert not left, f"{call}: left behind {left[:5]}"
