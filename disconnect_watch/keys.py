"""Who calls: API keys, kept as hashes, and what each may do.

A key is 256 random bits, so that one round of SHA-256 keeps it: there is nothing to guess that
a slow hash would slow down. A file of keys has one a line::

    # name   role     SHA-256 of the key, in hex
    alice    user     9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
    gateway  service  60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752

Several keys of one name are one owner, so that a key can be replaced while both are valid.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from disconnect_watch.errors import cut

__all__ = ["ADMIN", "ANONYMOUS", "Caller", "KeyRing", "Role", "digest_of", "new_key"]

#: Of the environment.
VARIABLE = "DISCONNECT_WATCH_API_KEYS"

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


class Role(StrEnum):
    """What a key is for.

    A service is a proxy: it speaks for many, and so may cancel more often, but no more than it
    submitted itself.
    """

    USER = "user"
    SERVICE = "service"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request.

    Attributes:
        name: whose requests they are; empty for nobody in particular.
        role: None for whoever came without a key.
    """

    name: str
    role: Role | None

    @property
    def is_admin(self) -> bool:
        return self.role is Role.ADMIN


#: Whoever came without a key.
ANONYMOUS = Caller("", None)

#: Whoever came with the token that was printed at the start, or by the admin's socket. No key can
#: have the name, so that no user has a part in the admin's requests.
ADMIN = Caller("(admin)", Role.ADMIN)


class KeyRing:
    """The keys that are let in.

    Args:
        entries: caller and SHA-256 of the key.
    """

    def __init__(self, entries: Sequence[tuple[Caller, str]] = ()) -> None:
        self._entries = tuple(entries)

    def __len__(self) -> int:
        return len(self._entries)

    @classmethod
    def parse(cls, text: str, *, source: str) -> "KeyRing":
        """Read keys as the head of this file shows them; a semicolon ends a line too.

        Args:
            source: where they stand, for messages.

        Raises:
            ValueError: names the line, and nothing of what might be a key.
        """
        entries = []
        for number, line in enumerate(re.split(r"[\n;]", text), 1):
            fields = line.partition("#")[0].split()
            if not fields:
                continue
            where = f"{source}, line {number}"
            if len(fields) != 3:
                raise ValueError(f"{where} has {len(fields)} fields, give name, role and SHA-256")
            name, role, digest = fields
            if not _NAME.fullmatch(name):
                raise ValueError(f"{where}: name {cut(name)!r} has other than A-Z a-z 0-9 _ . @ -")
            if role not in tuple(Role):
                raise ValueError(
                    f"{where}: role {cut(role)!r} is none, take one of {', '.join(Role)}"
                )
            if not _DIGEST.fullmatch(digest.lower()):
                raise ValueError(
                    f"{where}: the third field is no SHA-256 in hex; the key itself must not stand "
                    "here, make a line with: disconnect-watch key"
                )
            entries.append((Caller(name, Role(role)), digest.lower()))
        return cls(entries)

    @classmethod
    def read(cls, file: Path | None, *, environment: Mapping[str, str]) -> "KeyRing":
        """The keys of a file and those of ``DISCONNECT_WATCH_API_KEYS``, in the same form.

        Raises:
            OSError: the file cannot be read.
            ValueError: see ``parse``; or there is a source of keys, and no key in it.
        """
        sources = []
        if file is not None:
            sources.append((str(file), file.read_text(encoding="utf-8")))
        if VARIABLE in environment:
            sources.append((VARIABLE, environment[VARIABLE]))
        entries: list[tuple[Caller, str]] = []
        for source, text in sources:
            keys = cls.parse(text, source=source)
            if not keys:
                # Who names a source wants keys to be asked for.
                raise ValueError(f"{source} has no key, make one with: disconnect-watch key")
            entries += keys._entries
        return cls(entries)

    @property
    def callers(self) -> tuple[Caller, ...]:
        """Whose keys they are."""
        return tuple(caller for caller, _ in self._entries)

    def find(self, key: str) -> Caller | None:
        """Whose key this is; takes as long for a wrong one as for a right one."""
        digest = digest_of(key)
        found = None
        for caller, expected in self._entries:
            if hmac.compare_digest(digest, expected):
                found = caller
        return found


def new_key() -> str:
    """A key that nobody can guess."""
    return f"dw-{secrets.token_urlsafe(32)}"


def digest_of(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
