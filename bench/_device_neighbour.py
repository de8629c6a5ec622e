"""Another process that keeps a device busy, as a neighbour on a shared GPU does.

python -m bench._device_neighbour DEVICE    multiplies matrices until its input is closed
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bench._child import Child

__all__ = ["neighbour"]

SIZE = {"cuda": 4096, "cpu": 64}
#: Products that are launched before it looks whether it is to end.
NUM_PRODUCTS = 16


@contextmanager
def neighbour(device: torch.device) -> Iterator[None]:
    """Have a process at work on the device, without MPS: the two take turns.

    Raises:
        RuntimeError: it did not begin, or ended by itself.
    """
    command = [sys.executable, "-m", "bench._device_neighbour", str(device)]
    with Child(command, text=True) as child:
        if child.answers.readline() != "busy\n":
            raise RuntimeError(f"no neighbour on {device}: it ended with {child.process.wait()}")
        yield
        if (status := child.process.poll()) is not None:
            raise RuntimeError(f"the neighbour on {device} ended by itself, with {status}")


class _Products:
    def __init__(self, device: torch.device) -> None:
        size = SIZE[device.type]
        self._matrix = torch.randn(size, size, device=device)
        self._output = torch.empty_like(self._matrix)

    def run(self) -> None:
        for _ in range(NUM_PRODUCTS):
            torch.mm(self._matrix, self._matrix, out=self._output)
        if self._matrix.is_cuda:
            torch.cuda.synchronize()


def _main() -> None:
    torch.set_num_threads(1)
    products = _Products(torch.device(sys.argv[1]))
    products.run()
    print("busy", flush=True)
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            products.run()

    thread = threading.Thread(target=work)
    thread.start()
    sys.stdin.read()
    is_over.set()
    thread.join()


if __name__ == "__main__":
    _main()
