"""A client of ``grpc_server`` that leaves: ``python -m tests.servers.grpc_client``.

It calls each kind of RPC at once, each by a name of its own, and cancels when it reads a line.
"""

import argparse
import sys
from typing import Any

import grpc

from tests.servers.grpc_server import SERVICE


def call(channel: Any, kind: str, name: str, timeout: float | None) -> Any:
    method = channel.unary_stream if kind == "stream" else channel.unary_unary
    rpc = method(f"/{SERVICE}/{kind}")
    if kind == "stream":
        return rpc(name.encode(), timeout=timeout)
    return rpc.future(name.encode(), timeout=timeout)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.servers.grpc_client")
    parser.add_argument("port", type=int)
    parser.add_argument("--rpc", nargs=2, action="append", metavar=("KIND", "NAME"), default=[])
    parser.add_argument("--timeout", type=float)
    arguments = parser.parse_args()
    with grpc.insecure_channel(f"127.0.0.1:{arguments.port}") as channel:
        calls = [call(channel, kind, name, arguments.timeout) for kind, name in arguments.rpc]
        sys.stdin.readline()
        for each in calls:
            each.cancel()
        sys.stdin.readline()


if __name__ == "__main__":
    main()
