"""No generator holds threads: an error may leave it to the garbage collector.

The collector closes it at any moment, also while CPython holds the lock of its list of threads;
joining a thread then waits for that lock for ever. Seen once in a run of this suite.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import dcpstore

ROOT = Path(dcpstore.__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef


def holders(source: str) -> Iterator[str]:
    """Yield the generators that yield inside the `with` block of an executor."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, Function) and not _is_context_manager(function):
            for node in ast.walk(function):
                if isinstance(node, ast.With) and _opens_executor(node) and _yields(node):
                    yield function.name


def _is_context_manager(function: Function) -> bool:
    return any("contextmanager" in ast.unparse(one) for one in function.decorator_list)


def _opens_executor(node: ast.With) -> bool:
    return any("ThreadPoolExecutor(" in ast.unparse(item) for item in node.items)


def _yields(node: ast.With) -> bool:
    return any(isinstance(inner, ast.Yield | ast.YieldFrom) for inner in ast.walk(node))


def test_a_generator_with_threads_is_seen() -> None:
    body = "    with ThreadPoolExecutor(1) as pool:\n        yield pool\n"
    assert list(holders(f"def read():\n{body}")) == ["read"]
    assert not list(holders(f"@contextmanager\ndef read():\n{body}"))


def test_no_generator_of_ours_holds_threads() -> None:
    sources = {path: path.read_text() for path in ROOT.rglob("*.py")}
    assert any("ThreadPoolExecutor(" in text for text in sources.values())
    assert not {path: found for path, text in sources.items() if (found := list(holders(text)))}
