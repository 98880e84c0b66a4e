"""Imports point one way: ops ← rules ← … ← cli. A module may use what stands before it, never what stands after."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import qed

ROOT = Path(qed.__file__).parent
ORDER = [
    "choices",
    "files",
    "locks",
    "provenance",
    "pages",
    "routes",
    "ops",
    "rules",
    "kernels",
    "layers",
    "model",
    "explaining",
    "auto",
    "serving",
    "data",
    "train",
    "recipes",
    "eval",
    "analysis",
    "report",
    "reproduce",
    "testing",
    "doctor",
    "bench",
    "cli",
    "__main__",
]


def imported(path: Path) -> set[str]:
    """First names inside qed that a file imports, but for those it imports for types alone."""
    package = path.relative_to(ROOT.parent).with_suffix("").parts[:-1]
    found, tree = set(), ast.parse(path.read_text())
    tree.body = [x for x in tree.body if not (isinstance(x, ast.If) and ast.unparse(x.test) == "TYPE_CHECKING")]
    for node in ast.walk(tree):
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


def outside(path: Path) -> set[str]:
    """First names outside qed that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_ops_import_torch_and_the_standard_library_alone() -> None:
    for path in (ROOT / "ops").rglob("*.py"):
        assert outside(path) <= {"torch", *sys.stdlib_module_names}, path.name


def test_triton_is_imported_by_kernels_alone() -> None:
    """And there by the code that launches a kernel only when it does."""
    with_triton = {path for path in ROOT.rglob("*.py") if "triton" in outside(path)}
    assert {path.relative_to(ROOT).parts[0] for path in with_triton} == {"kernels"}
    launching = {path for path in (ROOT / "kernels").rglob("*.py") if path not in with_triton}
    names = {".".join(("qed", *path.relative_to(ROOT).with_suffix("").parts)) for path in with_triton}
    assert {path.name for path in launching} == {
        "__init__.py",
        "launch.py",
        "launching.py",
        "memory.py",
        "operator.py",
        "projected.py",
        "settings.py",
    }
    code = f"import sys, qed, qed.layers, qed.model; print(sorted({names} & sys.modules.keys()))"
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert alone.stdout.strip() == "[]"


def test_kernels_are_reached_through_the_tables_of_routes() -> None:
    reaching = {str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py") if "kernels" in imported(p)}
    # Where a user chooses or sees the launch settings.
    settings = {"__init__.py", "bench/tune.py", "bench/tune_process.py", "doctor.py"}
    assert {name for name in reaching if not name.startswith("kernels/")} == {
        "layers/making.py",
        "layers/routes.py",
        "layers/obstacles.py",
        *settings,
    }
    naming = {str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py") if re.search(r"\bkernel\(", p.read_text())}
    assert {name for name in naming if not name.startswith("kernels/")} == {"routes.py", "ops/operators.py"}
