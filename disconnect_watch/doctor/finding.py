"""One thing that was looked at, and what it means."""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Status"]


class Status(StrEnum):
    """What a finding means."""

    OK = "ok"
    #: Nothing is wrong, but something can't be had, or could be had for the asking.
    NOTE = "note"
    #: Clients that leave would go unnoticed.
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found.

    Attributes:
        area: heading under which it is reported.
        name: what was looked at.
        value: what was seen.
        advice: what changes it; empty where nothing needs to.
    """

    area: str
    name: str
    status: Status
    value: str
    advice: str = ""
