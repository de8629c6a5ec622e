"""Which endpoints want a header, and which: Triton's restricted APIs.

``health,metadata:admin-key=secret`` guards two categories with one header. A request
without it is refused before anything else of it is looked at.
"""

import hmac
from collections.abc import Sequence

from disconnect_watch.errors import cut
from disconnect_watch.server.errors import RequestError

__all__ = ["CATEGORIES", "RestrictedError", "parse_restrictions"]

CATEGORIES = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)


class RestrictedError(RequestError):
    """A request that lacks the header of its category."""

    status = 403


class Restriction:
    """The header that a category of endpoints wants."""

    __slots__ = ("_name", "_shown", "_value")

    def __init__(self, name: str, value: str) -> None:
        self._shown = name
        self._name = name.lower().encode("latin-1")
        self._value = value.encode("latin-1")

    def check(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Raises ``RestrictedError`` unless the header is there, with its value."""
        for name, value in headers:
            if name == self._name and hmac.compare_digest(value, self._value):
                return
        raise RestrictedError(f"This API is restricted, expecting header '{self._shown}'")


def parse_restrictions(texts: Sequence[str]) -> dict[str, Restriction]:
    """What each category wants, from ``<category>[,<category>]:<header>=<value>``.

    Raises:
        ValueError: not of this form, no such category, or one that is named twice.
    """
    restrictions: dict[str, Restriction] = {}
    for text in texts:
        names, colon, header = text.partition(":")
        name, equals, value = header.partition("=")
        if not (colon and equals and name.strip()):
            raise ValueError(
                f"cannot restrict {cut(text)!r}: give <category>[,<category>]:<header>=<value>"
            )
        restriction = Restriction(name.strip(), value)
        for category in (each.strip() for each in names.split(",")):
            if category not in CATEGORIES:
                raise ValueError(
                    f"cannot restrict {cut(category)!r}: the categories are {', '.join(CATEGORIES)}"
                )
            if category in restrictions:
                raise ValueError(f"cannot restrict {category!r} twice: give it one header")
            restrictions[category] = restriction
    return restrictions
