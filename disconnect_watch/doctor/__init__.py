"""What a set-up can see of clients that leave: the kernel, the servers, and the application.

Everything is tried, as far as it can be: the kernel on connections of the doctor's own, the
application by serving it for a moment and letting real clients leave.
"""

from collections.abc import Mapping

from disconnect_watch.doctor.application import (
    BARE,
    Application,
    ApplicationError,
    load,
    load_application,
)
from disconnect_watch.doctor.device import device_findings
from disconnect_watch.doctor.finding import Finding, Status
from disconnect_watch.doctor.installed import installed_findings
from disconnect_watch.doctor.kernel import kernel_findings
from disconnect_watch.doctor.limits import limit_findings
from disconnect_watch.doctor.proxy import listen_behind_proxy
from disconnect_watch.doctor.report import Report
from disconnect_watch.doctor.setup import SERVERS, Setup, setups_of
from disconnect_watch.doctor.trial import Trial, run_trials, trial_findings
from disconnect_watch.testing.server import our_protocol

__all__ = [
    "Application",
    "ApplicationError",
    "Finding",
    "Report",
    "Setup",
    "Status",
    "Trial",
    "diagnose",
    "listen_behind_proxy",
    "load_application",
]


def diagnose(
    application: Application | None = None,
    *,
    protocol: str | None = None,
    headers: Mapping[str, str] | None = None,
    lifespan: str = "off",
    proxy: tuple[Finding, ...] = (),
    servers: tuple[str, ...] = SERVERS,
    patience: float = 1.0,
) -> Report:
    """Look at everything.

    Args:
        application: to serve, and to let clients leave; without it one of the doctor's own.
        protocol: for uvicorn's ``http``, one of ours; without it the one that is for this
            installation.
        headers: of the trial's requests.
        lifespan: uvicorn's "on" or "off".
        proxy: what was found behind the user's proxy.
        servers: those to try, of the ones that are installed.
        patience: seconds after which a leave counts as not heard of.

    Raises:
        ApplicationError: there is no such protocol, or the application's start-up failed.
    """
    protocol = protocol or our_protocol()
    options = load(protocol)
    if not hasattr(options, "connection_made"):
        raise ApplicationError(f"cannot serve by {protocol!r}: it is no protocol class")
    findings = [*kernel_findings(), *installed_findings(), *device_findings()]
    if application is not None:
        findings += application.findings()
    try:
        trials = run_trials(
            application or BARE,
            setups_of(protocol, servers),
            headers=headers or {},
            lifespan=lifespan,
            patience=patience,
        )
    except RuntimeError as error:
        raise ApplicationError(f"cannot serve {application or BARE}: {error}") from error
    findings += [*trial_findings(trials), *proxy]
    findings += limit_findings(
        half_close=getattr(options, "half_close", "disconnect"),
        vanish_after=getattr(options, "vanish_after", None),
        unblind=getattr(options, "unblind", None),
    )
    return Report(tuple(findings), tuple(trials))
