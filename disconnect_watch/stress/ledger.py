"""What the server says of its requests, in its metrics: before, and once it has settled."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from disconnect_watch.stress.connection import Connections
from disconnect_watch.stress.exchange import WrongAnswerError
from disconnect_watch.stress.http import HttpResponse, request_bytes
from disconnect_watch.stress.target import Target

__all__ = ["ServerCounts", "counts_of_page", "read_counts", "settled_counts"]

_SCRAPE_TIMEOUT = 5.0
_SCRAPE_PERIOD = 0.05
#: Readings in a row, of a server that does not count its requests.
_NUM_UNCOUNTED = 10


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """One reading; None for what this server does not tell.

    The first three only grow, and are given only where each request is in one of them; the
    others but the last two are of the moment.

    Attributes:
        num_held: KV blocks that are in use or retained.
        num_unacked: cancels that were asked for and are not done.
        num_tokens: generated since the server started.
        source: whose metrics these are.
    """

    num_finished: int | None = None
    num_cancelled: int | None = None
    num_failed: int | None = None
    num_waiting: int | None = None
    num_running: int | None = None
    num_held: int | None = None
    num_unacked: int | None = None
    num_tokens: int | None = None
    source: str = "disconnect_watch"

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left of any request, as far as is told."""
        return not any((self.num_waiting, self.num_running, self.num_held, self.num_unacked))

    @property
    def shows_work(self) -> bool:
        """Whether it would be seen that the server works on for who left."""
        return self.num_running is not None


async def read_counts(target: Target) -> ServerCounts | None:
    """Read the metrics page at ``target``; None if there is none, or none that is known."""
    try:
        async with asyncio.timeout(_SCRAPE_TIMEOUT):
            text = await _get(target)
        return counts_of_page(text)
    except (OSError, EOFError, WrongAnswerError, ValueError):
        return None


async def settled_counts(
    target: Target, *, is_settled: Callable[[ServerCounts], bool], within: float
) -> ServerCounts | None:
    """Read until some readings in a row are settled; after ``within`` seconds the last one.

    Two, since a request may be on its way into the engine at the first; more of a server that does
    not count its requests, where nothing else says that all of them have arrived.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within
    num_settled = 0
    while True:
        counts = await read_counts(target)
        num_settled = num_settled + 1 if counts is not None and is_settled(counts) else 0
        is_counted = counts is not None and counts.num_finished is not None
        if num_settled == (2 if is_counted else _NUM_UNCOUNTED) or loop.time() >= deadline:
            return counts
        await asyncio.sleep(_SCRAPE_PERIOD)


async def _get(target: Target) -> str:
    response, body = HttpResponse(), b""
    connections = Connections(await target.resolve(), target)
    with contextlib.closing(await connections.open()) as connection:
        await connection.send(request_bytes(target, b"", method="GET"))
        while not response.is_complete:
            data = await connection.receive(1 << 16)
            if not data:
                raise EOFError
            body += response.feed(data)
    return body.decode()


class _Page:
    """The samples of a page, to be summed up over labels that nobody asks for."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def total(self, name: str, **labels: tuple[str, ...]) -> int | None:
        """The sum of a metric's samples with one of these values of each label.

        Returns:
            None if the page has no such metric; 0 if only none with these labels, which some
            servers show from their first event on.
        """
        named = [sample for sample in self._samples if sample.name == name]
        if not named:
            return None
        return int(
            sum(
                sample.value
                for sample in named
                if all(sample.labels.get(label) in values for label, values in labels.items())
            )
        )


def counts_of_page(text: str) -> ServerCounts | None:
    """What a page of metrics says; None if it is no server's that is known.

    Raises:
        ValueError: it is no page of metrics.
    """
    page = _Page(text)
    for source in (_ours, _other, _triton):
        if (counts := source(page)) is not None:
            return counts
    return None


def _ours(page: _Page) -> ServerCounts | None:
    name = "dw_requests_total"
    held = page.total("dw_kv_blocks", state=("used", "retained"))
    if page.total(name) is None or held is None:
        return None
    return ServerCounts(
        num_finished=page.total(name, outcome=("finished",)),
        num_cancelled=page.total(name, outcome=("cancelled",)),
        num_failed=page.total(name, outcome=("failed",)),
        num_waiting=page.total("dw_requests", state=("waiting",)),
        num_running=page.total("dw_requests", state=("running",)),
        num_held=held,
        num_unacked=page.total("dw_unacked_cancels"),
        num_tokens=page.total("dw_tokens_total", kind=("generated",)),
    )


# Of the others none says of each request how it ended: vLLM and Triton count some that were
# cancelled as successes or not at all, depending on the version. What is there of the moment, and
# the tokens, does not lie.

#: By the server: its metrics of who runs, who waits, and the tokens that were generated.
_NAMES = {
    "vLLM": (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:generation_tokens_total",
    ),
    "SGLang": (
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:generation_tokens_total",
    ),
    "TGI": ("tgi_batch_current_size", "tgi_queue_size", "tgi_request_generated_tokens_sum"),
    "llama.cpp": (
        "llamacpp:requests_processing",
        "llamacpp:requests_deferred",
        "llamacpp:tokens_predicted_total",
    ),
}


def _other(page: _Page) -> ServerCounts | None:
    for source, (running, waiting, tokens) in _NAMES.items():
        if (num_running := page.total(running)) is not None:
            return ServerCounts(
                num_waiting=page.total(waiting),
                num_running=num_running,
                num_tokens=page.total(tokens),
                source=source,
            )
    return None


def _triton(page: _Page) -> ServerCounts | None:
    """Triton says what is in its queue, not what its models work on."""
    waiting = page.total("nv_inference_pending_request_count")
    if waiting is None:
        return None
    return ServerCounts(num_waiting=waiting, source="Triton")
