"""The command line as a person uses it, and as one who means it no good: what is wrong is named in a line, with a
status other than 0, before anything runs, and nothing is left behind."""

import dataclasses
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

import qed
from qed import QEDConfig, QEDForCausalLM
from qed.cli import app
from qed.data import tokenization
from qed.data.prepare import prepare
from qed.data.synthetic import documents
from qed.recipes import RECIPES
from qed.train.config import TrainConfig
from qed.train.fields import documented, parse

runner = CliRunner()


def test_version_and_help() -> None:
    assert runner.invoke(app, ["--version"]).output.strip() == qed.__version__
    assert "reproduce" in runner.invoke(app, ["--help"]).output


@pytest.mark.slow
def test_the_package_is_a_program() -> None:
    """`python -m qed` is `qed`, and its status is the command's."""
    for words, status in ((["--version"], 0), (["eval"], 1)):
        command = [sys.executable, "-m", "qed", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == status
        assert done.stdout.strip() == ("" if status else qed.__version__)


Command = TyperCommand | TyperGroup


def commands(group: TyperGroup, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Command]]:
    """Every command with the words that call it."""
    for name, command in group.commands.items():
        yield (*words, name), command
        if isinstance(command, TyperGroup):
            yield from commands(command, (*words, name))


ALL_COMMANDS = dict(commands(get_command(app)))


@pytest.mark.parametrize("words", ALL_COMMANDS, ids=" ".join)
def test_every_command_has_an_example_that_is_understood(words: tuple[str, ...]) -> None:
    command = ALL_COMMANDS[words]
    assert "Example: qed" in runner.invoke(app, [*words, "--help"]).output
    assert command.help
    example = shlex.split(command.epilog.removeprefix("Example: "))
    assert example[: len(words) + 1] == ["qed", *words]
    command.make_context("qed", example[len(words) + 1 :])
    for option in command.params:
        assert option.help, f"{option.name} is not explained"


def test_the_help_of_train_lists_recipes_and_fields() -> None:
    """Every field that --set takes, in the form in which it takes it, and what it means."""
    said = runner.invoke(app, ["train", "--help"], terminal_width=120).output
    words = said.split()
    for name in RECIPES:
        assert name in words
    shown = dict(word.partition("=")[::2] for word in words if "=" in word)
    fields = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    texts = documented(TrainConfig)
    assert texts.keys() == fields.keys()
    assert all(texts.values())
    for name, default in fields.items():
        if isinstance(default, str | int | float):
            assert parse(shown[name]) == default
    assert "arm=qed" in words
    assert "model.FIELD" in words


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, damaged copies of it, tokens, word lists and files that are something else."""
    base = tmp_path_factory.mktemp("place")
    torch.manual_seed(0)
    config = QEDConfig.tiny(vocab_size=512, eos_token_id=0, bos_token_id=None)
    QEDForCausalLM(config).save_pretrained(base / "model")
    tokenization.train(itertools.islice(documents(400), 400), 512).save(str(base / "model" / "tokenizer.json"))
    tokenizer = str(base / "model" / "tokenizer.json")
    prepare("synthetic:60", tokenizer=tokenizer, out=base / "data", console=Console(quiet=True))
    (base / "words").mkdir()
    (base / "words" / "adjectivelist.txt").write_text("red\nold\n")
    (base / "words" / "nounlist.txt").write_text("fox\nowl\n")
    (base / "file").write_text("x")
    (base / "junk.jsonl").write_bytes(bytes(range(256)) * 4)
    (base / "junk.json").write_bytes(bytes(range(256)) * 4)
    rows = [{"key": "a", "value": value, "text": "a: b"} for value in ("b", " ")]
    (base / "golds.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    (base / "empty").mkdir()
    (base / "o[" / "b]").mkdir(parents=True)
    shutil.copytree(base / "model", base / "run" / "export")  # the folder of a finished run
    (base / "unfinished" / "checkpoints").mkdir(parents=True)
    for run in ("run", "unfinished"):
        (base / run / "config.json").write_text(json.dumps({"config": {}}))

    def damaged(name: str, file: str, content: bytes) -> None:
        shutil.copytree(base / "model", base / name)
        (base / name / file).write_bytes(content)

    described = json.loads((base / "model" / "config.json").read_text())
    damaged("no-json", "config.json", b"{")
    damaged("a-list", "config.json", b"[]")
    damaged("a-llama", "config.json", json.dumps(described | {"model_type": "llama"}).encode())
    damaged("a-word", "config.json", json.dumps(described | {"hidden_size": "wide"}).encode())
    damaged("wider", "config.json", json.dumps(described | {"hidden_size": 128}).encode())
    damaged("no-weights", "model.safetensors", b"")
    damaged("no-tokenizer", "tokenizer.json", b"[1, 2]")
    shutil.copytree(base / "model", base / "less")
    weights = load_file(base / "less" / "model.safetensors")
    del weights["model.layers.0.mixer.o_proj.weight"]
    save_file(weights, base / "less" / "model.safetensors", metadata={"format": "pt"})
    return base


def tree(base: Path) -> dict[str, int]:
    return {str(path.relative_to(base)): path.stat().st_mtime_ns for path in sorted(base.rglob("*")) if path.is_file()}


EVAL = ("eval", "model", "--words", "words", "--samples", "2", "--out", "out")
NEEDLE = (*EVAL, "--task", "niah_single_1", "--lengths", "512")
STRENGTH = ("strength", "model", "--words", "words", "--lengths", "512", "--samples", "2", "--out", "out")
EIGENVALUES = ("eigenvalues", "model", "--data", "data", "--tokens", "100")
WEIGHTS = "model/model.safetensors"
# A call, and what its message must name.
BAD_CALLS: list[tuple[tuple[str, ...], str]] = [
    (("x[/b]",), "x[/b]"),
    *(
        (("doctor", "--device", name), f"--device: expected auto or what is here (cpu), got '{name}'")
        for name in ("cuda", "cuda:7", "gpu", "xyz", "")
    ),
    (("doctor", "--dtype", "int8"), "--dtype: expected one of bfloat16, float16, float32, got 'int8'"),
    (("doctor", "--heads", "0"), "--heads"),
    (("doctor", "--heads", "9" * 30), "--heads"),
    (("doctor", "--heads", "8000", "--width", "8000", "--tokens", "16000000"), "not enough memory"),
    (("generate", "nothing", "hi"), "nothing"),
    (("generate", "file", "hi"), "file"),
    (("generate", "o[/b]", "hi"), "o[/b]"),
    (("generate", "model", ""), "PROMPT: expected at least one token"),
    (("generate", "model", "\udcff"), "PROMPT: expected text in UTF-8"),
    (("generate", "model", "hi", "--tokenizer", "file"), "file: no tokenizer there"),
    (("generate", "model", "hi", "--temperature", "nan"), "--temperature: expected a finite number, got nan"),
    (("generate", "model", "hi", "--temperature", "-1"), "temperature: expected 0 or more"),
    (("generate", "model", "hi", "--top-p", "inf"), "--top-p: expected a finite number"),
    (("generate", "model", "hi", "--top-k", "-1"), "--top-k"),
    (("generate", "model", "hi", "--strength", "inf"), "--strength: expected a finite number"),
    (("generate", "model", "hi", "--seed", "-1"), "--seed"),
    (("generate", "model", "hi", "--seed", "9" * 30), "--seed"),
    (("generate", "model", "hi", "--max-new-tokens", "0"), "--max-new-tokens"),
    *(
        (("generate", name, "hi"), f"got {name}: its config.json")
        for name in ("no-json", "a-list", "a-llama", "a-word")
    ),
    (("generate", "wider", "hi"), "got wider: its weights cannot be read"),
    (("generate", "no-weights", "hi"), "got no-weights: its weights cannot be read"),
    (("generate", "less", "hi"), "model.layers.0.mixer.o_proj.weight: not in the checkpoint"),
    (("generate", "no-tokenizer", "hi"), "--tokenizer: expected a tokenizer in no-tokenizer"),
    *(
        ((name, "unfinished", *more), "got unfinished, a run that is not finished: it has no export yet")
        for name, *more in (
            *(("generate", "hi"), ("eval", "--task", "mqar"), ("strength",), ("eigenvalues", "--data", "data")),
            *(("explain",), ("convert", "t", "--kind", "gdn2")),
        )
    ),
    (("eval",), "--task: expected one or more of niah_single_1"),
    (("eval", "--task", "niah_single_1", "--words", "words"), "CHECKPOINT: expected a folder"),
    (("eval", "model", "--task", ","), "--task: expected one or more of niah_single_1"),
    (("eval", "model", "--task", "niah_single_9"), "got 'niah_single_9'"),
    *(((*NEEDLE[:1], name, *NEEDLE[2:]), f"got {name}") for name in ("file", "less", "a-llama", "n\udcff")),
    *(((*NEEDLE, "--lengths", text), "--lengths: expected") for text in (",", "", "abc", "1e3", "-5", "9" * 14, "300")),
    ((*NEEDLE, "--samples", "0"), "--samples"),
    ((*NEEDLE, "--seed", "-1"), "--seed"),
    ((*NEEDLE, "--strength", "nan"), "--strength: expected a finite number, got nan"),
    ((*NEEDLE, "--batch", "x"), "--batch"),
    ((*NEEDLE, "--variant", "C"), "--variant: expected one of A0, A1, B, got 'C'"),
    ((*NEEDLE, "--sizing", "x"), "--sizing: expected one of linear, binary, got 'x'"),
    ((*NEEDLE, "--harness", "x"), "--harness: expected one of lm-eval, nothing, got 'x'"),
    (
        ("eval", "model", "--suite", "comonsense"),
        "got 'comonsense'; the nearest is commonsense",
    ),
    (("eval", "model", "--suite", ","), "--suite: expected one or more of commonsense, ruler, got ','"),
    ((*NEEDLE, "--suite", "ruler"), "--suite: expected no --task beside it, got both"),
    (("eval", "model", "--suite", "ruler", "--prompts-only"), "--suite: expected no --prompts-only beside it"),
    (("eval", "model", "--suite", "commonsense", "--data", "empty"), "expected files in empty named after tasks"),
    (("eval", "model", "--suite", "commonsense", "--data", "fda=file"), "--data: expected a file of wikitext, lambada"),
    (
        ("eval", "model", "--suite", "ruler", "--data", "niah_single_2=file"),
        "expected a file of ruler_qa_squad",
    ),
    (("bench", "eval", "--tokenizer", "x", "--suite", "rulers"), "got 'rulers'; the nearest is ruler"),
    ((*NEEDLE, "--tokenizer", "bpe:300"), "bpe:300"),
    ((*NEEDLE, "--words", "empty"), "--words: expected adjectivelist.txt"),
    ((*NEEDLE, "--words", "file"), "--words: expected a folder, got file"),
    ((*NEEDLE, "--essays", "nothing"), "--essays: expected a file, got nothing"),
    ((*EVAL, "--task", "niah_single_2", "--lengths", "1024"), "--essays: expected a file of essays"),
    ((*EVAL, "--task", "niah_single_2", "--lengths", "1024", "--essays", "junk.json"), "--essays: expected text"),
    ((*NEEDLE, "--prompts", "file"), "--prompts: expected a folder, got the file file"),
    ((*NEEDLE, "--out", "file"), "--out: expected a folder, got the file file"),
    ((*NEEDLE, "--out", "file/below"), "file is a file"),
    ((*NEEDLE, "--out", "/proc/out"), "--out: expected a path that can be written, got /proc/out"),
    ((*NEEDLE, "--out", "/dev/full"), "/dev/full"),
    ((*NEEDLE, "--prompts-only", "--task", "mqar"), "got 'mqar'"),
    # Of several tasks the last cannot run: the first must not have.
    ((*NEEDLE, "--task", "fda", "--data", "fda=missing.jsonl"), "missing.jsonl, which does not exist"),
    ((*NEEDLE, "--task", "fda", "--data", "fda=empty"), "empty: expected a file of JSON lines"),
    ((*NEEDLE, "--task", "fda", "--data", "fda=junk.jsonl"), "junk.jsonl:1: expected"),
    ((*NEEDLE, "--task", "fda", "--data", "fda=golds.jsonl"), "golds.jsonl:3: expected an answer with at least one"),
    ((*NEEDLE, "--task", "fda", "--data", "fda=file", "--data", "fda=junk.jsonl"), "--data: expected one file for fda"),
    ((*NEEDLE, "--data", "fda=file"), "--data: expected nothing, since no task asked for reads a file, got 'fda=file'"),
    ((*NEEDLE, "--task", "fda", "--data", "swde=file"), "--data: expected a file of fda"),
    ((*NEEDLE, "--task", "fda", "--data", "file"), "--data: expected TASK=FILE, got 'file'"),
    ((*NEEDLE, "--task", "positions", "--data", "positions=empty"), "empty: expected what `qed prepare` finished"),
    ((*NEEDLE, "--task", "positions"), "--data: expected positions=FOLDER"),
    ((*NEEDLE, "--task", "mqar"), "mqar: expected a model of 8192 tokens, got one of 512"),
    ((*NEEDLE, "--task", "pairs"), "--tokenizer: pairs expects one token a word"),
    *(
        ((*STRENGTH, "--scales", text), "--scales: expected")
        for text in ("abc", "", "2,3", "1,nan", "1,inf", "1,1", "1,1.00000001")
    ),
    ((*STRENGTH, "--task", "fda", "--data", "fda=golds.jsonl"), "golds.jsonl:3: expected an answer"),
    ((*STRENGTH, "--out", "file"), "--out: expected a folder"),
    (
        ("eigenvalues", "model"),
        "--data: expected a folder that `qed prepare` wrote, since model is of no run, got none",
    ),
    (("eigenvalues", "run"), "--data: expected a folder that `qed prepare` wrote, since run/export is of no run"),
    (("eigenvalues", "model", "--data", "empty"), "empty: expected what `qed prepare` finished"),
    ((*EIGENVALUES, "--tokens", "9" * 14), "--data: expected"),
    ((*EIGENVALUES, "--out", "empty"), "--out: expected a file, got the folder empty"),
    ((*EIGENVALUES, "--out", "file/x.json"), "file is a file"),
    ((*EIGENVALUES, "--device", "cuda"), "--device"),
    (("report", "nothing"), "RUNS: expected a folder of runs, got nothing"),
    (("report", "empty"), "RUNS: expected folders with a config.json in empty"),
    (("report", "empty", "--out", "file"), "--out: expected a folder"),
    (("convert", "nothing", "t", "--kind", "gdn2"), "nothing: expected a safetensors file"),
    (("convert", "file", "t", "--kind", "gdn2"), "file: expected a safetensors file"),
    (("convert", WEIGHTS, "t", "--kind", "gdn2"), "q_conv1d"),
    (("convert", WEIGHTS, "t", "--kind", "xyz"), "--kind: expected one of gdn2, kda, gdn, deltanet, got 'xyz'"),
    (("convert", WEIGHTS, "file", "--kind", "gdn2"), "file exists"),
    (("convert", WEIGHTS, "empty", "--kind", "gdn2"), "TARGET: expected a file, got the folder empty"),
    (("convert", WEIGHTS, "file/t", "--kind", "gdn2"), "file is a file"),
    (("bench", "--tune"), "--tune: expected a CUDA device, got cpu"),
    (("bench", "ops", "--device", "cuda"), "--device"),
    (("bench", "ops", "--impl", "xyz"), "xyz"),
    (("bench", "ops", "--heads", "-1"), "--heads"),
    (("bench", "ops", "--out", "empty"), "--out: expected a file, got the folder empty"),
    (("bench", "model", "--size", "huge"), "--size: expected one of paper, medium, small, mini, tiny, got 'huge'"),
    (("bench", "model", "--out", "file/x"), "file is a file"),
    (("bench", "train", "--against", "x"), "--against: expected one of fla, nothing, got 'x'"),
    (("bench", "eval", "--tokenizer", "nothing"), "--tokenizer: expected a .model or .json file, got nothing"),
    (("bench", "eval", "--tokenizer", "junk.json"), "--tokenizer: expected a tokenizer.json, got junk.json"),
    (("bench", "eval", "--tokenizer", "model/tokenizer.json", "--words", "words", "--lengths", "10"), "--lengths"),
    (("prepare", "synthetic:5", "--tokenizer", "bpe:300", "--out", "file"), "--out: expected a folder"),
    (("prepare", "synthetic:5", "--tokenizer", "bpe:300", "--out", "/proc/x"), "/proc/x"),
    (("prepare", "synthetic:5", "--tokenizer", "bpe:300", "--out", "out", "--practice", "nan"), "--practice"),
    (("prepare", "synthetic:5", "--tokenizer", "bpe:300", "--out", "out", "--limit", "9" * 30), "--limit"),
    (("prepare", "hf:", "--tokenizer", "bpe:300", "--out", "out"), "hf:"),
    (("prepare", "nothing", "--tokenizer", "bpe:300", "--out", "out"), "SOURCE: expected"),
    (("prepare", "synthetic:5", "--tokenizer", "nothing", "--out", "out"), "--tokenizer: expected"),
    (("prepare", "synthetic:5", "--tokenizer", "bpe:300", "--out", "out", "--part", "x"), "--part: expected"),
    *(
        (
            (*("train", "mini", "--out", "out", "--set", "data=data", "--set"), f"{field}={value}"),
            field.removeprefix("model."),
        )
        for field, value in (
            *(("log_every", "0"), ("total_tokens", "abc"), ("total_tokens", "1e400"), ("betas", "5"), ("betas", "[1]")),
            *(("seed", "-1"), ("seed", "abc"), ("learning_rate", "nan"), ("nonsense", "1")),
            *(("model.lamda_max", "1"), ("model.hidden_size", "wide")),
        )
    ),
    (("train", "mini", "--out", "out", "--set", "data=data", "--set", "validation=nothing"), "nothing: expected what"),
    (("train", "xyz", "--out", "out"), "RECIPE: expected one of paper_340m"),
    (("train", "mini", "--out", "out", "--set", "data"), "--set: expected field=value, got 'data'"),
    (("train", "mini", "--out", "out", "--set", "seed=1", "--set", "seed=2"), "--set: expected one value of seed"),
    (("train", "mini", "--out", "file", "--set", "data=data"), "--out: expected a folder"),
    (("train", "mini", "--out", "out", "--set", "data=data", "--device", "gpu"), "--device"),
    (("replay", "nothing"), "nothing: expected a diverged-"),
    (("replay", "empty", "--device", "cuda:7"), "--device"),
    (("reproduce", "--scale", "x"), "--scale: expected one of mini, small, medium, paper-short, paper, tracking, "),
    (("reproduce", "--scale", "mini,x"), "recall, got 'x'; the nearest is"),
    (("reproduce", "--scale", "mini", "--settings", "s5"), "--settings: expected a scale that has several"),
    (("reproduce", "--scale", "tracking", "--settings", "s6"), "--settings: expected one of z2, z3, "),
    (("reproduce", "--scale", "tracking", "--beside", "nothing"), "--beside: expected a folder, got nothing"),
    (("reproduce", "--scale", "recall", "--needles", "pairs"), "--needles: expected a scale with S-NIAH, got recall"),
    *((("reproduce", "--out", "out", "--seeds", text), "--seeds: expected") for text in ("-1", "abc", ",")),
    *((("reproduce", "--out", "out", "--arms", text), "--arms: expected") for text in ("xyz", ",", "qed@nan")),
    *((("reproduce", "--out", "out", "--minutes", text), "--minutes") for text in ("inf", "-1", "x")),
    (("reproduce", "--out", "out", "--device", "gpu"), "--device"),
    (("reproduce", "--out", "file"), "--out: expected a folder"),
    (("reproduce", "--out", "out", "--only", "xyz"), "--only: expected"),
    (("reproduce", "--out", "out", "--words", "nothing"), "--words: expected a folder, got nothing"),
    (("reproduce", "--out", "out", "--data", "x=file"), "--data"),
    (("reproduce", "--out", "empty", "--collect", "file"), "--collect: expected a folder, got the file file"),
]


@pytest.mark.parametrize(("call", "named"), BAD_CALLS, ids=[f"{i} {x[0]}" for i, (x, _) in enumerate(BAD_CALLS)])
def test_what_is_wrong_is_named_and_nothing_is_left(
    place: Path, monkeypatch: pytest.MonkeyPatch, call: tuple[str, ...], named: str
) -> None:
    if torch.cuda.is_available() and ("cpu" in named or "--device" in call):
        pytest.skip("there is a GPU")
    monkeypatch.chdir(place)
    before = tree(place)
    result = runner.invoke(app, list(call))
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (1, 2)
    said = " ".join(result.output.replace("│", " ").split())
    assert named.encode(errors="backslashreplace").decode() in said
    assert "Traceback" not in said
    assert len(result.stderr.splitlines()) == 1 or result.exit_code == 2
    assert tree(place) == before
    assert not (place / "out").exists()


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    def broken(*_: object, **__: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr("qed.report.page.write", broken)
    result = runner.invoke(app, ["report", str(place / "empty"), "--out", str(place / "empty")])
    assert isinstance(result.exception, TypeError)


MISSING = [
    ("matplotlib", ("report", "empty"), "'qed-attention[analysis]'"),
    ("jinja2", ("look", "model", "a lamp"), "'qed-attention[analysis]'"),
    ("scipy", STRENGTH, "'qed-attention[analysis]'"),
    ("matplotlib", ("reproduce", "--out", "out"), "'qed-attention[analysis]'"),
    ("lm_eval", (*NEEDLE, "--harness", "lm-eval"), "'qed-attention[eval]'"),
    ("wonderwords", ("eval", "model", "--task", "niah_single_1", "--out", "out"), "'qed-attention[eval]'"),
    ("fla", ("bench", "ops", "--against", "fla"), "flash-linear-attention"),
    ("datasets", (*NEEDLE, "--task", "fda"), "--data: expected fda=FILE, or the `data` extra"),
]
# One process imports what takes long, and has a child for every package that is not to be found.
# Where torchao is installed, transformers imports it, and a build of it for CPUs speaks on stderr.
QUIET = "import sys; sys.modules['torchao'] = None"
CHILDREN = """
import os, sys
from qed.model.causal_lm import QEDForCausalLM
from qed.cli import app
for package, call in {calls!r}:
    child = os.fork()
    if child == 0:
        sys.modules[package] = None
        app(list(call))
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.mark.slow
def test_a_missing_package_is_said_before_the_work(place: Path) -> None:
    before = tree(place)
    code = QUIET + CHILDREN.format(calls=[(package, call) for package, call, _ in MISSING])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=place)
    assert result.stdout.split() == ["1"] * len(MISSING), result.stderr
    for said, (_, _, named) in zip(result.stderr.splitlines(), MISSING, strict=True):
        assert named in said
    assert tree(place) == before


def test_a_path_is_printed_as_it_is(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a console could take for markup, and a name that is no text."""
    monkeypatch.chdir(place)
    for name in ("o[/b]/[red]x[/red].json", "n\udcff[/].json"):
        result = runner.invoke(app, [*EIGENVALUES, "--out", name])
        assert result.exit_code == 0, result.output
        assert f"written to {name}".encode(errors="backslashreplace").decode() in result.output.replace("\n", "")
        os.remove(name)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("generate", ("hi", "--max-new-tokens", "2")),
        ("explain", ()),
        ("eval", NEEDLE[2:]),
        ("strength", (*STRENGTH[2:], "--scales", "0,1")),
        ("eigenvalues", (*EIGENVALUES[2:], "--out", "out/eigenvalues.json")),
    ],
)
def test_the_folder_of_a_run_means_its_export(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str, more: tuple[str, ...]
) -> None:
    monkeypatch.chdir(place)
    said = []
    for folder in ("run", "run/export"):
        result = runner.invoke(app, [name, folder, *more, "--device", "cpu"])
        assert result.exit_code == 0, result.output
        said.append(result.stdout)
        assert list((place / "out").rglob("*.json")) or name in ("generate", "explain")
        shutil.rmtree(place / "out", ignore_errors=True)
    if name in ("generate", "explain"):
        assert said[0] == said[1]


def test_the_folder_of_a_run_is_converted(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    QEDForCausalLM(QEDConfig.tiny(rule="gdn2", vocab_size=64)).save_pretrained(tmp_path / "run" / "export")
    for i, source in enumerate(("run", "run/export", "run/export/model.safetensors")):
        target = tmp_path / f"{i}.safetensors"
        result = runner.invoke(app, ["convert", str(tmp_path / source), str(target), "--kind", "gdn2", "--to", "fla"])
        assert result.exit_code == 0, result.output
        assert target.read_bytes() == (tmp_path / "0.safetensors").read_bytes()


def test_a_closed_output_ends_quietly() -> None:
    """Whoever reads has gone: no traceback, and a status that says so."""
    read, write = os.pipe()
    os.close(read)
    code = f"{QUIET}; from qed.cli import app; app(['doctor', '--tokens', '16', '--heads', '1', '--width', '16'])"
    result = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert result.returncode == 1
    assert result.stderr == ""


def test_control_c_ends_with_one_line(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """A signal is a KeyboardInterrupt wherever the program is."""

    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("qed.report.page.write", interrupted)
    result = runner.invoke(app, ["report", str(place / "empty"), "--out", str(place / "empty")])
    assert result.exit_code == 130
    assert result.output.strip() == "stopped by Ctrl-C"
