"""The log of models, which is the server's."""

from collections.abc import Callable
from typing import ClassVar

__all__ = ["Logger"]


class Logger:
    """Writes into the server's log; every method is the class's own."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3

    #: Set by the worker, which knows the way to the server.
    sink: ClassVar[Callable[[int, str], object]]

    @classmethod
    def log(cls, message: str, level: int = INFO) -> None:
        """Log at a level, one of the class's constants."""
        cls.sink(level, str(message))

    @classmethod
    def log_info(cls, message: str) -> None:
        """Log what is of interest."""
        cls.log(message, cls.INFO)

    @classmethod
    def log_warn(cls, message: str) -> None:
        """Log what may be wrong."""
        cls.log(message, cls.WARNING)

    @classmethod
    def log_error(cls, message: str) -> None:
        """Log what is wrong."""
        cls.log(message, cls.ERROR)

    @classmethod
    def log_verbose(cls, message: str) -> None:
        """Log what is of interest to few."""
        cls.log(message, cls.VERBOSE)
