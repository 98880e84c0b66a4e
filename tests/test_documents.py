"""The documents tell the truth: their Python runs, their commands are those of the command line, their links lead
somewhere, and the site of them can be built and looked at."""

import importlib.util
import os
import re
import resource
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from typer.main import get_command

from qed.cli import app
from qed.eval.harness.suites import SUITES
from qed.eval.tasks import TASKS
from qed.recipes import build
from qed.recipes.arms import Arm
from qed.reproduce.plan import PLANS
from qed.rules import RULES
from qed.train.loggers import LOGGERS

from .browser import opened
from .documents import BLOCK, PAGES, ROOT, blocks, commands, inline, name
from .marks import slow

TRAINED = ("docs/tutorials/mini.md",)  # whose Python needs what its commands have trained
LONG = ("docs/tutorials/finetune.md", "docs/howto/quantise.md")
WITH_PYTHON = [x for x in PAGES if any(y.language == "python" for y in blocks(x)) and name(x) not in TRAINED]
WITH_COMMANDS = [x for x in PAGES if inline(x) or any(y.language == "sh" for y in blocks(x))]
BUILD = ROOT / "docs" / "build.py"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_block_escapes(page: Path) -> None:
    """Every block is Python, which runs, or commands, which are read, or text that is neither."""
    assert {x.language for x in blocks(page)} <= {"python", "sh", "text"}
    left = BLOCK.sub("", page.read_text())
    assert "```" not in left
    assert not re.search(r"^ {4}(qed|make|pip|python|torchrun|import|from) ", left, re.M)


@pytest.mark.parametrize(
    "page", [*(x for x in WITH_PYTHON if name(x) not in LONG), *slow(*(ROOT / x for x in LONG))], ids=name
)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom, in an empty folder; the assertions in it hold."""
    monkeypatch.chdir(tmp_path)
    rules, loggers, scope = dict(RULES), dict(LOGGERS), dict[str, Any]()
    try:
        for block in blocks(page):
            if block.language == "python":
                exec(compile(block.code, name(page), "exec"), scope)
    finally:
        for table, before in ((RULES, rules), (LOGGERS, loggers)):
            table.clear()
            table.update(before)


def called(words: list[str]) -> tuple[str, Any, list[str]]:
    """The path of the command that words after `qed` call, the command, and the words that are left for it."""
    path, command = "qed", get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        path, command, words = f"{path} {words[0]}", command.commands[words[0]], words[1:]
    return path, command, words


def check_names(words: list[str]) -> None:
    """A command in a sentence, which may be cut short: there is such a command, with these options."""
    path, command, rest = called(words)
    known = {"--help", *(y for x in command.params for y in (*x.opts, *x.secondary_opts))}
    assert {x for x in rest if re.match("--[a-z]", x)} <= known, path
    assert not hasattr(command, "commands") or not rest or rest[0].startswith("-"), f"{rest[0]}: not a command"


def check_qed(words: list[str]) -> None:
    """A whole command: its parser takes it, nothing that it needs is missing, and what it names is there."""
    path, command, rest = called(words)
    parser = command.make_parser(command.context_class(command, info_name=path))
    given, beyond, _ = parser.parse_args(list(rest))
    assert not beyond, f"{beyond[0]}: not an argument of {path}"
    missing = [x.name for x in command.params if x.required and given.get(x.name) is None]
    assert not missing, f"{path}: {missing[0]} is missing"
    if path == "qed train":
        changes = dict(x.split("=", 1) for x in given.get("set_") or [])
        build(given["recipe"], {"data": "data"} | changes)
    elif path == "qed reproduce":
        assert {*(given.get("scale") or "mini").split(",")} <= PLANS.keys()
        arms = given.get("arms") or "all"
        assert arms == "all" or [Arm.parse(x).name for x in arms.split(",")] == arms.split(",")
    elif path in ("qed eval", "qed strength") and not given.get("harness"):
        assert {y for x in given.get("task") or [] for y in x.split(",")} <= set(TASKS)
        assert {y for x in given.get("suite") or [] for y in x.split(",")} <= set(SUITES)


def check(words: list[str]) -> None:
    """A command that a page tells its readers to type."""
    program, *rest = words
    if "&&" in words:
        at = words.index("&&")
        check(words[:at])
        check(words[at + 1 :])
    elif program == "qed":
        check_qed(rest)
    elif program == "torchrun":
        at = rest.index("-m")
        assert rest[at + 1] == "qed.cli"
        check_qed(rest[at + 2 :])
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
        assert {x for x in rest if "=" not in x} <= set(targets)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert {y for x in rest for y in re.findall(r"\[(.*)\]", x)} <= set(extras)
    elif program == "python":
        assert (ROOT / rest[0]).exists(), rest[0]
    else:
        assert words == ["source", ".venv/bin/activate"]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_the_commands_of_a_page_are_those_of_the_program(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "query-only", RULES["gdn2"])  # the arm that two pages add
    for block in blocks(page):
        if block.language == "sh":
            for words in commands(block.code):
                check(words)
    for said in inline(page):
        (words,) = commands(said)
        check_names(words[1:])


@pytest.mark.slow
@pytest.mark.parametrize("page", [ROOT / x for x in TRAINED], ids=name)
def test_a_tutorial_that_trains_works_as_printed(page: Path, tmp_path: Path) -> None:
    """Its commands one after the other, in an empty folder, and then its Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    code = {language: "".join(x.code for x in blocks(page) if x.language == language) for language in ("sh", "python")}
    for command in (["bash", "-euo", "pipefail", "-c", code["sh"]], [sys.executable, "-c", code["python"]]):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert (tmp_path / "report" / "report.html").exists()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    """As the pages stand in the repository, without the site."""
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", BLOCK.sub("", page.read_text())):
        assert (page.parent / target).exists(), target


def test_the_figure_is_what_its_script_draws() -> None:
    script = ROOT / "docs" / "figures" / "mechanism.py"
    spec = importlib.util.spec_from_file_location("mechanism", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert script.with_suffix(".svg").read_text(encoding="utf-8") == module.drawing()


def test_documents_without_their_packages_say_what_to_install(tmp_path: Path) -> None:
    """-S leaves out everything that was installed."""
    site = tmp_path / "site"
    command = [sys.executable, "-E", "-S", str(BUILD), "--site-dir", str(site)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "mkdocs" in done.stderr
    assert "pip install -e '.[docs]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not site.exists()


@pytest.mark.slow
def test_a_build_that_fails_leaves_the_site_that_was_there(tmp_path: Path) -> None:
    """And nothing beside it. A page with a broken link is enough."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text("site_name: x\nvalidation: {links: {not_found: warn}}\n")
    command = [sys.executable, str(BUILD), "--config-file", str(tmp_path / "mkdocs.yml")]
    command += ["--site-dir", str(tmp_path / "site")]
    statuses = []
    for text in ("# Whole\n", "# Broken\n\n[nowhere](nowhere.md)\n", "# Whole again\n"):
        (tmp_path / "docs" / "index.md").write_text(text)
        statuses.append(subprocess.run(command, capture_output=True).returncode)
        assert "Broken" not in (tmp_path / "site" / "index.html").read_text()
        assert {x.name for x in tmp_path.iterdir()} == {"docs", "mkdocs.yml", "site"}
    assert statuses == [0, 1, 0]
    assert "Whole again" in (tmp_path / "site" / "index.html").read_text()


def test_the_tree_names_everything_at_the_top_and_every_folder() -> None:
    tree, package = (ROOT / "docs" / "reference" / "tree.md").read_text(), ROOT / "src" / "qed"
    files = {x.name for x in package.glob("*.py") if not x.name.startswith("__")}
    folders = {f"{x.parent.name}/" for x in package.rglob("__init__.py")}
    assert {x for x in files | folders if x not in tree} == set()


class Addresses(HTMLParser):
    """The places of a page that links can lead to, and where its own links and images lead."""

    def __init__(self, page: Path):
        super().__init__()
        self.places, self.targets = set[str](), list[str]()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {key: value for key, value in attributes if value}
        self.places |= {given[x] for x in ("id", "name") if x in given}
        self.targets += [given[x] for x in ("href", "src") if x in given]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "site"
    begun = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, str(BUILD), "--site-dir", str(folder)], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)  # of this core: others may be at work on the machine
    assert ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime < 60
    return folder


@pytest.mark.slow
def test_every_link_of_the_site_leads_to_a_place(site: Path) -> None:
    pages = {page: Addresses(page) for page in site.rglob("*.html") if page.name != "404.html"}
    assert len(pages) > 30
    broken = []
    for page, addresses in pages.items():
        for target in addresses.targets:
            path, _, place = unquote(target).partition("#")
            there = (page.parent / path).resolve() if path else page.resolve()
            if re.match("[a-z]+:", target):
                broken += [(page.name, target)] if not target.startswith(("data:", "mailto:")) else []
            elif not there.exists() or (place and there in pages and place not in pages[there].places):
                broken.append((page.name, target))
    assert broken == []


@pytest.mark.slow
def test_the_site_in_a_browser(site: Path) -> None:
    """No message in the console, no request to anywhere else, no image missing, no page wider than a phone; and
    search finds something, though the pages were opened from a folder."""
    pages = sorted(x for x in site.rglob("*.html") if x.name != "404.html")  # which is for servers
    with opened(site / "index.html") as tab:
        tab.run("document.querySelector('.md-search__input').focus()")
        tab.send("Input.insertText", text="strength")
        tab.press("ArrowRight")  # search looks at what was typed when a key is let go
        found = "document.querySelector('.md-search-result__item')"
        assert tab.run(f"new Promise(told => setInterval(() => {found} && told('found'), 50))") == "found"
        for width, dark in ((390, True), (1280, False)):
            tab.open(pages[0], dark=dark, width=width, height=900)
            for page in pages:
                tab.send("Page.navigate", url=page.as_uri())
                tab.run(
                    "new Promise(told => document.readyState === 'complete' ? told() : addEventListener('load', told))"
                )
                assert tab.overflow() <= 0, (page.name, width)
                assert tab.run("[...document.images].filter(x => !x.complete || !x.naturalWidth).map(x => x.src)") == []
                assert tab.messages == [], page.name
    assert {x.partition(":")[0] for x in tab.requests} == {"file"}
