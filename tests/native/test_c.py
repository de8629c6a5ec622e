"""C code that uses the public header, compiled and run: no GIL, no Python thread."""

import ctypes
import errno
import re
import socket
import sysconfig
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from disconnect_watch import CancelToken, Reason, Watcher, _core, get_include
from tests.native.build import WARNINGS, build_module, compile_to
from tests.support.net import LEAVES, Pair, vanish, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return build_module("example_c", tmp_path_factory.mktemp("native"), *WARNINGS)


def wait_for_a_step(worker: Any) -> None:
    wait_until(lambda: worker.num_steps > 0)


@pytest.mark.parametrize("suffix", [".c", ".cpp"], ids=["c11", "cpp17"])
@pytest.mark.parametrize("prefix", ["", "#include <Python.h>\n"], ids=["alone", "with-python"])
def test_header_compiles_by_itself_without_a_warning(
    tmp_path: Path, suffix: str, prefix: str
) -> None:
    source = tmp_path / f"alone{suffix}"
    source.write_text(f'{prefix}#include "disconnect_watch.h"\n#include "disconnect_watch.h"\n')
    # Python's own headers are not ours to judge.
    python = f"-isystem{sysconfig.get_path('include')}"
    compile_to(tmp_path / "alone.o", source, "-c", "-Wpedantic", *WARNINGS, python)


def test_thread_unknown_to_python_works_until_its_client_leaves(
    example: ModuleType, watcher: Watcher, pair: Pair, leave: str, poller: str
) -> None:
    how = LEAVES[leave]
    if (poller, pair.kind) in how.blind:
        pytest.skip("unread bytes hide the peer from this poller")
    if how.is_before:
        pair.leave(leave)
    worker = example.Worker(watcher, pair.server.fileno())
    if not how.is_before:
        wait_until(lambda: watcher.stats().num_armed == 1 and worker.num_steps > 0)
        pair.leave(leave)
    reason, _, rc = worker.join()
    assert rc == 1  # disarm says that it had fired
    assert reason == how.reason.code
    assert watcher.stats().num_connections == 0


def test_flag_is_set_while_somebody_holds_the_gil(
    example: ModuleType, watcher: Watcher, pair: Pair
) -> None:
    worker = example.Worker(watcher, pair.server.fileno())
    wait_until(lambda: watcher.stats().num_armed == 1)
    # The client is closed by this thread before it takes the GIL for good.
    pair.client.close()
    reason, _, rc = worker.join_holding_the_gil()
    assert (reason, rc) == (Reason.FIN.code, 1)


def test_native_code_hears_of_a_client_that_vanished(example: ModuleType, tcp: Pair) -> None:
    with Watcher() as watcher:
        too_short = example.Worker(watcher, tcp.server.fileno(), 1999)
        assert too_short.join()[2] == -errno.EINVAL
        worker = example.Worker(watcher, tcp.server.fileno(), 2000)
        wait_for_a_step(worker)
        assert worker.bound_ms >= 2000
        vanish(tcp.client)
        reason, _, rc = worker.join()
        assert (reason, rc) == (Reason.TIMED_OUT.code, 1)
        assert not tcp.server.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_owner_of_the_watcher_may_drop_it_first(example: ModuleType, pair: Pair) -> None:
    watcher = Watcher()
    worker = example.Worker(watcher, pair.server.fileno())
    wait_for_a_step(worker)
    made = watcher._made_at
    del watcher
    pair.client.close()
    assert worker.join()[0] == Reason.FIN.code
    with pytest.warns(ResourceWarning, match=made):
        del worker


def test_closed_watcher_answers_native_code_with_an_error(example: ModuleType, pair: Pair) -> None:
    watcher = Watcher()
    watcher.close()
    _, steps, rc = example.Worker(watcher, pair.server.fileno()).join()
    assert steps == 0
    assert rc == -errno.ESHUTDOWN  # DW_ECLOSED


def test_native_code_cancels_a_token_and_wakes_who_waits(example: ModuleType) -> None:
    token = CancelToken()
    woken = threading.Event()

    def wait() -> None:
        token.wait(40)
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert example.retain_and_cancel(token, Reason.DEADLINE.code) == 1
    assert example.retain_and_cancel(token, Reason.FIN.code) == 0
    assert woken.wait(40)
    thread.join()
    assert token.reason is Reason.DEADLINE
    with pytest.raises(OSError, match="invalid argument"):
        example.retain_and_cancel(token, 99)


@pytest.mark.parametrize("wrong", [None, 3, object()], ids=["none", "int", "object"])
def test_other_objects_than_ours_are_refused(example: ModuleType, wrong: object) -> None:
    with pytest.raises(TypeError):
        example.Worker(wrong, 0)
    with pytest.raises(TypeError):
        example.retain_and_cancel(wrong, 1)


class Head(ctypes.Structure):
    """How ``dw_api`` begins."""

    _fields_ = (("abi_version", ctypes.c_uint32), ("size", ctypes.c_uint32))


CAPSULE_NAME = ctypes.create_string_buffer(b"disconnect_watch._core._C_API")


def address_in(capsule: object) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(get(capsule, CAPSULE_NAME.value))


def capsule_of(address: int) -> object:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return new(address, ctypes.addressof(CAPSULE_NAME), None)


@pytest.mark.parametrize(
    ("version", "size_change"),
    [(1, 0), (2, 0), (1, -8), (1, 8)],
    ids=["same", "other-version", "shorter", "longer"],
)
def test_import_refuses_a_table_of_another_version_or_with_less_in_it(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, version: int, size_change: int
) -> None:
    real = Head.from_address(address_in(vars(_core)["_C_API"]))
    assert real.abi_version == 1
    head = Head(version, real.size + size_change)
    monkeypatch.setattr(_core, "_C_API", capsule_of(ctypes.addressof(head)))
    if version == 1 and size_change >= 0:
        example.import_again()
    else:
        with pytest.raises(ImportError, match="compile it again"):
            example.import_again()


HEADER = Path(get_include(), "disconnect_watch.h").read_text()

#: The functions of interface 1, a line for each time that some were added. What is listed
#: is compiled into modules of others: a line may be added, none may be changed.
LAYOUT = [
    "watcher_of flag_of strerror clock_ns flag_alloc flag_retain flag_release flag_cancel "
    "flag_reason flag_address flags_wait sock_is_gone watcher_attach watcher_detach watcher_arm "
    "watcher_disarm watcher_lost mailbox_create mailbox_fd mailbox_drain mailbox_wake "
    "mailbox_close",
    "watcher_reason watcher_set_vanish watcher_vanish_bound watcher_set_probing "
    "watcher_unblind watcher_reblind",
    "latch flag_ack",
]


def functions_of(header: str) -> list[str]:
    return re.findall(r"\(\*(\w+)\)\(", header)


def test_functions_are_only_ever_added_at_the_end() -> None:
    assert functions_of(HEADER) == " ".join(LAYOUT).split()


@pytest.mark.parametrize("num_lines", range(1, len(LAYOUT)))
def test_module_that_an_older_header_was_compiled_into_is_served(
    tmp_path: Path, watcher: Watcher, tcp: Pair, num_lines: int
) -> None:
    bare = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S)
    first_new = LAYOUT[num_lines].split()[0]
    older = re.sub(rf"[^;]*\(\*{first_new}\)\(.*}} dw_api;", "} dw_api;", bare, flags=re.S)
    assert functions_of(older) == " ".join(LAYOUT[:num_lines]).split()
    (tmp_path / "disconnect_watch.h").write_text(older)
    module = build_module("example_cpp", tmp_path, *WARNINGS, include=str(tmp_path))
    tcp.client.close()
    ((_, reason),) = module.serve(watcher, tcp.server.fileno(), 1, -1)
    assert reason == Reason.FIN.code


def test_table_has_every_function_of_the_header() -> None:
    declared = functions_of(HEADER)
    address = address_in(vars(_core)["_C_API"])
    size = Head.from_address(address).size - ctypes.sizeof(Head)
    assert size == len(declared) * ctypes.sizeof(ctypes.c_void_p)
    functions = (ctypes.c_void_p * len(declared)).from_address(address + ctypes.sizeof(Head))
    assert [name for name, function in zip(declared, functions, strict=True) if not function] == []
