"""What a shell offers after Tab: commands, options, and the names that commands take."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qed.cli import app
from qed.eval.tasks import TASKS
from qed.recipes import RECIPES
from qed.recipes.paper import ARMS
from qed.reproduce.plan import PLANS

# A line that is typed, and what is offered for its last word; after a comma, the whole word is.
TYPED = {
    "qed tra": ["train"],
    "qed bench mo": ["model"],
    "qed train mi": ["mini"],
    "qed train ": list(RECIPES),
    "qed train mini --dry": ["--dry-run"],
    "qed train mini --set total": ["total_tokens="],
    "qed train mini --set arm=qed-r": ["arm=qed-rand"],
    "qed train mini --set loggers=wandb,ten": ["loggers=wandb,tensorboard"],
    "qed train mini --set seed=": [],
    "qed reproduce --arms gdn2,qed-n": [f"gdn2,{x}" for x in ARMS if x.startswith("qed-n")],
    "qed reproduce --scale pa": [x for x in PLANS if x.startswith("pa")],
    "qed eval runs/mini --task niah_s": [x for x in TASKS if x.startswith("niah_s")],
}


@pytest.mark.parametrize("line", TYPED)
def test_what_is_offered(line: str) -> None:
    words = {"bash": {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}}
    words["zsh"] = {"_TYPER_COMPLETE_ARGS": line}
    words["fish"] = words["zsh"] | {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    for shell, said in words.items():
        result = CliRunner().invoke(app, [], prog_name="qed", env={"_QED_COMPLETE": f"complete_{shell}"} | said)
        shown = result.output
        if shell == "zsh":
            found = [x.split('"')[1] for x in shown.splitlines() if '"' in x]
        else:
            found = [x.split("\t")[0] for x in shown.split("\n") if x]
        assert found == TYPED[line], shell


@pytest.fixture
def program(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell that finds `qed`, with a home of its own."""
    script = tmp_path / "bin" / "qed"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nfrom qed.cli import app\n\napp()\n")
    script.chmod(0o755)
    path = os.pathsep.join([str(script.parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "TERM": "dumb"}


# How a shell itself is asked what it would offer, with the script that qed gives it.
BASH = """
eval "$(qed --show-completion bash)"; COMP_WORDS=({line}); COMP_CWORD={last}
_qed_completion qed; printf "%s\\n" "${{COMPREPLY[@]}}"
"""
FISH = """
qed --show-completion fish | source; complete -C "{line}"
"""
ZSH = """
autoload -U compinit; compinit -u; eval "$(qed --show-completion zsh)"
_arguments() {{ print -r -- "$@" }}
words=({line}); CURRENT=$#words; _qed_completion; print $_comps[qed]
"""
ASKED = {"bash": BASH, "fish": FISH, "zsh": ZSH}


@pytest.mark.slow
@pytest.mark.parametrize("shell", ASKED)
def test_in_the_shell_itself(shell: str, program: dict[str, str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    program["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"  # so that the shell can be named
    for line, offered in (("qed train mi", "mini"), ("qed reproduce --arms qed-r", "qed-rand")):
        text = ASKED[shell].format(line=line, last=line.count(" "))
        done = subprocess.run([shell, "-c", text], env=program, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert offered in done.stdout, done.stdout + done.stderr
        assert "gdn2" not in done.stdout
        assert shell != "zsh" or done.stdout.rstrip().endswith("_qed_completion")
