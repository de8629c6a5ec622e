"""A process of a benchmark that takes orders on its standard input and answers on its output."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

__all__ = ["Child"]

REPOSITORY = Path(__file__).parent.parent


class Child:
    """The process, which ends when its standard input is closed.

    Args:
        command: to run, in the repository.
        options: of ``subprocess.Popen``.
    """

    #: Seconds that the process may take to end.
    END_LIMIT = 10.0

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self.process: subprocess.Popen[Any] = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.orders: IO[Any] = self.process.stdin
        self.answers: IO[Any] = self.process.stdout

    def close(self) -> None:
        """End the process. Idempotent."""
        self.orders.close()
        self.answers.close()
        self.process.wait(timeout=self.END_LIMIT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
