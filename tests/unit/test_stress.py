"""The stress tool's parts: plans, targets, answers, and the ledger that must balance."""

import json
from collections import Counter
from typing import Any

import pytest

from disconnect_watch.stress import Point, Report, StressOptions, TargetError, Way, parse_target
from disconnect_watch.stress.checks import check_clients, check_server
from disconnect_watch.stress.client import Ending, Outcome
from disconnect_watch.stress.exchange import WrongAnswerError
from disconnect_watch.stress.generate import GenerateAnswer, GenerateExchange
from disconnect_watch.stress.http import HttpResponse
from disconnect_watch.stress.ledger import ServerCounts
from disconnect_watch.stress.lines import LineAnswer, LineExchange
from disconnect_watch.stress.plan import ClientPlan, Leave, PlanOptions, plan_clients
from disconnect_watch.stress.tally import Counts
from disconnect_watch.stress.target import Target

STREAM = parse_target("http://127.0.0.1:8000/v2/models/tiny/generate_stream")


def plan(seed: int, *, max_pieces: int = 3, **more: Any) -> list[ClientPlan]:
    options = PlanOptions(
        **{"num_stay": 100, "num_leave": 1000, "ways": tuple(Way), "max_delay": 0.5, **more},
        seed=seed,
    )
    return list(plan_clients(options, max_pieces=max_pieces))


def test_same_seed_gives_the_same_clients_and_another_gives_others() -> None:
    assert plan(1) == plan(1)
    assert plan(1) != plan(2)


def test_plan_has_every_way_at_every_point_that_makes_sense() -> None:
    leaves = [client.leave for client in plan(1) if client.leave is not None]
    assert len(leaves) == 1000
    found = {(leave.way, leave.point) for leave in leaves}
    expected = {(way, point) for way in Way for point in Point}
    assert found == expected - {
        (way, point)
        for way in (Way.BEHIND_REQUEST, Way.BEHIND_BODY)
        for point in (Point.CONNECTED, Point.IN_REQUEST)
    }
    assert {leave.num_pieces for leave in leaves} == {1, 2, 3}
    assert all(0 <= leave.fraction < 1 and 0 <= leave.delay <= 0.5 for leave in leaves)


def test_nobody_leaves_in_the_middle_of_an_answer_of_one_piece() -> None:
    leaves = [client.leave for client in plan(1, max_pieces=0)]
    in_answer = (Point.STREAMING, Point.STALLED)
    assert not [leave for leave in leaves if leave and leave.point in in_answer]


def test_plan_has_as_many_of_either_kind_as_were_asked_for_in_any_order() -> None:
    clients = plan(1, num_stay=3, num_leave=5)
    assert [client.index for client in clients] == list(range(8))
    assert sum(client.leave is None for client in clients) == 3
    orders = {tuple(c.leave is None for c in plan(s, num_stay=3, num_leave=5)) for s in range(500)}
    assert len(orders) == 56  # each choice of 3 in 8


def test_clients_of_an_open_loop_are_due_at_the_rate_that_was_asked_for() -> None:
    dues = [client.due for client in plan(1, rate=50.0, num_stay=5000)]
    assert dues == sorted(dues)
    assert 0.9 < dues[-1] / (6000 / 50) < 1.1
    assert {client.due for client in plan(1)} == {0.0}


def test_shares_of_kept_connections_and_of_slow_readers_are_about_those_asked_for() -> None:
    clients = plan(1, kept=0.25, slow=0.5, num_stay=4000)
    assert 0.2 < sum(client.is_kept for client in clients) / len(clients) < 0.3
    slow = [client.is_slow for client in clients if client.leave is None]
    assert 0.45 < sum(slow) / len(slow) < 0.55
    assert not any(client.is_slow for client in clients if client.leave is not None)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kept": 1.5}, "kept is 1.5, must be a share"),
        ({"slow": -0.1}, "slow is -0.1, must be a share"),
        ({"rate": 0.0}, "rate is 0.0, must be above 0"),
        ({"points": ()}, "no point to leave at"),
    ],
)
def test_run_of_what_cannot_be_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        StressOptions(**options)


def test_way_that_goes_with_no_point_is_refused_before_the_first_client() -> None:
    options = PlanOptions(
        num_stay=1, num_leave=1, ways=(Way.BEHIND_BODY,), points=(Point.IN_REQUEST,)
    )
    with pytest.raises(ValueError, match="nobody can leave by behind_body at in_request"):
        plan_clients(options, max_pieces=1)


def test_a_run_without_a_way_to_leave_is_refused() -> None:
    with pytest.raises(ValueError, match="no way to leave"):
        StressOptions(ways=())


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("localhost:9000", Target("localhost", 9000)),
        ("[::1]:9000", Target("::1", 9000)),
        ("http://[::1]:8000/a/generate?b=c", Target("::1", 8000, "/a/generate?b=c")),
        ("http://example.org:80/generate", Target("example.org", 80, "/generate")),
        ("https://a:443/generate", Target("a", 443, "/generate", is_tls=True)),
        ("http://a:8000", Target("a", 8000, "")),
    ],
)
def test_target_is_understood_and_printed_as_typed(text: str, target: Target) -> None:
    assert parse_target(text) == target
    assert str(target) == text


@pytest.mark.parametrize(("text", "port"), [("http://a/b", 80), ("https://a/b", 443)])
def test_port_that_is_not_given_is_that_of_the_scheme(text: str, port: int) -> None:
    assert parse_target(text).port == port


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("localhost", "give host:port"),
        (":9000", "give host:port"),
        ("localhost:9000/path", "give host:port"),
        ("localhost:70000", "from 0 to 65535"),
        ("[::1:80", "cannot go to"),
        ("ftp://localhost/generate", "the scheme must be http or https"),
        ("http:///generate", "the whole URL"),
    ],
)
def test_target_that_is_none_is_refused_with_what_to_do(text: str, why: str) -> None:
    with pytest.raises(TargetError, match=why):
        parse_target(text)


def test_url_of_another_endpoint_is_refused() -> None:
    with pytest.raises(TargetError, match=r"http://a:1/v2/models/NAME/generate_stream"):
        GenerateExchange(Target("a", 1, "/v2/health/live"))


def test_index_goes_into_the_line_and_into_what_is_expected() -> None:
    exchange = LineExchange(send="hello {index}", expect="HELLO {index}")
    assert exchange.request(7, leaves=False) == b"hello 7\n"
    answer = exchange.answer(7)
    answer.feed(b"HELLO")
    assert (answer.num_pieces, answer.is_complete) == (0, False)
    answer.feed(b" 7\r\n")
    assert (answer.num_pieces, answer.is_complete) == (1, True)
    with pytest.raises(WrongAnswerError, match="not what it must be"):
        exchange.answer(8).feed(b"HELLO 7\n")


@pytest.mark.parametrize("data", [b"a\nb\nc\n", b"a\nb\nc"])
def test_more_lines_than_asked_for_are_wrong(data: bytes) -> None:
    with pytest.raises(WrongAnswerError, match="more came"):
        LineAnswer(2, None).feed(data)


@pytest.mark.parametrize(
    ("data", "is_complete"), [(b"a\nb\n", True), (b"a\nb", False), (b"", False)]
)
def test_answer_until_the_server_closes_ends_with_a_whole_line(
    data: bytes, is_complete: bool
) -> None:
    answer = LineAnswer(None, None)
    answer.feed(data)
    assert not answer.is_complete
    answer.end()
    assert answer.is_complete is is_complete


def test_end_of_connection_completes_no_counted_answer() -> None:
    answer = LineAnswer(2, None)
    answer.feed(b"a\n")
    answer.end()
    assert not answer.is_complete


def response(*chunks: bytes, status: int = 200, last: bytes = b"0\r\n\r\n") -> bytes:
    head = b"HTTP/1.1 %d Any\r\nTransfer-Encoding: chunked\r\n\r\n" % status
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + last


EVENT = b'data: {"text_output":"x"}\n\n'


def test_stream_is_complete_with_its_last_chunk_however_it_is_cut() -> None:
    whole = response(EVENT, EVENT, b": a comment\n\n", EVENT)
    answer = GenerateAnswer(is_stream=True)
    for i in range(len(whole)):
        assert not answer.is_complete
        answer.feed(whole[i : i + 1])
    assert answer.is_complete
    assert answer.num_pieces == 3


def test_interim_response_is_not_the_answer() -> None:
    answer = GenerateAnswer(is_stream=True)
    answer.feed(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert not answer.is_complete
    answer.feed(b"HTTP/1.1 100 Continue\r\n\r\n" + response(EVENT))
    assert answer.is_complete


def test_document_is_complete_at_its_end() -> None:
    answer = GenerateAnswer(is_stream=False)
    answer.feed(response(b'{"text_output":', b'"x"}', last=b""))
    assert (answer.is_complete, answer.num_pieces) == (False, 0)
    answer.feed(b"0\r\n\r\n")
    assert (answer.is_complete, answer.num_pieces) == (True, 1)


@pytest.mark.parametrize(
    ("is_stream", "data", "why"),
    [
        (True, response(b'{"error":"busy"}', status=503), "status 503"),
        (False, response(b'{"error":"busy"}', status=503), "status 503"),
        (True, response(b'data: {"error":"the model failed"}\n\n'), "the model failed"),
        (True, response(b"event: x\n\n"), "no server-sent event"),
        (True, response(EVENT, b'data: {"text'), "ends in mid-event"),
        (True, response(), "without any"),
        (False, response(b'{"text_output":1}'), "no text_output"),
        (False, response(b"[1]"), "no text_output"),
        (False, response(b"x"), "no JSON"),
        (False, response(b'{"text_output":"x"}') * 2, "more came"),
        (False, b"220 ready\r\n", "no HTTP"),
    ],
)
def test_wrong_answer_is_told_from_a_right_one(is_stream: bool, data: bytes, why: str) -> None:
    with pytest.raises(WrongAnswerError, match=why):
        GenerateAnswer(is_stream=is_stream).feed(data)


def test_what_comes_later_than_the_answer_is_too_much() -> None:
    parsed = HttpResponse()
    parsed.feed(response(b"x"))
    with pytest.raises(WrongAnswerError, match="more came"):
        parsed.feed(b"H")


def leave(way: Way = Way.FIN) -> Leave:
    return Leave(way, Point.AT_ONCE, fraction=0, delay=0, num_pieces=1)


def ledger(
    *, answered: int = 0, reading: int = 0, waiting: int = 0, incomplete: int = 0, opened: int = 0
) -> Counts:
    """The clients of a run, by how they ended."""
    counts = Counts(100)
    endings = [
        *[(None, Ending(Outcome.ANSWERED, is_request_complete=True, num_pieces=5))] * answered,
        *[(leave(), Ending(Outcome.LEFT, is_request_complete=True, num_pieces=2))] * reading,
        *[(leave(Way.RST), Ending(Outcome.LEFT, is_request_complete=True))] * waiting,
        *[(leave(), Ending(Outcome.LEFT))] * incomplete,
    ]
    for index, (leaving, ending) in enumerate(endings):
        counts.add(ClientPlan(index, leaving), ending)
    counts.num_sent = len(endings) + opened
    return counts


def server(
    finished: int = 0, cancelled: int = 0, failed: int = 0, *, waiting: int = 0, running: int = 0,
    held: int = 0, unacked: int = 0,
) -> ServerCounts:  # fmt: skip
    return ServerCounts(finished, cancelled, failed, waiting, running, held, unacked)


CLIENTS = ledger(answered=3, reading=2, waiting=2, incomplete=1)


@pytest.mark.parametrize("cancelled", [2, 3, 4])
def test_server_that_cancelled_who_left_and_finished_who_stayed_holds(cancelled: int) -> None:
    before = server(10, 20, 30)
    checks = check_server(CLIENTS, before, server(13, 20 + cancelled, 30))
    assert all(check.holds for check in checks), checks


@pytest.mark.parametrize(
    ("after", "broken"),
    [
        (server(4, 3), 0),  # one that left was worked for to the end
        (server(2, 3), 0),
        (server(3, 3, 1), 0),
        (server(3, 1), 1),  # one that left in mid-answer is in no count
        (server(3, 5), 1),  # a request behind another was begun for nobody
        (server(3, 3, waiting=1), 2),
        (server(3, 3, running=1), 2),
        (server(3, 3, held=1), 2),
        (server(3, 3, unacked=1), 2),
    ],
)
def test_server_that_did_anything_else_does_not(after: ServerCounts, broken: int) -> None:
    holds = [check.holds for check in check_server(CLIENTS, server(), after)]
    assert holds == [index != broken for index in range(3)]


@pytest.mark.parametrize(("finished", "holds"), [(2, False), (3, True), (5, True), (6, False)])
def test_who_left_as_its_answer_ended_may_have_been_finished_or_not(
    finished: int, holds: bool
) -> None:
    counts = ledger(answered=3)
    around = Leave(Way.FIN, Point.AROUND, fraction=0.5, delay=0, num_pieces=1)
    for _ in range(2):
        left = Ending(Outcome.LEFT, is_request_complete=True, num_pieces=2)
        counts.add(ClientPlan(0, around), left)
    counts.num_sent = counts.num_ended
    checks = check_server(counts, server(), server(finished, 0))
    assert [check.holds for check in checks] == [holds, True, True]


def test_answer_that_may_be_over_before_its_client_leaves_is_held_against_nobody() -> None:
    counts = Counts(1, outlasts=False)
    counts.add(ClientPlan(0, leave()), Ending(Outcome.LEFT, is_request_complete=True, num_pieces=1))
    counts.num_sent = 1
    for after in (server(1, 0), server(0, 1)):
        assert all(check.holds for check in check_server(counts, server(), after))


def test_answers_that_differ_are_found_where_they_must_be_the_same() -> None:
    counts = Counts(3, texts=Counter())
    for digest in ("a", "a", "b"):
        counts.add(ClientPlan(0, None), Ending(Outcome.ANSWERED, digest=digest))
    # One that leaves and is answered first had asked for another answer.
    counts.add(ClientPlan(0, leave()), Ending(Outcome.ANSWERED, digest="c"))
    counts.num_sent = 4
    *_, same = check_clients(counts, is_interrupted=False)
    assert (same.holds, same.detail) == (False, "2 different among 3 answers to who stayed")


def test_client_that_never_ended_breaks_the_balance_unless_the_run_was_interrupted() -> None:
    counts = ledger(answered=1, opened=1)
    assert counts.equation == "sent 2 = answered 1 + left 0 + failed 0 + open 1"
    assert [check.holds for check in check_clients(counts, is_interrupted=False)] == [False, True]
    assert [check.holds for check in check_clients(counts, is_interrupted=True)] == [True, True]


def test_report_tells_the_same_as_text_and_as_json() -> None:
    counts = ledger(answered=3, reading=2, incomplete=1, opened=1)
    counts.add(ClientPlan(9, None), Ending(Outcome.FAILED, "status 503"))
    report = Report(
        target="127.0.0.1:9000",
        seed=5,
        seconds=1.25,
        is_interrupted=False,
        is_server_checked=False,
        counts=counts,
        checks=tuple(check_clients(counts, is_interrupted=False)),
    )
    assert not report.holds
    told = json.loads(json.dumps(report.as_dict()))
    assert told["sent"] == told["answered"] + told["left"] + told["failed"] == 7
    assert told["errors"] == {"status 503": 1}
    assert [check["holds"] for check in told["checks"]] == [True, False]
    text = report.as_text()
    assert "7 of 100 clients in 1.2 s, seed 5" in text
    assert "sent 7 = answered 3 + left 3 + failed 1" in text
    assert "1 failed: status 503" in text
    assert "FAIL every answer is right: 3 right, 1 wrong or missing" in text
    assert "no metrics that tell" in text
