"""Where a result came from: machine and versions, git's commit, the code itself, and the plan it was registered under.

git says nothing about a package that is installed, and "changed" says too little about one that is edited; the sha256
of all files of the package tells which code made a result, wherever it ran. A plan is registered by committing a text
before anything it describes is run; what is added to it later comes after a line `## Additions`, and its sha256, which
every result of `qed reproduce --plan` carries, is of what stands before that line.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from .testing import environment, git_state

ADDITIONS = "## Additions"
_registered = ""


@lru_cache
def code_sha256(package: Path = Path(__file__).parent) -> str:
    """Of the names and contents of all files of this package."""
    whole = hashlib.sha256()
    for path in sorted(x for x in package.rglob("*") if x.is_file() and "__pycache__" not in x.parts):
        for part in (path.relative_to(package).as_posix().encode(), path.read_bytes()):
            whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()


def plan_sha256(path: Path) -> str:
    """Of a registered plan, without what was added to it later."""
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
    """From now on, results of this process carry the sha256 of this plan."""
    global _registered
    _registered = plan


def provenance(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"environment": environment(device), "git": git_state(), "code": code_sha256()}
    return found | ({"plan": _registered} if _registered else {})
