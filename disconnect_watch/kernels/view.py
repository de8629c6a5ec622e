"""The flag table as kernels see it: a tensor of its words, and one of its acks.

From the best way to the last, each tried where the one before is refused:

    shared      a CPU: the table's own memory
    registered  a GPU reads the table's own pages, across the bus: cuda-bindings
    mirrored    pinned memory that the GPU reads, and a thread that copies each cancel there
    polled      a copy on the GPU, as old as the last ``refresh``

With the first three, a kernel that runs sees a flag fire; the last stops work between steps only.
A device only loads words and stores acks; nothing but a CPU does read-modify-write on them.
"""

import ctypes
import logging
import threading
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from disconnect_watch.errors import DisconnectWatchError
from disconnect_watch.kernels.driver import UnavailableError, load_driver
from disconnect_watch.kernels.pages import RegisteredPages
from disconnect_watch.token import flag_table

if TYPE_CHECKING:
    from disconnect_watch._core import Flags

__all__ = ["FlagSource", "FlagView", "open_view"]

logger = logging.getLogger(__name__)

ITEM_BYTES = 4


class FlagSource(StrEnum):
    """How a device comes by the flags; see the head of ``view.py``."""

    SHARED = "shared"
    REGISTERED = "registered"
    MIRRORED = "mirrored"
    POLLED = "polled"


class FlagView:
    """What kernels are given of a flag table; from ``open_view``.

    Attributes:
        table: seen here.
        words: [num_slots], int32, on the view's device; ``generation << 8 | reason``.
        acks: [num_slots], int32, likewise; where the latch stores step numbers.
        source: how they come there.
        missing: why each better way was refused.
    """

    def __init__(
        self,
        table: "Flags",
        words: Tensor,
        acks: Tensor,
        *,
        source: FlagSource,
        missing: tuple[str, ...] = (),
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.table = table
        self.words = words
        self.acks = acks
        self.source = source
        self.missing = missing
        self._on_close = on_close

    @property
    def is_live(self) -> bool:
        """Whether a kernel that runs sees a flag fire."""
        return self.source is not FlagSource.POLLED

    def refresh(self) -> None:
        """Before a step: bring a polled copy up to date; nothing to do for the others."""
        if self.source is FlagSource.POLLED:
            self.words.copy_(host_words(self.table), non_blocking=True)

    def collect(self) -> None:
        """After a step: bring acks that lie in memory of their own into the table.

        Waits for the device if they lie there. The rows' tokens must still be held.
        """
        if self.source in (FlagSource.MIRRORED, FlagSource.POLLED):
            slots = self.acks.nonzero()[:, 0]
            host_acks(self.table)[slots.cpu()] = self.acks[slots].cpu()
            self.acks[slots] = 0

    def close(self) -> None:
        """Let go of the device's side; no kernel may be using it. Idempotent."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def open_view(device: torch.device | str = "cpu", *, table: "Flags | None" = None) -> FlagView:
    """Make a device see the cancel flags.

    Keep the view: pages are registered once, and a second view of the same table in the same
    process gets the next best way.

    Args:
        device: a CPU or a CUDA device.
        table: None takes the process's own.

    Returns:
        The best view that the machine allows; its ``missing`` names what the better ones lack,
        and so does a warning in the log.

    Raises:
        ValueError: another kind of device.
    """
    device = torch.device(device)
    table = flag_table() if table is None else table
    if device.type == "cpu":
        return FlagView(table, host_words(table), host_acks(table), source=FlagSource.SHARED)
    if device.type != "cuda":
        raise ValueError(f"device {str(device)!r}: flags can be seen by a cpu or a cuda device")
    missing: list[str] = []
    for source, open_as in ((FlagSource.REGISTERED, _register), (FlagSource.MIRRORED, _mirror)):
        try:
            words, acks, on_close = open_as(table, device)
        except (DisconnectWatchError, RuntimeError) as error:
            logger.warning("flags on %s are not %s: %s", device, source.value, error)
            missing.append(f"{source.value}: {error}")
            continue
        return FlagView(
            table, words, acks, source=source, missing=tuple(missing), on_close=on_close
        )
    words = host_words(table).to(device)
    acks = torch.zeros_like(words)
    return FlagView(table, words, acks, source=FlagSource.POLLED, missing=tuple(missing))


def host_words(table: "Flags") -> Tensor:
    """The table's words, [num_slots], int32, where they lie; the tensor keeps the table alive."""
    return _host_tensor(table, table.words_address)


def host_acks(table: "Flags") -> Tensor:
    """The table's acks, likewise."""
    return _host_tensor(table, table.acks_address)


def _host_tensor(table: "Flags", address: int) -> Tensor:
    memory = (ctypes.c_int32 * table.num_slots).from_address(address)
    # The tensor holds the array, and so the array must hold whose memory it is.
    memory.table = table  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.int32)


Opened = tuple[Tensor, Tensor, Callable[[], None]]


def _register(table: "Flags", device: torch.device) -> Opened:
    driver = load_driver()
    index = _wake(device)
    size_bytes = table.num_slots * ITEM_BYTES
    words = RegisteredPages(driver, table.words_address, size_bytes, device_index=index)
    try:
        acks = RegisteredPages(driver, table.acks_address, size_bytes, device_index=index)
    except BaseException:
        words.close()
        raise

    def close() -> None:
        acks.close()
        words.close()

    try:
        return (
            device_tensor(words.device_address, table.num_slots, device=device, owner=table),
            device_tensor(acks.device_address, table.num_slots, device=device, owner=table),
            close,
        )
    except BaseException:
        close()
        raise


def _mirror(table: "Flags", device: torch.device) -> Opened:
    _wake(device)
    words = torch.zeros(table.num_slots, dtype=torch.int32, pin_memory=True)
    acks = torch.zeros(table.num_slots, dtype=torch.int32, pin_memory=True)
    seen_words, seen_acks = (
        device_tensor(pinned.data_ptr(), table.num_slots, device=device, owner=pinned)
        for pinned in (words, acks)
    )
    return seen_words, seen_acks, Mirror(table, words).close


def _wake(device: torch.device) -> int:
    """Make the device's context current, which registration and pinning are for."""
    torch.zeros(1, device=device)
    return torch.cuda.current_device() if device.index is None else device.index


class Mirror:
    """A thread that sleeps on the table's doorbell and copies the words at every ring.

    Args:
        table: copied from.
        words: [num_slots], int32, in memory of the CPU that a device reads.
    """

    def __init__(self, table: "Flags", words: Tensor) -> None:
        self._table = table
        self._words = words
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._run, name="disconnect-watch-mirror", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        words = host_words(self._table)
        while not self._is_closed:
            # Read before the words are: a cancel after that makes the wait return at once.
            seen = self._table.bell()
            self._words.copy_(words)
            self._table.wait_bell(seen, -1)

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._table.ring()
        self._thread.join()


class _DeviceMemory:
    """Words at an address that a device knows, in the form that torch takes without a copy."""

    def __init__(self, address: int, num_words: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_words,),
            "typestr": "<i4",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def device_tensor(address: int, num_words: int, *, device: torch.device, owner: object) -> Tensor:
    """See memory that is not torch's as a tensor of a CUDA device.

    Args:
        address: as the device knows it.
        num_words: int32 each.
        device: on which kernels are given the tensor.
        owner: of the memory; the tensor keeps it alive.

    Raises:
        UnavailableError: torch made a copy, which would never see a flag.
    """
    tensor = torch.as_tensor(_DeviceMemory(address, num_words, owner), device=device)
    if tensor.data_ptr() != address:
        raise UnavailableError(
            f"torch copied the flags to {tensor.data_ptr():#x} instead of using {address:#x}"
        )
    return tensor
