"""Whether a server notices, under load, that clients leave: seen from outside, over its sockets.

Clients that stay must get a right answer; clients that leave do so in several ways, at
random points of their exchange. At the end every one of them is accounted for, and, where
the server is ours, so is every request on its side.
"""

from disconnect_watch.stress.checks import Check
from disconnect_watch.stress.plan import Point, Way
from disconnect_watch.stress.profiles import Asking, Profile, exchange_with
from disconnect_watch.stress.report import Report
from disconnect_watch.stress.run import StressOptions, run_stress
from disconnect_watch.stress.target import Target, TargetError, parse_target

__all__ = [
    "Asking",
    "Check",
    "Point",
    "Profile",
    "Report",
    "StressOptions",
    "Target",
    "TargetError",
    "Way",
    "exchange_with",
    "parse_target",
    "run_stress",
]
