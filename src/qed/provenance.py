"""Where a result came from: machine and versions, git's commit, the code itself, and the plan it was registered under.

git says nothing about an installed package, and "changed" says too little about an edited one. The sha256 of all files
of the package tells which code made a result, wherever it ran. Files that a user imported (`--import my_arms.py`) are
part of the code, and are named too.

A plan is registered by committing its text before anything it describes is run. What is added to it later comes after a
line `## Additions`. The plan's sha256, which every result of `qed reproduce --plan` carries, covers the text before
that line.
"""

from __future__ import annotations

import hashlib
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ADDITIONS = "## Additions"
_registered = ""
_imported: dict[str, str] = {}


def environment(device: str) -> dict[str, str]:
    """Return the versions and the device that a result depends on, by name."""

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    name = device
    if device.startswith("cuda"):
        major, minor = torch.cuda.get_device_capability(device)
        name = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    packages = ("qed-attention", "torch", "triton", "transformers", "fla-core")
    return {"python": platform.python_version(), "device": name} | {x: installed(x) for x in packages}


def occasion() -> dict[str, str]:
    """Return when this process was asked to do what: the time now, and its command line."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    begin = [Path(sys.argv[0]).name] if module is None else ["python", "-m", module.name.removesuffix(".__main__")]
    return {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "command": shlex.join([*begin, *sys.argv[1:]])}


def without_folders(command: str) -> str:
    """Return a command line in which every absolute path is its last name alone, for pages and results that are passed
    on: whose folders they were is of no use to others."""
    try:
        words = shlex.split(command)
    except ValueError:  # it was not made by `occasion`
        return command
    pairs = [word.rpartition("=") for word in words]
    shorter = [f"{name}{sign}{last_name(value)}" for name, sign, value in pairs]
    return command if shorter == words else shlex.join(shorter)


def last_name(text: str) -> str:
    """Return the last name of an absolute path; any other text as it is."""
    return Path(text).name or text if text.startswith("/") and "\n" not in text else text


def git_state() -> str:
    """Return the commit, with " changed" if files differ from it; empty outside a repository or without git."""

    def ask(*words: str) -> str:
        try:
            done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=Path(__file__).parent)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = ask("rev-parse", "HEAD")
    return commit + (" changed" if commit and ask("status", "--porcelain") else "")


@lru_cache
def code_sha256(package: Path = Path(__file__).parent) -> str:
    """Return the sha256 of the names and contents of all files of a package; of this one if none is given."""
    whole = hashlib.sha256()
    for path in sorted(x for x in package.rglob("*") if x.is_file() and "__pycache__" not in x.parts):
        for part in (path.relative_to(package).as_posix().encode(), path.read_bytes()):
            whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()


def plan_sha256(path: Path) -> str:
    """Return the sha256 of a registered plan, without what was added to it later."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--plan: expected a text file, got {path}: {error}") from error
    kept = []
    for line in text.splitlines():
        if line.strip() == ADDITIONS:
            break
        kept.append(line.rstrip())
    registered = "\n".join(kept).strip()
    if not registered:
        raise ValueError(f"--plan: expected a plan, got {path}, which has no text before {ADDITIONS!r}")
    return hashlib.sha256(registered.encode()).hexdigest()


def register(plan: str) -> None:
    """Make all later results of this process carry `plan`, the sha256 of a registered plan."""
    global _registered
    _registered = plan


def record_import(name: str, sha256: str) -> None:
    """Make all later results of this process say that a user's file of this name and sha256 is part of the code."""
    _imported[name] = sha256


def imported() -> dict[str, str]:
    """Return the sha256 of the files that were imported, by their names."""
    return dict(_imported)


def check_imported(recorded: Any, where: Path) -> None:
    """Raise ValueError unless all files with which something was made are imported now, as they were then.

    Args:
        recorded: the sha256 of files by their names, as something made earlier has it; None if it has none.
        where: what was made, for the message.
    """
    for name, sha256 in recorded.items() if isinstance(recorded, dict) else ():
        if _imported.get(name) != sha256:
            got = f"one of sha256 {_imported[name][:12]}" if name in _imported else "none"
            raise ValueError(
                f"--import: expected {name} of sha256 {str(sha256)[:12]}, with which {where} was made, got {got}"
            )


def provenance(device: str) -> dict[str, Any]:
    """Return everything that says where a result of this process comes from, as it is kept with the result."""
    code = code_sha256()
    if _imported:
        code = hashlib.sha256(" ".join([code, *sorted(_imported.values())]).encode()).hexdigest()
    origin: dict[str, Any] = {"environment": environment(device), "git": git_state(), "code": code}
    origin |= {"imported": imported()} if _imported else {}
    return origin | ({"plan": _registered} if _registered else {})
