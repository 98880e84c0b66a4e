"""A newcomer's path: a clean clone, and the README's commands as they stand there.

Only the installation of other packages is not repeated: the clone's `.venv` finds those of the environment that runs
the tests, and has the clone itself installed. So `make` takes it as set up; what its own set-up would do is looked at
without doing it.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from qed.data.synthetic import VALUES

from .browser import CHROMIUM, opened
from .documents import ROOT, blocks, commands, inline

README = ROOT / "README.md"
LEFT_OUT = ["make test"]  # which is what is running
PATIENCE = 3600  # seconds for a command, on a machine that does much else


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clean clone of the commit that is checked out, ready to use."""
    folder = tmp_path / "qed"
    cloned = subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], capture_output=True, text=True)
    if cloned.returncode:
        pytest.skip(f"no clone of this tree: {cloned.stderr.strip()}")
    venv = folder / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = next(venv.glob("lib/python*/site-packages"))
    (site / "packages_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = "-m pip install --quiet --no-deps --no-build-isolation --ignore-installed --editable ."
    subprocess.run([str(venv / "bin" / "python"), *install.split()], cwd=folder, check=True, env=environment())
    (venv / ".ready").touch()
    return folder


def environment() -> dict[str, str]:
    """The environment of a new shell: without what the tests set for themselves, but for one thread a process, because
    other tests run beside this one, and threads that wait for one another slow both down many times over."""
    ours = ("PYTHONPATH", "TRITON_INTERPRET", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in ours and not name.startswith("PYTEST_")}


def typed(text: str, folder: Path) -> str:
    """What a shell in the folder prints when this is typed into it, up to the first command that fails."""
    shell = ["bash", "-euo", "pipefail", "-c", text]
    result = subprocess.run(shell, cwd=folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, f"{text}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout


def as_printed(block: str) -> str:
    """The lines of a block of commands, but for those that are left out."""
    return "\n".join(x for x in block.splitlines() if [" ".join(y) for y in commands(x)] != LEFT_OUT)


def check_page(page: Path, most: int, *words: str) -> None:
    """A page is whole, at most so many bytes long, says these words, and a browser has nothing to complain of."""
    text = page.read_text()
    assert len(text.encode()) <= most
    assert text.rstrip().endswith("</html>")
    for word in words:
        assert word in text, word
    if CHROMIUM:
        with opened(page) as tab:
            assert tab.run("document.body.innerText.length") > 500
        assert tab.messages == []


@pytest.mark.slow
def test_the_readmes_commands_from_a_clean_clone(clone: Path) -> None:
    """`make reproduce`, the report, a model of one's own, `qed look`, an arm of one's own."""
    first, *others = [x.code for x in blocks(README) if x.language == "sh"]
    assert ["make", "reproduce"] in commands(first)
    typed(as_printed(first), clone)
    report = clone / re.search(r"The report is `(.*?)`", README.read_text())[1]
    check_page(report, 3_000_000, "QED", "GDN-2", 'href="look.html"')
    check_page(report.with_name("look.html"), 5_000_000, "Remember")

    assert any(x[:2] == ["qed", "look"] for block in others for x in commands(block))
    for block in others:
        typed(as_printed(block), clone)
    look = next(x for block in others for x in commands(block) if x[:2] == ["qed", "look"])
    check_page(clone / look[look.index("--out") + 1], 5_000_000, "kinu")

    arm = next(x.code for x in blocks(README) if x.language == "python" and "RULES[" in x.code)
    (clone / "my_arms.py").write_text(arm)
    name = re.search(r'RULES\["(.*?)"\]', arm)[1]
    own = [x for x in inline(README) if "--import my_arms.py" in x]
    assert own
    activate = next(x for block in others for x in block.splitlines() if x.startswith("source "))
    for command in own:
        typed(f"{activate}\n{command}", clone)
        words = shlex.split(command)
        configs = (clone / words[words.index("--out") + 1]).rglob("export/config.json")
        assert name in {json.loads(x.read_text())["rule"] for x in configs}
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True)
    assert {x[3:] for x in changed.stdout.splitlines()} <= {"my_arms.py", "look.html"}


@pytest.mark.slow
def test_the_demo_ends_with_a_page(clone: Path) -> None:
    printed = typed("make demo", clone)
    answer = re.search(r"^\S+ generate .*\n(\w+)\n", printed, re.M)[1]
    assert answer in VALUES  # it has learned that a value follows
    page = Path(re.search(r"file://(\S+)", printed)[1])
    assert page.is_relative_to(clone)
    check_page(page, 5_000_000, "kinu")


def planned(target: str, folder: Path) -> list[str]:
    """The commands that `make` would run for a target in a tree without a `.venv`."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    printed = subprocess.run(["make", "-n", target], cwd=folder, capture_output=True, text=True, check=True).stdout
    return [x for x in printed.splitlines() if not x.startswith("make")]


def test_make_sets_up_what_is_pinned(tmp_path: Path) -> None:
    """Torch of the one version first, then what the main job needs, and only for the tests what they need."""
    lines = planned("reproduce", tmp_path)
    torch, package = (x for x in lines if " pip install " in x)
    assert "grep '^torch==' constraints.txt" in torch
    assert re.search(r"^torch==\d", (ROOT / "constraints.txt").read_text(), re.M)
    assert "-e '.[analysis]' -c constraints.txt" in package
    assert lines.index(torch) < lines.index(package) < lines.index(".venv/bin/qed reproduce")
    tested = planned("test", tmp_path)
    assert tested[: lines.index(package) + 1] == lines[: lines.index(package) + 1]
    assert "-e '.[dev]' -c constraints.txt" in next(x for x in reversed(tested) if " pip install " in x)
