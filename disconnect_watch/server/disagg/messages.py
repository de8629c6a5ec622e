"""What a prefill node answers, and a decode node is given: the same document."""

import base64
import binascii

import msgspec

from disconnect_watch.disagg import Ticket
from disconnect_watch.engine import RequestOutput, TokenLogprobs
from disconnect_watch.engine.outcome import Sampled
from disconnect_watch.server.errors import ProtocolError

__all__ = ["PREFILL_HEADER", "TICKET_HEADER", "Prefilled", "TicketDocument"]

#: Asks a node to prefill only; of any value.
PREFILL_HEADER = "x-kv-prefill"
#: Has a ``Prefilled`` document for a node that is to decode, in URL-safe base64.
TICKET_HEADER = "x-kv-ticket"

#: A ticket names where to connect to: no longer than a header may be.
MAX_HEADER = 1 << 15


class TicketDocument(msgspec.Struct, frozen=True):
    """``disagg.Ticket``."""

    address: str
    transfer_id: str
    owner: str
    lease_ns: int

    @classmethod
    def of(cls, ticket: Ticket) -> "TicketDocument":
        return cls(ticket.address, ticket.transfer_id, ticket.owner, ticket.lease_ns)

    def ticket(self) -> Ticket:
        return Ticket(self.address, self.transfer_id, self.owner, self.lease_ns)


class Prefilled(msgspec.Struct, frozen=True):
    """A prompt that was computed.

    Attributes:
        first_token: that follows it; None if the request cannot be parted, and is to be computed
            whole by whoever is asked next.
        logprob, top: of that token, if the request wants them.
        seed: of the random numbers from here on.
        digest: see ``engine.remote.RemotePrefill``.
        ticket: for the cache of the prompt; None if nothing is kept, since the answer ended with
            its first token or there was no room.
    """

    first_token: int | None = None
    logprob: float | None = None
    top: list[tuple[int, float]] = []
    seed: int = 0
    digest: str = ""
    ticket: TicketDocument | None = None

    @classmethod
    def of(
        cls, first: RequestOutput, *, seed: int, digest: str, ticket: Ticket | None
    ) -> "Prefilled":
        logprobs = first.logprobs[0] if first.logprobs else None
        return cls(
            first.token_ids[0],
            logprobs.logprob if logprobs else None,
            list(logprobs.top) if logprobs else [],
            seed,
            digest,
            TicketDocument.of(ticket) if ticket else None,
        )

    @property
    def sampled(self) -> Sampled:
        """The first token as an engine takes it."""
        assert self.first_token is not None
        if self.logprob is None:
            return Sampled(self.first_token)
        top = tuple(self.top)
        return Sampled(self.first_token, TokenLogprobs(self.first_token, self.logprob, top))

    def header(self) -> str:
        """As the value of ``TICKET_HEADER``."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()

    @classmethod
    def of_header(cls, value: bytes) -> "Prefilled":
        """Read the value of ``TICKET_HEADER``.

        Raises:
            ProtocolError: it is none.
        """
        try:
            if len(value) > MAX_HEADER:
                raise ValueError(f"{len(value)} bytes are too many")
            return msgspec.json.decode(base64.urlsafe_b64decode(value), type=cls)
        except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
            raise ProtocolError(f"{TICKET_HEADER} is no prefill's answer: {error}") from error
