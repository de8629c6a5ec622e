"""The extension modules; everything else is in pyproject.toml.

Environment switches, all off by default:
    DISCONNECT_WATCH_DEBUG=1        asserts on, sync points compiled in
    DISCONNECT_WATCH_SANITIZE=LIST  for -fsanitize, such as address,undefined
    DISCONNECT_WATCH_COVERAGE=1     Cython line tracing and gcov
    DISCONNECT_WATCH_LIMITED_API=1  one abi3 build for Python 3.11 and newer
"""

import os
import sys

import Cython.Compiler.Options
from Cython.Build import cythonize
from setuptools import Extension, setup

Cython.Compiler.Options.warning_errors = True

SOURCES = [
    "csrc/dw_api.c",
    "csrc/dw_error.c",
    "csrc/dw_base.c",
    "csrc/dw_clock.c",
    "csrc/dw_conn.c",
    "csrc/dw_flags.c",
    "csrc/dw_flags_ranges.c",
    "csrc/dw_flags_table.c",
    "csrc/dw_flags_wait.c",
    "csrc/dw_latch.c",
    "csrc/dw_mailbox.c",
    "csrc/dw_optin.c",
    "csrc/dw_process.c",
    "csrc/dw_sock.c",
    "csrc/dw_poller_poll.c",
    "csrc/dw_thread.c",
    "csrc/dw_watch.c",
    "csrc/dw_watch_optin.c",
    "csrc/dw_watcher.c",
]
if sys.platform == "linux":
    SOURCES.append("csrc/dw_poller_epoll.c")

HEADERS = [
    "disconnect_watch/include/disconnect_watch.h",
    "csrc/dw_api.h",
    "csrc/dw_base.h",
    "csrc/dw_clock.h",
    "csrc/dw_conn.h",
    "csrc/dw_error.h",
    "csrc/dw_flags.h",
    "csrc/dw_flags_table.h",
    "csrc/dw_latch.h",
    "csrc/dw_mailbox.h",
    "csrc/dw_math.h",
    "csrc/dw_math_body.h",
    "csrc/dw_optin.h",
    "csrc/dw_poller.h",
    "csrc/dw_process.h",
    "csrc/dw_shared.h",
    "csrc/dw_sock.h",
    "csrc/dw_thread.h",
    "csrc/dw_watch.h",
    "csrc/dw_watcher.h",
    "disconnect_watch/_core.pxd",
    "disconnect_watch/_dw.pxd",
    "disconnect_watch/aio/_fast.pxd",
]


def is_on(name: str) -> bool:
    return os.environ.get(f"DISCONNECT_WATCH_{name}", "") not in ("", "0")


macros = [("_GNU_SOURCE", None)]
compile_args = ["-std=c11", "-O2", "-fvisibility=hidden", "-pthread"]
link_args = ["-pthread"]
directives = {"language_level": 3}

if is_on("DEBUG"):
    macros.append(("DW_TESTING", "1"))
    compile_args += ["-UNDEBUG", "-g", "-O1"]
if sanitizers := os.environ.get("DISCONNECT_WATCH_SANITIZE"):
    flags = [f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-g"]
    compile_args += flags
    link_args += flags
if is_on("COVERAGE"):
    macros.append(("CYTHON_TRACE_NOGIL", "1"))
    directives["linetrace"] = True
    compile_args.append("--coverage")
    link_args.append("--coverage")
limited_api = is_on("LIMITED_API")
if limited_api:
    macros.append(("Py_LIMITED_API", "0x030B0000"))


def extension(name: str, *sources: str, args: list[str] | None = None) -> Extension:
    return Extension(
        f"disconnect_watch.{name}",
        sources=list(sources),
        depends=HEADERS,
        include_dirs=["csrc", "disconnect_watch/include"],
        define_macros=macros,
        extra_compile_args=compile_args + (args or []),
        extra_link_args=link_args,
        py_limited_api=limited_api,
    )


setup(
    ext_modules=cythonize(
        [
            extension("_core", "disconnect_watch/_core.pyx", *SOURCES),
            # No C of ours but the declarations: they call through _core.
            extension("aio._fast", "disconnect_watch/aio/_fast.pyx"),
            extension("adapters._fast", "disconnect_watch/adapters/_fast.pyx"),
            extension("backends._fast", "disconnect_watch/backends/_fast.pyx"),
            extension("server.v2._fast", "disconnect_watch/server/v2/_fast.pyx"),
            # Loops over numbers and nothing else, by themselves for the sake of the flags.
            extension(
                "engine._math",
                "disconnect_watch/engine/_math.pyx",
                "csrc/dw_math.c",
                args=["-O3", "-ffp-contract=fast", "-fno-math-errno"],
            ),
        ],
        compiler_directives=directives,
    )
)
