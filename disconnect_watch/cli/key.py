"""``disconnect-watch key``."""

import sys
from enum import StrEnum
from typing import Annotated

from disconnect_watch.cli._app import app, fail, typer
from disconnect_watch.keys import KeyRing, digest_of, new_key

__all__ = ["key"]


class RoleOption(StrEnum):
    """What an API key is for, see ``keys.Role``."""

    USER = "user"
    SERVICE = "service"
    ADMIN = "admin"


@app.command()
def key(
    *,
    name: Annotated[str, typer.Option(help="Whose requests are made with it.")],
    role: Annotated[RoleOption, typer.Option(help="What it is for.")] = RoleOption.USER,
) -> None:
    """Make an API key: the key on standard error, its line for the file on standard output."""
    secret = new_key()
    line = f"{name} {role.value} {digest_of(secret)}"
    try:
        KeyRing.parse(line, source="--name")
    except ValueError as error:
        fail(str(error))
    print(f"key, shown only now: {secret}", file=sys.stderr)
    print(line)
