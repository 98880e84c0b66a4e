"""What the site has beyond the pages of this folder: files of the repository that pages link to, and the reference of
the command line, which is made from the commands themselves."""

from __future__ import annotations

import io
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from rich.console import Console
from typer.main import get_command

ROOT = Path(__file__).parent.parent
# Files outside this folder that pages may link to. On the site they stand below `repository/`, at their own paths.
SHOWN = (
    *("CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "LICENSE", "benchmarks/NOTES.md", "benchmarks/results/*.json"),
    *(
        "benchmarks/results/*.svg",
        "results/*.md",
        "results/*/*.md",
        "results/*/state_norms.json",
        "results/*/figures/*.png",
    ),
    "examples/*",
)
PLACE = "repository"
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s:]+)(?=[)#])")
COMMANDS = "<!-- commands -->"
GROWTH = "<!-- growth -->"
GROWN = ROOT / "benchmarks" / "results" / "growth_h200.json"  # as `qed bench growth --out` writes it


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository that are shown; a script becomes a page, since browsers would save it."""
    for pattern in SHOWN:
        for path in sorted(x for x in ROOT.glob(pattern) if x.is_file()):
            uri = f"{PLACE}/{path.relative_to(ROOT).as_posix()}"
            if path.suffix == ".py":
                page = f"# {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
                files.append(File.generated(config, f"{uri}.md", content=page))
            else:
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links that leave this folder lead to `repository/`, and those from there to pages come back."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, "\n".join(reference()))
    markdown = markdown.replace(GROWTH, grown(GROWN))
    here = posixpath.dirname(page.file.src_uri)
    inside = page.file.src_uri.startswith(f"{PLACE}/")

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, match["path"]))
        if inside and target.startswith(f"{PLACE}/docs/"):
            target = target.removeprefix(f"{PLACE}/docs/")
        elif target.startswith("../"):
            target = f"{PLACE}/{target.removeprefix('../')}"
        elif not inside:
            return match["path"]
        script = target.startswith(f"{PLACE}/") and target.endswith(".py")
        return posixpath.relpath(f"{target}.md" if script else target, here or ".")

    return LINK.sub(moved, markdown)


def grown(file: Path) -> str:
    """The tables that `qed bench growth` wrote beside a file; nothing where there is no such file."""
    return file.with_suffix(".md").read_text(encoding="utf-8") if file.exists() else ""


def reference() -> Iterator[str]:
    """The lines of a page about every command: what it does, how it is called, its arguments and options."""
    from qed.cli import app

    yield from _described("qed", get_command(app))


def _described(path: str, command: Any) -> Iterator[str]:
    """The lines about a command, and about those below it."""
    context = command.context_class(command, info_name=path)
    usage = " ".join(command.get_usage(context).split()).removeprefix("Usage: ")
    usage = re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), usage)
    yield from (f"## {path}", "", _plain(command.help), "", "```text", usage, "```", "")
    rows = [_row(parameter) for parameter in command.params]
    if rows:
        yield from ("| | | default |", "|---|---|---|", *rows, "")
    if path == "qed train":
        yield from ("```text", *_recipes(), "```", "")
    if command.epilog:
        yield from _example(command.epilog)
    for name, other in getattr(command, "commands", {}).items():
        yield from _described(f"{path} {name}", other)


def _recipes() -> list[str]:
    """The lines of the tables that `qed train --help` shows below its options."""
    from qed.cli.recipes import print_recipes

    lines = io.StringIO()
    print_recipes(Console(file=lines, width=100))
    return [line.rstrip() for line in lines.getvalue().rstrip().splitlines()]


def _example(epilog: str) -> Iterator[str]:
    """The lines of an epilog: the command after "Example:" as a block, and what stands before it as text."""
    said, _, example = epilog.partition("Example: ")
    if said.strip():
        yield from (_plain(said), "")
    if example:
        yield from ("```sh", example.strip(), "```", "")


def _row(parameter: Any) -> str:
    """The row of an argument or option in its command's table."""
    argument = parameter.param_type_name == "argument"
    names = [parameter.name.upper()] if argument else [*parameter.opts, *parameter.secondary_opts]
    default = parameter.default
    shown = "required" if parameter.required else "" if default in (None, False, "") else f"`{default}`"
    return f"| {', '.join(f'`{name}`' for name in names)} | {_plain(parameter.help)} | {shown} |"


def _plain(text: str | None) -> str:
    """Help as one line of markdown, in which a bar, a star or a bracket is no markup."""
    return re.sub(r"([|*<_])", r"\\\1", " ".join((text or "").split()))
