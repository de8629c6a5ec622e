"""Each layer imports downwards only, and importing the package loads nothing heavy."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "disconnect_watch"

#: For each layer, by its first name below the package: the layers it may import.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "native": set(),
    "keys": {"errors"},
    "ports": set(),
    "token": {"_core", "errors"},
    "records": {"token"},
    "remote": {"_core", "token"},
    "watcher": {"_core", "errors", "records", "token"},
    "aio": {"errors", "token", "watcher"},
    "adapters": {"errors", "remote", "token", "watcher", "aio"},
    "kernels": {"errors", "token"},
    "engine": {"errors", "token", "kernels"},
    "disagg": {"errors", "ports", "token"},
    "backends": {
        "_core",
        "disagg",
        "errors",
        "ports",
        "remote",
        "token",
        "engine",
        "kernels",
        "vllm_variable",
    },
    "server": {
        "errors",
        "keys",
        "ports",
        "token",
        "watcher",
        "aio",
        "adapters",
        "disagg",
        "engine",
        "backends",
    },
    "testing": {"ports"},
    "vllm_plugin": {"adapters", "backends", "vllm_variable"},
    "vllm_variable": set(),
    "stress": {"errors", "testing"},
    "doctor": {"adapters", "errors", "ports", "testing", "token", "watcher"},
    "cli": {"backends", "doctor", "engine", "errors", "keys", "ports", "server", "stress"},
    "__init__": {"_core", "errors", "native", "token", "watcher", "aio"},
}

#: Modules of others that a layer knows nothing of.
MAY_NOT_LOAD: dict[str, set[str]] = {
    "errors": {"asyncio", "socket", "torch"},
    "token": {"asyncio", "socket", "torch"},
    "records": {"asyncio", "socket", "torch"},
    "watcher": {"asyncio", "torch"},
    "aio": {"torch", "uvloop", "uvicorn", "starlette"},
    "adapters": {"torch"},
    "disagg": {"torch", "uvicorn", "starlette"},
    "engine": {"socket", "uvicorn", "starlette"},
    "server": {"torch"},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports_of(path: Path) -> Iterator[str]:
    """The dotted names that a module imports, those for the type checker left out."""
    tree = ast.parse(path.read_text())
    unseen = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    ]
    skipped = {id(inner) for node in unseen for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_imports_only_layers_below_its_own(path: Path) -> None:
    layer = layer_of(path)
    allowed = MAY_IMPORT[layer]
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "disconnect_watch":
            assert parts[0] not in MAY_NOT_LOAD.get(layer, set()), f"{path} imports {name}"
        elif len(parts) > 1 and parts[1] != layer:
            assert parts[1] in allowed, f"{path} imports {name}"


@pytest.mark.parametrize(
    "name",
    [
        "core",
        "scheduler",
        "block_pool",
        "cancel_scan",
        "ending",
        "guarded",
        "outbox",
        "prefix_cache",
        "registry",
        "remote",
        "request",
        "schedule",
        "waiting",
    ],
)
def test_scheduler_knows_no_tensors(name: str) -> None:
    path = PACKAGE / "engine" / f"{name}.py"
    assert not [module for module in imports_of(path) if module.startswith(("torch", "numpy"))]


@pytest.mark.parametrize(
    "name", ["errors", "ledger", "pins", "reaper", "records", "remembered", "retained"]
)
def test_store_of_retained_blocks_knows_neither_sockets_nor_tensors(name: str) -> None:
    path = PACKAGE / "disagg" / f"{name}.py"
    assert not [module for module in imports_of(path) if module.startswith(("socket", "numpy"))]


def test_core_in_c_knows_nothing_of_python() -> None:
    sources = sorted((PACKAGE.parent / "csrc").glob("*.[ch]"))
    assert sources
    for source in sources:
        text = source.read_text()
        assert "Python.h" not in text, source
        assert "cuda" not in text.lower(), source


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after ``statement``."""
    script = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "name", ["disconnect_watch", "disconnect_watch.testing", "disconnect_watch.doctor"]
)
def test_importing_the_package_loads_the_standard_library_alone(name: str) -> None:
    # -S: no site-packages, so anything third-party would fail to import at all.
    third_party = loaded_by(f"import {name}") - sys.stdlib_module_names
    assert {name for name in third_party if not name.startswith("_")} <= {
        "disconnect_watch",
        "cython_runtime",
    }
