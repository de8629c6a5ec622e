"""Compiles the C parts of the benchmarks into bench/build, when they are newer than it."""

import os
import subprocess
import tempfile
from pathlib import Path

__all__ = ["CompileError", "build_library", "build_program"]

BENCH_DIR = Path(__file__).parent
CSRC_DIR = BENCH_DIR.parent / "csrc"
INCLUDE_DIR = BENCH_DIR.parent / "disconnect_watch" / "include"
BUILD_DIR = BENCH_DIR / "build"
#: As setup.py compiles the extension, so that the core costs here what it costs there.
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-DNDEBUG", "-Wall", "-Wextra", "-Werror", "-pthread")


class CompileError(RuntimeError):
    """A C part did not compile; the message is the compiler's."""


def build_program(name: str, *, with_core: bool = False) -> Path:
    """Compile ``bench/c/<name>.c`` to a program.

    Args:
        name: of the source without its suffix.
        with_core: compile all of ``csrc`` in.

    Raises:
        CompileError: there is no compiler, or it refused.
    """
    return _build(name, BUILD_DIR / name, with_core=with_core, flags=())


def build_library(name: str) -> Path:
    """Compile ``bench/c/<name>.c`` to a library for ctypes; see ``build_program``."""
    return _build(name, BUILD_DIR / f"{name}.so", with_core=False, flags=("-shared", "-fPIC"))


def _build(name: str, target: Path, *, with_core: bool, flags: tuple[str, ...]) -> Path:
    sources = [BENCH_DIR / "c" / f"{name}.c"]
    inputs = list(sources)
    if with_core:
        sources += sorted(CSRC_DIR.glob("*.c"))
        inputs = [*sources, *sorted(CSRC_DIR.glob("*.h")), *sorted(INCLUDE_DIR.glob("*.h"))]
    if target.exists() and target.stat().st_mtime > max(p.stat().st_mtime for p in inputs):
        return target
    BUILD_DIR.mkdir(exist_ok=True)
    compiler = os.environ.get("CC", "cc")
    # Renamed into place when it is whole: two runs may build at once.
    with tempfile.TemporaryDirectory(dir=BUILD_DIR) as folder:
        product = Path(folder) / target.name
        command = [compiler, *FLAGS, *flags, f"-I{CSRC_DIR}", f"-I{INCLUDE_DIR}"]
        command += ["-o", str(product)]
        try:
            subprocess.run(
                [*command, *map(str, sources), "-lm"], capture_output=True, text=True, check=True
            )
        except FileNotFoundError:
            raise CompileError(
                f"compile {name}.c: no compiler {compiler!r}; install gcc or set CC"
            ) from None
        except subprocess.CalledProcessError as error:
            raise CompileError(f"compile {name}.c: {error.stderr}") from None
        product.replace(target)
    return target
