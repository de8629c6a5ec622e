"""One request on a real server, ended in one way in one phase, and all that was said of it."""

import contextlib
import itertools
import json
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from prometheus_client.parser import text_string_to_metric_families

from disconnect_watch.backends.embedder import EmbedderBackend
from disconnect_watch.engine import Embedder
from disconnect_watch.keys import Caller, KeyRing, Role, digest_of
from disconnect_watch.server import run
from disconnect_watch.server.access import RequestRecord
from disconnect_watch.testing import LeavingClient, Way
from tests.abort.cells import Cell, Observed
from tests.abort.stages import NUM_STEPS, Stage, stage_of, write_held_model
from tests.support.bert import random_embedder
from tests.support.http import request_bytes
from tests.support.net import PATIENCE, unread_bytes, wait_until
from tests.support.serve import Serving, packaged_engine, serving_engine

__all__ = ["measure_all"]

#: How much each source of signals counted, and each outcome with its phase.
Counters = tuple[Counter[str], Counter[tuple[str, str]]]

ALICE = Caller("alice", Role.USER)
_HEADERS = {"Authorization": "Bearer alice-key"}

#: Seconds of the first deadline that is tried; one that passes before its phase is reached is
#: tried again, twice as long.
DEADLINE = 0.25

_names = itertools.count()


def measure_all(cells: Sequence[Cell]) -> dict[Cell, Observed]:
    """Measure cells, on one server but for those that end theirs.

    Raises:
        AssertionError: something did not come; the note says in which cell.
    """
    together = [cell for cell in cells if cell.who != "shutdown"]
    alone = [[cell] for cell in cells if cell.who == "shutdown"]
    found: dict[Cell, Observed] = {}
    for group in ([together] if together else []) + alone:
        with serving_all({cell.kind.work for cell in group}) as bench:
            for cell in group:
                try:
                    found[cell] = bench.measure(cell)
                except Exception as error:
                    error.add_note(f"in {cell}")
                    raise
    return {cell: found[cell] for cell in cells}


@contextlib.contextmanager
def serving_all(works: set[str]) -> Iterator["Bench"]:
    """A server for these kinds of work."""
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        repository, requests = folder / "models", folder / "requests"
        repository.mkdir()
        requests.mkdir()
        embedder = backend = None
        if "encoder" in works:
            embedder = random_embedder()
            backend = EmbedderBackend(embedder, name="bert")
            ends.callback(backend.close)
        if "process" in works:
            write_held_model(repository)
        # Who was cut short is told so, however slow the machine is.
        ends.enter_context(mock.patch.object(run, "FLUSH", PATIENCE))
        lines = ends.enter_context(_access_lines())
        serving = ends.enter_context(
            serving_engine(
                packaged_engine(max_num_seqs=1),
                grace=0.0,
                keys=KeyRing([(ALICE, digest_of("alice-key"))]),
                embedder=backend,
                repository=repository if "process" in works else None,
            )
        )
        bench = Bench(serving, embedder, requests, lines)
        yield bench
        bench.check_that_nothing_is_left()


class Bench:
    """A server, and the counters by which it is judged."""

    def __init__(
        self,
        serving: Serving,
        embedder: Embedder | None,
        folder: Path,
        lines: list[dict[str, Any]],
    ) -> None:
        self._serving = serving
        self._embedder = embedder
        self._folder = folder
        self._lines = lines

    def measure(self, cell: Cell) -> Observed:
        """Let one request come and end."""
        seconds = DEADLINE
        while True:
            with stage_of(
                cell.kind.work,
                cell.phase,
                self._serving,
                self._embedder,
                self._folder,
                cell.kind.body,
            ) as stage:
                observed = self._try(cell, stage, seconds)
            self._settle()
            if observed is not None:
                return observed
            seconds *= 2

    def check_that_nothing_is_left(self) -> None:
        """Gauges are zero again, blocks are free, each request that came has ended."""
        wait_until(self._serving.is_idle)
        self._serving.engine.check_integrity()
        assert self._serving.frontend.ledger.live() == []
        assert self._serving.frontend.stats().num_unacked == 0

    def _try(self, cell: Cell, stage: Stage, seconds: float) -> Observed | None:
        """None if a deadline was over before the request was in its phase."""
        name = f"cell-{next(_names)}"
        headers = {**_HEADERS, "X_Request_Id": name}
        if cell.who == "deadline":
            headers["X_Request_Timeout"] = f"{seconds}"
        with self._client() as asker, self._client() as client:
            wait_until(lambda: self._serving.watcher.stats().num_connections >= 2)
            before, num_lines = self._counters(), len(self._lines)
            tokens_before = self._serving.backend.stats().num_generated_tokens
            began = time.monotonic()
            client.send(request_bytes(cell.kind.path, dict(stage.body), **headers))
            answer = ""
            if cell.phase == "finished":
                answer = _answer(client)
            record = self._record(name)
            stage.reach()
            if cell.phase == "finished":
                wait_until(lambda: not self._serving.frontend.ledger.is_live(record))
            elif cell.has_head:
                wait_until(lambda: unread_bytes(client.sock) > 0)
            if record.token.cancelled:
                return None
            asked = self._end(cell, client, asker, name, began + seconds, before)
            stage.release(lambda: record.outcome is not None)
            reply = ""
            if asked:
                reply = str(json.loads(asker.answer().body)["status"])
            wait_until(lambda: self._lines_of(record))
            if not answer:
                answer = _rest(client, cell) if cell.is_left else _answer(client)
            if cell.who == "shutdown":
                stage.open()
                wait_until(lambda: self._are_all_logged(before, num_lines))
            signals, outcomes = self._since(before)
            lines = self._lines_of(record)
            for line in self._lines[num_lines:]:
                # A shutdown ends whoever held the place, too.
                if line not in lines and "outcome" in line:
                    outcomes[line["outcome"], line["phase"]] -= 1
                    signals[line["reason"]] -= 1
            signals.pop("owner_closed", None)
            late = 0
            if cell.phase == "decode" and cell.kind.work == "engine":
                generated = self._serving.backend.stats().num_generated_tokens - tokens_before
                late = generated - NUM_STEPS
            elif cell.phase != "finished":
                late = sum(line["tokens"] for line in lines)
        return Observed(+signals, +outcomes, tuple(lines), answer, reply, late)

    def _end(
        self,
        cell: Cell,
        client: LeavingClient,
        asker: LeavingClient,
        name: str,
        due: float,
        before: Counters,
    ) -> bool:
        """Ask for the end of the request; returns whether by the API, once all was counted."""
        asks = cell.who in ("api", "both")
        is_blocked = cell.who == "both" and cell.is_told_at_once
        # Both are there before the server looks at either.
        unblock = self._serving.http.block_loop() if is_blocked else lambda: None
        if cell.who in ("fin", "both"):
            # What the engine has sent may be on its way, and a close that leaves it unread were
            # a reset; who half-closes has left all the same.
            client.leave(Way.HALF_CLOSE if cell.has_head else Way.FIN)
        elif cell.who == "rst":
            client.leave(Way.RST)
        elif cell.who == "shutdown":
            self._serving.http.server.should_exit = True
        if asks:
            path = f"/v1/requests/{name}/cancel"
            asker.send(request_bytes(path, {"wait": 60}, **_HEADERS))
        unblock()
        if cell.who == "deadline":
            wait_until(lambda: time.monotonic() > due)
        if cell.who == "shutdown" and cell.phase == "finished":
            with contextlib.suppress(EOFError):
                client.read(1)  # the server closes what is idle
        signals = cell.expected.signals[-1 if cell.is_told_at_once else 0]
        wait_until(lambda: self._since(before)[0].total() >= len(signals))
        return asks

    def _client(self) -> LeavingClient:
        return LeavingClient(f"http://127.0.0.1:{self._serving.port}", timeout=PATIENCE)

    def _record(self, name: str) -> RequestRecord:
        ledger = self._serving.frontend.ledger
        wait_until(lambda: ledger.find(ALICE, name))
        record = ledger.find(ALICE, name)
        assert record is not None
        return record

    def _lines_of(self, record: RequestRecord) -> list[dict[str, Any]]:
        return [line for line in self._lines if line["request_id"] == record.request_id]

    def _are_all_logged(self, before: Counters, num_lines: int) -> bool:
        logged = [line for line in self._lines[num_lines:] if line.get("reason") == "shutdown"]
        return len(logged) == self._since(before)[0]["shutdown"]

    def _counters(self) -> Counters:
        return _counters(self._serving.metrics.render().decode())

    def _since(self, before: Counters) -> Counters:
        now = self._counters()
        return now[0] - before[0], now[1] - before[1]

    def _settle(self) -> None:
        """Wait until what the cell left behind has ended, so that the next one counts anew."""
        if not self._serving.http.server.should_exit:
            wait_until(lambda: self._serving.watcher.stats().num_connections == 0)
        wait_until(self._serving.is_idle)
        wait_until(lambda: self._serving.frontend.ledger.live() == [])


def _answer(client: LeavingClient) -> str:
    """What a client that is there is told."""
    answer = client.answer()
    events = [part.partition(b"data: ")[2] for part in answer.body.split(b"\n\n")]
    events = [event for event in events if event]
    if not events or answer.status != 200 or events[-1] == b"[DONE]":
        return str(answer.status)
    last = json.loads(events[-1])
    response = last.get("response", {})
    if response.get("status") == "cancelled":
        return "499 in the stream"
    error = last.get("error") or response.get("error")
    if error is None:
        return "200"
    message = error if isinstance(error, str) else error["message"]
    return f"{_status_of(message)} in the stream"


def _status_of(message: str) -> int:
    """Which status an error in a stream stands for."""
    for words, status in (("aborted", 499), ("time that", 504), ("shutting down", 503)):
        if words in message:
            return status
    return 500


def _rest(client: LeavingClient, cell: Cell) -> str:
    """What a client is told that has left; one that half-closed can still read."""
    if client.sock.fileno() < 0 or cell.who == "rst":
        return "nothing"
    rest = b""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            rest += client.read(1)
    if not rest.endswith(b"0\r\n\r\n"):
        return "nothing"
    is_cancel = b"aborted" in rest or b'"status":"cancelled"' in rest
    return "499 in the stream" if is_cancel else "complete"


def _counters(text: str) -> Counters:
    signals: Counter[str] = Counter()
    outcomes: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels, count = sample.labels, int(sample.value)
            if sample.name == "dw_signals_total":
                signals[labels["source"]] += count
            elif sample.name == "dw_requests_total":
                outcomes[labels["outcome"], labels["phase"]] += count
    return signals, outcomes


@contextlib.contextmanager
def _access_lines() -> Iterator[list[dict[str, Any]]]:
    """The access log, as it is written."""
    lines: list[dict[str, Any]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(vars(record))

    logger, handler = logging.getLogger("disconnect_watch.access"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
