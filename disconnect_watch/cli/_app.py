"""The application that the commands are parts of."""

import sys
from typing import NoReturn

try:
    import typer
except ImportError as error:
    raise SystemExit(
        f"disconnect-watch: {error}; install it with: pip install 'disconnect-watch[server]'"
    ) from error

# Whoever wants typer takes it from here, where its absence is explained.
__all__ = ["app", "fail", "typer"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def disconnect_watch() -> None:
    """When an inference client goes away, its work stops."""


def fail(message: str) -> NoReturn:
    """Say on standard error what prevents the command, and end."""
    print(f"disconnect-watch: {message}", file=sys.stderr)
    raise SystemExit(2)
