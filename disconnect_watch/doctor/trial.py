"""The application, served for a moment, and real clients that leave it."""

import select
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec

from disconnect_watch.doctor.application import Application
from disconnect_watch.doctor.finding import Finding, Status
from disconnect_watch.doctor.patient import PATH, Means, Patient, Visit
from disconnect_watch.doctor.setup import Setup, hosting
from disconnect_watch.testing import LeavingClient, Server, Way, http_request

__all__ = ["TRIAL_AREA", "WAYS", "Trial", "run_trials", "trial_findings"]

TRIAL_AREA = "trial"
#: Enough to tell the servers apart: the plain leave, and the one that a server which has
#: stopped reading does not see.
WAYS = (Way.FIN, Way.BEHIND_REQUEST)

_START_PATIENCE = 10.0
_PERIOD = 0.002


@dataclass(frozen=True, slots=True)
class Trial:
    """One client that left, and what became of the news.

    Attributes:
        seconds: from the leave until the handler heard of it; None if it did not.
        status: of the answer that came before the request reached the handler; None if it
            got there, 0 if the connection was closed instead.
        has_token: whether a token was in the request's scope.
        how: how ``adapters.asgi`` finds the connection, see ``how_found``; empty without it.
    """

    setup: Setup
    means: Means
    way: Way
    seconds: float | None
    status: int | None
    has_token: bool
    how: str = ""


def run_trials(
    application: Application,
    setups: Sequence[Setup],
    *,
    headers: Mapping[str, str],
    lifespan: str = "off",
    patience: float = 1.0,
) -> list[Trial]:
    """Serve the application in each way on a free port of loopback, and let clients leave it.

    Only a route of the trial's own is asked for; no handler of the application runs.

    Args:
        application: the user's.
        setups: to try.
        headers: of the requests, for middlewares that want some.
        lifespan: uvicorn's; "off" leaves the application's start-up out.
        patience: seconds after which a leave counts as not heard of.

    Raises:
        RuntimeError: the application's start-up failed.
    """
    return [
        trial for setup in setups for trial in _run(application, setup, headers, lifespan, patience)
    ]


def _run(
    application: Application,
    setup: Setup,
    headers: Mapping[str, str],
    lifespan: str,
    patience: float,
) -> list[Trial]:
    patient = Patient()
    found: list[str] = []
    with (
        application.with_route(PATH, patient) as app,
        hosting(app, setup, lifespan=lifespan, on_found=found.append) as server,
        ExitStack() as clients,
    ):
        try:
            left = [
                (means, way, *_leave(server, patient, means, way, headers, clients))
                for means in _means_of(setup)
                for way in WAYS
            ]
            _wait_for([visit for *_, visit, status, _ in left if status is None], patience)
        finally:
            patient.is_over = True
    return [
        Trial(
            setup=setup,
            means=means,
            way=way,
            seconds=None if visit.heard_at is None else visit.heard_at - left_at,
            status=status,
            has_token=visit.has_token,
            how=found[-1] if found else "",
        )
        for means, way, visit, status, left_at in left
    ]


def _means_of(setup: Setup) -> list[Means]:
    return [
        means
        for means in Means
        if (means is not Means.TOKEN or setup.is_watched)
        and (means is not Means.POLL or find_spec("starlette") is not None)
    ]


def _leave(
    server: Server,
    patient: Patient,
    means: Means,
    way: Way,
    headers: Mapping[str, str],
    clients: ExitStack,
) -> tuple[Visit, int | None, float]:
    """One client: its visit, the status that it got instead of one, and when it left."""
    path, visit = patient.expect(means)
    client = clients.enter_context(LeavingClient(server, timeout=_START_PATIENCE))
    request = http_request("GET", path, headers=headers)
    client.send(request)
    deadline = time.monotonic() + _START_PATIENCE
    while not visit.has_begun:
        if select.select([client.sock], [], [], _PERIOD)[0] or time.monotonic() > deadline:
            return visit, _status_of(client), time.monotonic()
    left_at = time.monotonic()
    client.leave(way, request=request)
    return visit, None, left_at


def _status_of(client: LeavingClient) -> int:
    try:
        return client.answer().status
    except Exception:  # no HTTP, cut short, or nothing at all
        return 0


def _wait_for(visits: list[Visit], patience: float) -> None:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and any(visit.heard_at is None for visit in visits):
        time.sleep(_PERIOD)


def trial_findings(trials: Sequence[Trial]) -> list[Finding]:
    """What the trials mean for somebody who serves so."""
    found: list[Finding] = []
    for setup in dict.fromkeys(trial.setup for trial in trials):
        of_setup = [trial for trial in trials if trial.setup == setup]
        refused = next((trial for trial in of_setup if trial.status is not None), None)
        if refused is not None:
            found.append(_refused(setup, refused.status or 0))
        elif setup.is_watched:
            found.append(_watched(setup, of_setup))
        else:
            found.append(_alone(setup, of_setup))
    return found


def _refused(setup: Setup, status: int) -> Finding:
    value = (
        f"a middleware answered {status}, no request reached its handler"
        if status
        else "no answer came, and no request reached its handler"
    )
    advice = (
        "give the headers that it wants, such as --header 'Authorization: Bearer ...', or run "
        "its start-up with --lifespan"
    )
    return Finding(TRIAL_AREA, setup.name, Status.PROBLEM, value, advice)


#: How the kernel's watch comes to a request's connection.
_FOUND = {
    "protocol": "the protocol watches the socket of its transport",
    "transport": "the connection is found by the server's transport",
    "addresses": "the connection is found by its two ends, among the fds of the process",
    "none": "the connection is not found: the server's own http.disconnect alone tells",
    "": "an adapter watches",
}


def _watched(setup: Setup, trials: list[Trial]) -> Finding:
    by_token = [trial for trial in trials if trial.means is Means.TOKEN]
    if not all(trial.has_token for trial in by_token):
        advice = 'it is no protocol of ours, or a middleware replaces scope["state"]'
        return Finding(
            TRIAL_AREA, setup.name, Status.PROBLEM, "no token reaches the handler", advice
        )
    missed = [trial.way.in_words for trial in by_token if trial.seconds is None]
    if missed:
        value = f"the token was not told of: {', '.join(missed)}"
        return Finding(TRIAL_AREA, setup.name, Status.PROBLEM, value, "see the findings above")
    deaf = sorted({trial.means.value for trial in trials if trial.seconds is None})
    found = _FOUND[by_token[0].how if setup.is_wrapped else "protocol"]
    value = f"{found}; each leave reaches the token"
    if deaf:
        advice = f"not every leave is heard of by {' or '.join(deaf)}: read the token"
        return Finding(TRIAL_AREA, setup.name, Status.OK, value, advice)
    return Finding(TRIAL_AREA, setup.name, Status.OK, value)


def _alone(setup: Setup, trials: list[Trial]) -> Finding:
    num_missed = sum(trial.seconds is None for trial in trials)
    value = f"{len(trials) - num_missed} of {len(trials)} leaves are heard of"
    if not num_missed:
        return Finding(TRIAL_AREA, setup.name, Status.OK, value)
    return Finding(TRIAL_AREA, setup.name, Status.NOTE, value, setup.advice)
