"""All cases, and how one is run."""

import asyncio
import inspect

from tests.clients import blocking, looping, openai_sdk, processes, tabs, triton
from tests.clients.visit import CASES, Case, Visit
from tests.support.tools import path_of
from tests.support.upstream import Upstream

__all__ = ["ALL_CASES", "run_case", "what_lacks"]

_MODULES = [module.__name__ for module in (processes, blocking, looping, openai_sdk, triton, tabs)]

#: In the order of the table.
ALL_CASES = sorted(CASES, key=lambda case: _MODULES.index(case.act.__module__))


def what_lacks(case: Case) -> str:
    """What is absent that the case needs; empty where all is here."""
    return next((name for name in case.needs if not path_of(name)), "")


def run_case(case: Case, server: Upstream) -> list[str]:
    """Let the client leave, hold what the server hears to the case, and say what it was."""
    visit = Visit(server, case.answer, scheme=case.scheme)
    done = case.act(visit)
    if inspect.iscoroutine(done):
        asyncio.run(done)
    server.settle()
    return visit.news
