"""The tree keeps its shape: short modules and functions, documented, with little said twice."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import qed

ROOT = Path(qed.__file__).parent
FILES = {path: path.read_text() for path in sorted(ROOT.rglob("*.py"))}
LONGEST_MODULE, LONGEST_FUNCTION, SHARED_LINES, MOST_PAIRS = 400, 60, 6, 10
Node = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def jitted(node: Node) -> bool:
    """Whether a function is a kernel, in Triton's language."""
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def public(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Public classes, functions and methods, by name; not what is inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Node) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node, f"{prefix}{node.name}.")


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = node.args
    return [x.arg for x in (*given.posonlyargs, *given.args, *given.kwonlyargs) if x.arg not in ("self", "cls")]


def test_modules_are_short() -> None:
    assert {path.name: text.count("\n") for path, text in FILES.items() if text.count("\n") > LONGEST_MODULE} == {}


def test_functions_are_short() -> None:
    long = []
    for path, text in FILES.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and "kernels" not in path.parts:
                lines = (node.end_lineno or 0) - node.lineno + 1
                long += [f"{path.name}: {node.name}, {lines} lines"] if lines > LONGEST_FUNCTION else []
    assert long == []


def test_what_is_public_is_documented() -> None:
    """In a sentence; with Args where there are more than two parameters."""
    without = []
    for path, text in FILES.items():
        for name, node in public(ast.parse(text)):
            words = ast.get_docstring(node)
            if not words:
                without.append(f"{path.relative_to(ROOT)}: {name} has no docstring")
            elif isinstance(node, ast.ClassDef) or jitted(node):
                continue
            elif len(parameters(node)) > 2 and "Args:" not in words:
                without.append(f"{path.relative_to(ROOT)}: {name} has no Args")
    assert without == []


def test_little_is_said_twice() -> None:
    """At most ten pairs of places share six lines of code or more: signatures that have to be the same."""
    windows = defaultdict(list)
    for path, text in FILES.items():
        lines = [line.strip() for line in text.splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
        for i in range(len(lines) - SHARED_LINES + 1):
            windows[tuple(lines[i : i + SHARED_LINES])].append((path, i))
    same = {(x, y) for places in windows.values() for n, x in enumerate(places) for y in places[n + 1 :]}
    pairs = [
        (x, y) for x, y in same if ((x[0], x[1] - 1), (y[0], y[1] - 1)) not in same
    ]  # where each run of shared lines begins
    shown = [f"{x[0].relative_to(ROOT)} and {y[0].relative_to(ROOT)}" for x, y in sorted(pairs)]
    assert len(pairs) <= MOST_PAIRS, shown
