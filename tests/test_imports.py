"""Imports point one way: ops ← rules ← … ← cli. A module may use what stands before it, never what stands after."""

import ast
from pathlib import Path

import qed

ROOT = Path(qed.__file__).parent
ORDER = [
    "files",
    "locks",
    "ops",
    "rules",
    "layers",
    "model",
    "auto",
    "data",
    "testing",
    "provenance",
    "train",
    "recipes",
    "eval",
    "analysis",
    "report",
    "bench",
    "bench_model",
    "bench_train",
    "bench_eval",
    "tune",
    "doctor",
    "reproduce",
    "cli_parts",
    "cli_eval",
    "cli_bench",
    "cli",
]


def imported(path: Path) -> set[str]:
    """First names inside qed that a file imports."""
    package = path.relative_to(ROOT.parent).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            found |= {".".join([*module, alias.name]) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in found if name.startswith("qed.")}


def test_every_module_has_a_place() -> None:
    modules = {p.stem for p in ROOT.glob("*.py")} | {p.parent.name for p in ROOT.glob("*/__init__.py")}
    assert modules - {"__init__"} == set(ORDER)


def test_imports_point_one_way() -> None:
    for path in ROOT.rglob("*.py"):
        here = path.relative_to(ROOT).with_suffix("").parts[0]
        if here != "__init__":
            allowed = {*ORDER[: ORDER.index(here) + 1], "__version__"}
            assert imported(path) <= allowed, f"{path.name} imports {imported(path) - allowed}"


def test_ops_import_torch_and_the_standard_library_alone() -> None:
    """And the kernels Triton, which nothing imports before they run."""
    import sys

    for path in (ROOT / "ops").rglob("*.py"):
        allowed = {"torch", "triton"} if path.parent.name == "triton" else {"torch"}
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in names:
                top = name.split(".")[0]
                assert top in allowed or top in sys.stdlib_module_names, f"{path.name} imports {name}"
