"""Prefill nodes, decode nodes and the proxy before them, each a process with ports of its own."""

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disconnect_watch.keys import digest_of, new_key
from tests.support.command import Process
from tests.support.net import PATIENCE, wait_until

__all__ = ["Cluster", "Node", "cluster"]

#: Seconds in which all processes are up, on a machine that does much else.
START = 170


def _call(url: str, key: str, document: Any = None) -> Any:
    body = None if document is None else json.dumps(document).encode()
    request = urllib.request.Request(url, body, {"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return json.loads(response.read())


@dataclass
class Node:
    """One process that serves a model.

    Attributes:
        arguments: that it was started with.
    """

    process: Process
    arguments: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.process.port}"

    def gauges(self) -> dict[str, float]:
        """Its metrics, by name and labels."""
        lines = (line for line in self.process.metrics().splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def num_held(self) -> float:
        """How many blocks anybody has."""
        gauges = self.gauges()
        return sum(gauges[f'dw_kv_blocks{{state="{state}"}}'] for state in ("used", "retained"))

    def is_idle(self) -> bool:
        """Whether its pool is as it was, and no request is there."""
        gauges = self.gauges()
        return self.num_held() == 0 and not any(
            gauges[f'dw_requests{{state="{state}"}}'] for state in ("waiting", "running")
        )

    def released(self) -> dict[str, float]:
        """Transfers of this node, by what let them go."""
        gauges = self.gauges()
        return {
            kind: gauges[f'dw_kv_released_total{{kind="{kind}"}}']
            for kind in ("in_band", "abort", "lease")
        }


@dataclass
class Cluster:
    """All of them.

    Attributes:
        key: of role service, that the nodes know the proxy by.
        key_file: where it stands.
        ending: closes what was started.
    """

    key: str
    key_file: Path
    ending: ExitStack
    prefills: list[Node] = field(default_factory=list)
    decodes: list[Node] = field(default_factory=list)
    proxy: Process | None = None

    @property
    def nodes(self) -> list[Node]:
        return self.prefills + self.decodes

    @property
    def port(self) -> int:
        assert self.proxy is not None
        return self.proxy.port

    def start(self, *arguments: str, command: str = "serve") -> Process:
        """Start a process, which does not outlive the cluster."""
        process = Process(*arguments, command=command)
        self.ending.callback(process.close)
        return process

    def restart(self, node: Node) -> None:
        """Start a node that was killed again, on the port that it had."""
        port = node.process.port
        node.process.close()
        node.process = self.start(*node.arguments, "--http-port", str(port))
        node.process.wait_until_it_serves(START)

    def start_proxy(self, *, port: int = 0, probe_seconds: float = 5.0) -> Process:
        """Start the proxy before all nodes; a second one takes the place of the first."""
        self.proxy = self.start(
            "--prefill",
            ",".join(node.url for node in self.prefills),
            "--decode",
            ",".join(node.url for node in self.decodes),
            "--service-key",
            str(self.key_file),
            "--probe-seconds",
            str(probe_seconds),
            "--http-port",
            str(port),
            command="pd-proxy",
        )
        self.proxy.wait_until_it_serves(START)
        return self.proxy

    def call(self, node: Node, path: str, document: Any = None) -> Any:
        """One request to a node, as the proxy would make it."""
        return _call(f"{node.url}{path}", self.key, document)

    def wait_until_idle(self) -> None:
        """Wait until all pools are at their baseline."""
        for node in self.nodes:
            wait_until(node.is_idle)


@contextlib.contextmanager
def cluster(
    directory: Path,
    *,
    model: Path | None = None,
    num_prefills: int = 1,
    num_decodes: int = 1,
    transfer: str = "shm",
    lease: float = 5.0,
    with_proxy: bool = True,
    port: int = 0,
) -> Iterator[Cluster]:
    """Start them all at once; none outlives the block.

    Args:
        directory: for keys.
        port: of the proxy; 0 takes a free one.
        transfer: what goes for ``--kv-transfer``.
    """
    key = new_key()
    keys, secret = directory / "keys", directory / "service.key"
    keys.write_text(f"proxy service {digest_of(key)}\n")
    secret.write_text(key)
    shared = directory / "kv.key"
    shared.write_text(new_key())
    options = ["--api-keys", str(keys), "--kv-transfer", transfer, "--kv-key", str(shared)]
    options += ["--kv-lease", str(lease), "--model-name", "tiny", "--no-live-page"]
    if model is not None:
        options += ["--model", str(model)]
    with ExitStack() as ending:
        found = Cluster(key, secret, ending)
        for role, num_nodes, nodes in (
            ("prefill", num_prefills, found.prefills),
            ("decode", num_decodes, found.decodes),
        ):
            arguments = ("--role", role, *options)
            nodes += [Node(found.start(*arguments), arguments) for _ in range(num_nodes)]
        for node in found.nodes:
            node.process.wait_until_it_serves(START)
        if with_proxy:
            found.start_proxy(port=port)
        yield found
