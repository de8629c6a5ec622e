"""Where a Triton is, and how its channel is opened."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import grpc
from grpc import aio

__all__ = ["Connecting", "Endpoint", "parse_endpoints"]

DEFAULT_PORT = 8001
_SCHEMES = {"grpc": False, "grpcs": True}
#: A message's length is a signed integer of 32 bits at both ends.
MAX_MESSAGE_BYTES = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a Triton's gRPC port.

    Attributes:
        is_secure: whether it is spoken to under TLS.
    """

    host: str
    port: int
    is_secure: bool = False

    @classmethod
    def parse(cls, text: str) -> "Endpoint":
        """Read ``grpc://host:port``, or ``grpcs://`` for TLS; without a port, Triton's 8001.

        Raises:
            ValueError: it is none.
        """
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"cannot read {text!r} as the address of a Triton: {error}") from error
        extras = (parts.path, parts.query, parts.fragment, parts.username, parts.password)
        if parts.scheme not in _SCHEMES or not parts.hostname or any(extras):
            raise ValueError(
                f"cannot read {text!r} as the address of a Triton: give grpc://HOST:PORT, "
                "or grpcs://HOST:PORT for TLS"
            )
        return cls(parts.hostname, port or DEFAULT_PORT, _SCHEMES[parts.scheme])

    @property
    def target(self) -> str:
        """As gRPC takes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'grpcs' if self.is_secure else 'grpc'}://{self.target}"


def parse_endpoints(texts: Iterable[str]) -> list[Endpoint]:
    """All that are named, each text one or several with commas between.

    Raises:
        ValueError: one is none, or is named twice, or none is named.
    """
    endpoints: list[Endpoint] = []
    for text in (each.strip() for joined in texts for each in joined.split(",")):
        endpoint = Endpoint.parse(text)
        if endpoint in endpoints:
            raise ValueError(f"{endpoint} is named twice, name each Triton once")
        endpoints.append(endpoint)
    if not endpoints:
        raise ValueError("no Triton is named: give grpc://HOST:PORT")
    return endpoints


@dataclass(frozen=True, slots=True)
class Connecting:
    """What all channels have in common.

    Attributes:
        max_message_bytes: of a request or a response, both ways.
        root_certificates, certificate, private_key: in PEM; None for the system's, and for
            a client that shows none.
        server_name: in the certificate of the Tritons; None for the name in the address.
        headers: go with every call, such as the key of a restricted protocol.
        probe_seconds: between two questions whether a Triton is ready and what it serves.
    """

    max_message_bytes: int = MAX_MESSAGE_BYTES
    root_certificates: bytes | None = None
    certificate: bytes | None = None
    private_key: bytes | None = None
    server_name: str | None = None
    headers: Sequence[tuple[str, str]] = ()
    probe_seconds: float = 2.0

    def open(self, endpoint: Endpoint) -> aio.Channel:
        """Make a channel, which connects by and by.

        Threads: that of the loop on which it is used.
        """
        options: list[tuple[str, Any]] = [
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            # A Triton that was restarted is there again within seconds.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
            # Channels to one address share a connection otherwise, and its streams' limit.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if not endpoint.is_secure:
            return aio.insecure_channel(endpoint.target, options)
        if self.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.server_name))
        credentials = grpc.ssl_channel_credentials(
            self.root_certificates, self.private_key, self.certificate
        )
        return aio.secure_channel(endpoint.target, credentials, options)
