"""What a request costs the frontend, and how long a model goes on without its client.

Beside it, in the same run: uvicorn with an application that answers ``{}`` to the same
request, and a real Triton, if ``.ci/triton`` has made a venv for it. CPU is that of the server
and of its workers, however many processes that are.
"""

import shutil
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench._copies import count_copies
from bench._frontend_asked import ASKED, Asked, read_reply
from bench._frontend_models import EVENTS_VARIABLE, write_models
from bench._harness import Report, median_of_ratios, run_command
from bench._leaving import WAYS, Events, is_run_all_the_same, leave
from bench._process_tree import cpu_ns, pids_of_tree
from bench._requests import FEW_REQUESTS, MANY_REQUESTS, Server, read_counts, run_load
from bench._triton import serving_triton, triton_program

__all__ = ["Config", "run"]

MODULE = "bench._frontend_server"
OURS, THEIRS = "ours", "Triton"
BASELINE = "uvicorn's {}"
INFER = "infer, in the server"
LOGGED = "ours: infer, in the server, with its line in the log"
#: The model of each.
LARGE = {"16 MiB there and back, in the server": "identity", "through a worker process": "echo"}
NUM_CONNECTIONS = 16


@dataclass(frozen=True, slots=True)
class Config:
    """How much is measured.

    Attributes:
        num_rounds: of load, each of everything in turn.
        duration_ms: of load in one sample.
        num_large: requests of 16 MiB whose copies are counted.
        num_leaves: of each kind.
        has_instructions: count instructions with callgrind.
    """

    num_rounds: int
    duration_ms: int
    num_large: int
    num_leaves: int
    has_instructions: bool


FULL = Config(20, 250, 3, 10, True)
QUICK = Config(3, 100, 1, 1, False)


@dataclass(frozen=True, slots=True)
class Served:
    """A server that was started.

    Attributes:
        name: whose it is.
        ports: ``frontend``, and ``uvicorn`` beside ours.
        events: of its models that wait.
    """

    name: str
    ports: dict[str, int]
    pid: int
    events: Events


@dataclass(frozen=True, slots=True)
class Target:
    """Who is asked what.

    Attributes:
        pids: of the server and its workers.
        num_parts: of an answer, each of which is what a sample is of.
    """

    port: int
    pids: list[int]
    request: Path
    num_reply_bytes: int
    num_parts: int = 1

    def cost(self, duration_ms: int) -> float:
        """Microseconds of CPU for a part of an answer, under load for so long."""
        before = cpu_ns(self.pids)
        num_requests, _ = run_load(
            self.port,
            NUM_CONNECTIONS,
            self.num_reply_bytes,
            duration_ms=duration_ms,
            request=self.request,
        )
        return (cpu_ns(self.pids) - before) / num_requests / self.num_parts / 1000


def run(config: Config) -> Report:
    """Measure all of it."""
    report = Report("frontend", asdict(config))
    with TemporaryDirectory() as folder:
        root = Path(folder)
        models = root / "models"
        write_models(models)
        with ExitStack() as stack:
            servers = [stack.enter_context(_ours(root, OURS))]
            logged = stack.enter_context(_ours(root, "logged", f"--log={root / 'lines'}"))
            program = triton_program()
            if program is None:
                report.notes.append("Triton was not asked: .ci/triton makes a venv with it")
            else:
                servers.append(stack.enter_context(_theirs(program, root)))
            _measure_cpu(report, config, _targets(root, servers, logged))
            for server in servers:
                _measure_leaves(report, config, server)
        for name, copies in count_copies(models, LARGE, config.num_large).items():
            report.add(f"copies of each byte, {name}", "1", [copies])
        if config.has_instructions and shutil.which("valgrind"):
            _measure_instructions(report, root)
        else:
            report.notes.append("instructions were not counted: valgrind takes minutes for it")
    return report


@contextmanager
def _ours(root: Path, name: str, *options: str) -> Iterator[Served]:
    events = root / f"{name}.events"
    with Server(
        module=MODULE,
        under=("env", f"{EVENTS_VARIABLE}={events}"),
        options=(f"--repository={root / 'models'}", *options),
    ) as server:
        yield Served(name, server.ports, server.process.pid, Events(events))


@contextmanager
def _theirs(program: Path, root: Path) -> Iterator[Served]:
    events = root / "triton.events"
    environment = {EVENTS_VARIABLE: str(events)}
    with serving_triton(program, root / "models", root / "triton.log", environment) as triton:
        yield Served(THEIRS, {"frontend": triton.port}, triton.pid, Events(events))


def _targets(root: Path, servers: Sequence[Served], logged: Served) -> dict[str, Target]:
    ours = servers[0]
    targets = {BASELINE: _target(root, ours, "uvicorn", ASKED[INFER])}
    targets[LOGGED] = _target(root, logged, "frontend", ASKED[INFER])
    for server in servers:
        for name, asked in ASKED.items():
            if server is ours or asked.is_for_any:
                targets[f"{server.name}: {name}"] = _target(root, server, "frontend", asked)
    return targets


def _target(root: Path, server: Served, kind: str, asked: Asked) -> Target:
    port = server.ports[kind]
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(asked.request)
        reply = read_reply(client)
    file = root / f"{len(list(root.iterdir()))}.request"
    file.write_bytes(asked.request)
    return Target(port, pids_of_tree(server.pid), file, len(reply), asked.num_parts)


def _measure_cpu(report: Report, config: Config, targets: dict[str, Target]) -> None:
    samples: dict[str, list[float]] = defaultdict(list)
    for round_ in range(config.num_rounds + 1):
        for name, target in targets.items():
            cost = target.cost(config.duration_ms)
            if round_:  # the first is the warm-up
                samples[name].append(cost)
    for name, values in samples.items():
        report.add(name, "us", values)
    for name, values in samples.items():
        # What is the same for Triton has it for its baseline, the rest what uvicorn does.
        theirs = name.replace(f"{OURS}:", f"{THEIRS}:")
        baseline = theirs if theirs in samples else BASELINE
        if name != baseline:
            report.ratios.append(
                median_of_ratios(name, baseline, measured=values, baseline=samples[baseline])
            )


def _measure_leaves(report: Report, config: Config, server: Served) -> None:
    port = server.ports["frontend"]
    for name, way in WAYS.items():
        for how, by_reset in (("FIN", False), ("reset", True)):
            gone_on = [
                leave(port, way, f"{name}-{how}-{number}", server.events, by_reset=by_reset)
                for number in range(config.num_leaves)
            ]
            report.add(f"{server.name}, leave to end: {name}, {how}", "ms", gone_on)
    run_ = [
        float(is_run_all_the_same(port, f"queued-{number}", server.events))
        for number in range(config.num_leaves)
    ]
    report.add(f"{server.name}, run all the same: queued, FIN", "1", run_)


def _measure_instructions(report: Report, root: Path) -> None:
    """User-space instructions a request; without workers, whose start takes too long so."""
    folder, models = root / "callgrind", root / "none"
    folder.mkdir()
    models.mkdir()
    asked = {BASELINE: ("uvicorn", ASKED[INFER]), f"{OURS}: {INFER}": ("frontend", ASKED[INFER])}
    with Server(
        module=MODULE,
        under=("valgrind", "-q", "--tool=callgrind", f"--callgrind-out-file={folder}/out"),
        options=(f"--repository={models}", "--marks"),
    ) as server:
        served = Served(OURS, server.ports, server.process.pid, Events(root / "none.events"))
        # Of each label the later count stands: what the server does once is in the earlier.
        for name, (kind, what) in [*asked.items()] * 2:
            target = _target(root, served, kind, what)
            for count in (FEW_REQUESTS, MANY_REQUESTS):
                server.order("zero")
                run_load(
                    target.port,
                    1,
                    target.num_reply_bytes,
                    num_requests=count,
                    request=target.request,
                )
                server.order(f"dump {name}/{count}")
    counts = read_counts(folder)
    per_request = {
        name: (counts[f"{name}/{MANY_REQUESTS}"] - counts[f"{name}/{FEW_REQUESTS}"])
        / (MANY_REQUESTS - FEW_REQUESTS)
        for name in asked
    }
    for name, number in per_request.items():
        report.add(f"instructions, {name}", "1", [number])


def main() -> None:
    """The command line."""
    run_command("frontend", lambda is_quick: run(QUICK if is_quick else FULL))


if __name__ == "__main__":
    main()
