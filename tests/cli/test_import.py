"""`--import my_arms.py`: arms of one's own in every command, without editing the package."""

import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qed import RULES, provenance
from qed.analysis.results import survey
from qed.cli import app
from qed.provenance import code_sha256
from qed.recipes import RECIPES
from qed.recipes.importing import FILES
from qed.recipes.paper import ARMS
from qed.reproduce.plan import PLANS, Files, Plan, mini
from qed.train.loggers import LOGGERS

from ..documents import blocks
from .test_training import few_documents, words

__all__ = ["few_documents"]
runner = CliRunner()
README = Path(__file__).parents[2] / "README.md"
EVAL = ("--task", "pairs", "--lengths", "32", "--samples", "2", "--device", "cpu")
NEW = 'from qed.rules import RULES, Rule\nRULES["mine"] = Rule(erase_vector="b⊙k")\n'


def forget() -> None:
    """As in a new process."""
    FILES.clear()
    provenance._imported.clear()
    for name in [x for x in sys.modules if x.startswith("qed_imported_")]:
        del sys.modules[name]
    for name in ("query-only", "mine"):
        RULES.pop(name, None)


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    forget()


def call(*given: object, status: int = 0) -> str:
    """What a command says, in a process of its own as far as imported files go."""
    forget()
    result = runner.invoke(app, [str(word) for word in given])
    assert result.exit_code == status, result.output
    return " ".join(result.output.split())


@pytest.fixture
def arms() -> Path:
    """The file that the README shows, as it is written there."""
    block = re.search(r"Add an arm.*?```python\n(.*?)```", README.read_text(), re.S)
    assert block is not None
    Path("my_arms.py").write_text(block[1])
    return Path("my_arms.py")


def own(out: Path, *more: object) -> list[object]:
    """The command of a short run of the arm."""
    return [*words(out, arm="query-only"), "--import", "my_arms.py", *more]


@pytest.mark.usefixtures("few_documents")
def test_the_arm_of_the_readme_is_trained_and_evaluated(arms: Path) -> None:
    run = Path("runs/mine")
    said = call(*own(run))
    assert "finished: " in said
    imported = {"my_arms.py": hashlib.sha256(arms.read_bytes()).hexdigest()}
    about = json.loads((run / "config.json").read_text())
    assert about["imported"] == imported
    assert about["code"] != code_sha256()  # the file is part of the code
    call("eval", run, *EVAL, "--import", arms)
    assert json.loads((run / "eval" / "pairs-32.json").read_text())["provenance"]["imported"] == imported
    call("eigenvalues", run, "--data", run / "validation", "--tokens", "100", "--import", arms)
    assert "query-only" in call("explain", run, "--import", arms)
    call("generate", run, "The", "--max-new-tokens", "2", "--import", arms, "--device", "cpu")
    assert "written: look.html" in call("look", run, "The baker forgot a lamp", "--import", arms, "--device", "cpu")
    (read,), problems = survey(Path("runs"))
    assert (read.arm, problems) == ("query-only", [])


@pytest.mark.usefixtures("few_documents")
def test_a_checkpoint_never_names_the_file_that_is_run(arms: Path) -> None:
    call(*own(Path("run")))
    for command in (
        ("eval", "run", *EVAL),
        ("generate", "run", "The"),
        ("explain", "run"),
        words(Path("run"), arm="query-only"),
    ):
        said = call(*command, status=1)
        assert "got 'query-only'; the nearest is" in said
        assert "`--import FILE` adds those of a file of yours" in said


@pytest.mark.usefixtures("few_documents")
def test_a_run_is_resumed_with_the_same_file_only(arms: Path) -> None:
    call(*own(Path("run")))
    assert "resuming at step 10" in call(*own(Path("run")))
    text = arms.read_text()
    arms.write_text(text.replace("x.b * x.q", "x.b * x.k"))
    said = call(*own(Path("run")), status=1)
    assert "--import: expected my_arms.py of sha256" in said
    assert "with which run was made, got one of sha256" in said


def tiny(files: Files) -> Plan:
    """A reproduction that takes seconds."""
    steps = {"total_tokens": "1024", "decay_start_tokens": "512", "batch_tokens": "512", "micro_tokens": "512"}
    return dataclasses.replace(
        mini(files),
        changes=steps | {"validation_tokens": "512"},
        source="synthetic:300",
        held_out=4,
        lengths=(64,),
        samples=2,
        strength_lengths=(64,),
        eigenvalue_samples=500,
        positions=128,
        position_rows=2,
    )


@pytest.mark.slow
def test_a_reproduction_has_it_in_its_processes(arms: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANS, "mini", tiny)
    command = ("reproduce", "--arms", "gdn2,query-only", "--out", "out", "--device", "cpu")
    said = call(*command, "--import", arms)
    assert "query-only-0: done in" in said
    assert "100% done" in said
    imported = {"my_arms.py": hashlib.sha256(arms.read_bytes()).hexdigest()}
    assert json.loads(Path("out/plan.json").read_text())["imported"] == imported
    for unit in ("gdn2-0", "query-only-0"):
        assert json.loads(Path(f"out/runs/{unit}/config.json").read_text())["imported"] == imported
    assert "got 'query-only'; the nearest is" in call(*command, status=1)  # nothing says which file has it
    assert "--import: expected my_arms.py of sha256" in call(*command[:2], "gdn2", *command[3:], status=1)
    Path("more.py").write_text(NEW)  # arms and files may be added
    call(*command[:2], "gdn2,query-only,mine", *command[3:], "--import", arms, "--import", "more.py", "--status")
    arms.write_text(arms.read_text() + "\n")
    assert "--import: expected my_arms.py of sha256" in call(*command, "--import", arms, status=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nprint(undefined)\n", "mine.py, line 2: NameError: name 'undefined' is not defined"),
        ("x = (\n", "mine.py, line 1: SyntaxError: '(' was never closed"),
        ("import nowhere_to_be_found\n", "mine.py, line 1: ModuleNotFoundError: No module named"),
        ("raise SystemExit(0)\n", "mine.py, line 1: SystemExit: 0"),
        (NEW.replace("mine", "qed"), "mine.py changes the rule 'qed'; expected one with a name of its own"),
        (NEW + 'del RULES["gdn2"]\n', "mine.py changes the rule 'gdn2'"),
        (NEW + 'RULES["other"] = 3\n', "expected a Rule for the rule 'other', got 3"),
        (NEW.replace('"mine"', '"a,b"'), "got 'a,b'"),
        (NEW + "from qed.recipes import RECIPES\nRECIPES['mini'] = print\n", "changes the recipe 'mini'"),
        (None, "expected a Python file, got mine.py: No such file or directory"),
    ],
)
def test_a_file_that_is_none_adds_nothing(text: str | None, message: str) -> None:
    before = dict(RULES), dict(RECIPES), dict(ARMS)
    if text is not None:
        Path("mine.py").write_text(text)
    said = call(*words(Path("run")), "--import", "mine.py", status=1)
    assert "--import: " in said
    assert message in said
    assert before == (RULES, RECIPES, ARMS)
    assert not Path("run").exists()
    assert provenance.imported() == {}


def test_two_files_of_one_name_are_refused() -> None:
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "mine.py").write_text(NEW if folder == "a" else "x = 1\n")
    both = ("--import", "a/mine.py", "--import", "b/mine.py")
    said = call(*words(Path("run")), *both, status=1)
    assert "--import: expected files of different names and contents, got another mine.py: b/mine.py" in said


@pytest.mark.usefixtures("few_documents")
def test_the_logger_of_the_documents_is_taken_and_goes_on() -> None:
    page = README.parent / "docs" / "howto" / "train.md"
    (block,) = [x.code for x in blocks(page) if "LOGGERS" in x.code]
    Path("my_logger.py").write_text(block)
    command = [*words(Path("run"), loggers="losses"), "--import", "my_logger.py"]
    try:
        call(*command)
        rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
        assert Path("run/losses.txt").read_text() == "".join(f"{row['step']} {row['loss']}\n" for row in rows)
        LOGGERS.pop("losses")
        said = call(*command[:-2], status=1)
        assert "got 'losses'; the nearest is" in said
        assert "`--import FILE` adds those of a file of yours" in said
    finally:
        LOGGERS.pop("losses", None)


def test_a_recipe_of_ones_own() -> None:
    Path("mine.py").write_text(
        "from qed.recipes import RECIPES\nfrom qed.recipes.small import mini\n\n\n"
        "def narrow(data: str, seed: int = 0):\n    return mini(data, 'gdn2', seed)\n\n\nRECIPES['narrow'] = narrow\n"
    )
    try:
        said = call("train", "narrow", "--import", "mine.py", "--set", "data=x", "--out", "run", "--dry-run")
        assert "mini-gdn2-0" in said
    finally:
        RECIPES.pop("narrow", None)
