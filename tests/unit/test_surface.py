"""The public names: what the documentation promises is there, and nothing by accident."""

import ast
import importlib
import inspect
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import disconnect_watch as dw
from disconnect_watch import _core

PACKAGE = Path(dw.__file__).parent

PROMISED = {
    "CancelToken",
    "ClientDisconnected",
    "ClosedError",
    "Connection",
    "DisconnectWatchError",
    "ForkedError",
    "Reason",
    "StaleWatchError",
    "UnsupportedSocketError",
    "Watcher",
    "attach",
    "get_include",
    "grace",
    "is_gone",
    "start_server",
    "start_unix_server",
    "watch",
}

#: The layers that need nothing beyond the standard library, and so load everywhere.
LIGHT = ["", ".errors", ".native", ".token", ".records", ".watcher", ".aio", ".testing"]


def test_package_exports_what_it_promises() -> None:
    assert set(dw.__all__) == PROMISED
    assert all(hasattr(dw, name) for name in PROMISED)


@pytest.mark.parametrize("name", LIGHT)
def test_what_all_names_is_there_and_documented(name: str) -> None:
    module = importlib.import_module(f"disconnect_watch{name}")
    assert inspect.getdoc(module)
    for public in module.__all__:
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert inspect.getdoc(value), f"{module.__name__}.{public} has no docstring"


@pytest.mark.parametrize("name", ["CancelToken", "Connection", "Watcher"])
def test_public_methods_are_documented(name: str) -> None:
    documented = {"arm", "disarm", "detach"}  # those of the binding that are public as they are
    for owner in getattr(dw, name).__mro__:
        for member, value in vars(owner).items():
            is_own = owner.__module__ != _core.__name__ or member in documented
            if is_own and not member.startswith("_") and owner is not object:
                assert not callable(value) or inspect.getdoc(value), f"{name}.{member}"


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__main__.py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_public_module_has_a_docstring_and_says_what_it_exports(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), path
    assigned = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert "__all__" in assigned or path.name.startswith("_"), f"{path} has no __all__"


COMPILED = ["_core", "aio._fast", "adapters._fast"]
if find_spec("starlette"):  # else these can't be imported
    COMPILED += ["backends._fast", "server.v2._fast"]


@pytest.mark.parametrize("name", COMPILED)
def test_stub_names_what_the_compiled_module_has(name: str) -> None:
    compiled = importlib.import_module(f"disconnect_watch.{name}")
    stub = ast.parse((PACKAGE / f"{name.replace('.', '/')}.pyi").read_text())
    declared: dict[str, set[str] | None] = {}
    for node in stub.body:
        if isinstance(node, ast.ClassDef):
            declared[node.name] = {
                member.name if isinstance(member, ast.FunctionDef) else ast.unparse(member.target)
                for member in node.body
                if isinstance(member, ast.FunctionDef | ast.AnnAssign)
            }
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            declared[node.name] = None
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            declared[node.target.id] = None
    own = {
        name
        for name, value in vars(compiled).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", compiled.__name__) == compiled.__name__
    }
    assert set(declared) == own
    for name, members in declared.items():
        if members is None:
            continue
        actual = {member for member in vars(getattr(compiled, name)) if not member.startswith("_")}
        assert {member for member in members if not member.startswith("_")} == actual, name
