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
from disconnect_watch.server.openai.responses import service
from disconnect_watch.testing import LeavingClient, Way
from tests.abort.cells import SO_FAR, Cell, Observed
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
DEADLINE = 0.5

#: Events of a response that are its end.
_LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")

_names = itertools.count()


def measure_all(cells: Sequence[Cell]) -> dict[Cell, Observed]:
    """Measure cells, on one server but for those that end theirs.

    Raises:
        AssertionError: something did not come; the note says in which cell.
    """
    together = [cell for cell in cells if "shutdown" not in cell.causes]
    alone = [[cell] for cell in cells if "shutdown" in cell.causes]
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
        ends.enter_context(mock.patch.object(service, "LAST_WORDS", PATIENCE))
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
        if "deadline" in cell.causes:
            headers["X_Request_Timeout"] = f"{seconds}"
        with self._client() as asker, self._client() as client:
            wait_until(lambda: self._serving.watcher.stats().num_connections >= 2)
            before, num_lines = self._counters(), len(self._lines)
            tokens_before = self._serving.backend.stats().num_generated_tokens
            began = time.monotonic()
            client.send(request_bytes(cell.kind.path, dict(stage.body), **headers))
            answer = ""
            is_background = cell.kind.outlives and not cell.kind.is_stream
            if cell.phase == "finished":
                answer = _answer(client)
            try:
                stage.reach()
            except AssertionError:
                if "deadline" not in cell.causes:
                    raise
                return None  # it ended on its way
            if is_background and not answer:
                answer = _answer(client)  # comes when it is queued, which is between two steps
            # Of what is there now: a response of the background goes on as another record.
            record = self._record(name)
            if cell.phase == "finished":
                wait_until(lambda: not self._serving.frontend.ledger.is_live(record))
            elif cell.has_head:
                wait_until(lambda: unread_bytes(client.sock) > 0)
            is_over = cell.phase != "finished" and record.outcome is not None
            if record.token.cancelled or is_over:
                return None
            asked = self._end(cell, client, asker, name, began + seconds, before)
            # An abort that came when the engine had ended it already is answered behind one more
            # step.
            stage.release(
                lambda: record.outcome is not None and (not asked or unread_bytes(asker.sock) > 0),
                without_holder=cell.runs_on,
            )
            reply = ""
            if asked:
                reply = str(json.loads(asker.answer().body)["status"])
            wait_until(lambda: self._lines_of(record, cell))
            lines = self._lines_of(record, cell)
            if is_background:
                answer = f"{answer}, then {lines[0]['response_status']}"
            if not answer:
                answer = _rest(client, cell) if cell.is_left else _answer(client)
            is_shutdown = "shutdown" in cell.causes
            if is_shutdown:
                stage.open()
            if cell.phase == "queued" and (is_shutdown or cell.runs_on):
                # Whoever held the place has ended, too.
                wait_until(lambda: len(self._others(record, num_lines)) == 1)
            signals, outcomes = self._since(before)
            for line in self._others(record, num_lines):
                if line["outcome"] == "finished":
                    outcomes["finished", "decode"] -= 1
                else:
                    outcomes[line["outcome"], line["phase"]] -= 1
                    signals[line["reason"]] -= 1
            signals.pop("owner_closed", None)
            late = 0
            if cell.runs_on:
                pass  # what is generated behind the signal is what was asked for
            elif cell.phase == "decode" and cell.kind.work == "engine":
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
        is_blocked = len(cell.causes) > 1 and cell.is_told_at_once
        # Both are there before the server looks at either.
        unblock = self._serving.http.block_loop() if is_blocked else lambda: None
        for cause in cell.causes:
            if cause == "fin":
                # What the engine has sent may be on its way, and a close that leaves it unread
                # were a reset; who half-closes has left all the same.
                client.leave(Way.HALF_CLOSE if cell.has_head else Way.FIN)
            elif cause == "rst":
                client.leave(Way.RST)
            elif cause == "shutdown":
                self._serving.http.server.should_exit = True
            elif cause == "api":
                path = f"/v1/requests/{name}/cancel"
                asker.send(request_bytes(path, {"wait": 60}, **_HEADERS))
            else:
                wait_until(lambda: time.monotonic() > due)
        unblock()
        if cell.who == "shutdown" and cell.phase == "finished" and not cell.kind.outlives:
            with contextlib.suppress(EOFError):
                client.read(1)  # the server closes what is idle
        wait_until(lambda: self._since(before)[0].total() >= cell.num_signals)
        if cell.runs_on or cell.kind.outlives:
            # Not before its end was asked for: what goes on without its client would come to it.
            is_shutdown = "shutdown" in cell.causes and cell.phase != "finished"
            wait_until(lambda: self._since(before)[0]["shutdown"] >= is_shutdown)
        if cell.is_left and "shutdown" not in cell.causes:
            wait_until(lambda: sum(self._since(before)[0][each] for each in ("fin", "reset")))
        return "api" in cell.causes

    def _client(self) -> LeavingClient:
        return LeavingClient(f"http://127.0.0.1:{self._serving.port}", timeout=PATIENCE)

    def _record(self, name: str) -> RequestRecord:
        ledger = self._serving.frontend.ledger
        wait_until(lambda: ledger.find(ALICE, name))
        record = ledger.find(ALICE, name)
        assert record is not None
        return record

    def _lines_of(self, record: RequestRecord, cell: Cell) -> list[dict[str, Any]]:
        """Of the request; in the background, of what goes on when that is answered."""
        lines = [line for line in self._lines if line["request_id"] == record.request_id]
        return [line for line in lines if "outcome" in line] if cell.kind.outlives else lines

    def _others(self, record: RequestRecord, num_lines: int) -> list[dict[str, Any]]:
        """The lines behind so many of other requests that came to be worked on."""
        return [
            line
            for line in self._lines[num_lines:]
            if line["request_id"] != record.request_id and "outcome" in line
        ]

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
    if str(last.get("type")).startswith("response.") and last["type"] not in _LAST_EVENTS:
        return SO_FAR
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
    if client.sock.fileno() < 0 or "rst" in cell.causes:
        return "nothing"
    rest = b""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            rest += client.read(1)
    if not rest.endswith(b"0\r\n\r\n"):
        return "nothing"
    if b'"status":"cancelled"' in rest:
        return "499 in the stream"
    status = _status_of(rest.decode())
    return SO_FAR if status == 500 and cell.kind.outlives else f"{status} in the stream"


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

    handler = Handler()
    # A response of the background has a line of its own.
    loggers = [logging.getLogger(f"disconnect_watch.{name}") for name in ("access", "responses")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
            logger.removeHandler(handler)
