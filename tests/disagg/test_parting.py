"""One request over two nodes: the tokens of one, and nothing left whoever leaves, whenever."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from disconnect_watch.disagg import ReleaseKind
from disconnect_watch.server.disagg.messages import PREFILL_HEADER, Prefilled
from tests.support.gate import gated
from tests.support.http import Client
from tests.support.net import PATIENCE, held_port, unread_bytes, wait_until
from tests.support.pd_threads import (
    OTHER_KEY,
    SERVICE_KEY,
    USER_KEY,
    GatedProxy,
    HeldShm,
    ThreadedNode,
    node,
    proxy_before,
    tcp,
    wait_until_idle,
)

GENERATE = "/v2/models/tiny/generate"
STREAM = "/v2/models/tiny/generate_stream"
PROMPT = "The class of the watcher has a method that " * 4
ENDLESS = {"text_input": PROMPT, "max_tokens": 1500, "ignore_eos": True}


@pytest.fixture
def prefill() -> Iterator[ThreadedNode]:
    with node("prefill") as each:
        yield each
        wait_until_idle(each)


@pytest.fixture
def decode() -> Iterator[ThreadedNode]:
    with node("decode") as each:
        yield each
        wait_until_idle(each)


@pytest.fixture
def proxy(prefill: ThreadedNode, decode: ThreadedNode) -> Iterator[int]:
    with proxy_before([prefill.url], [decode.url]) as (_, http):
        yield http.port


def post(port: int, path: str, body: Any, **headers: str) -> Any:
    url = f"http://127.0.0.1:{port}{path}"
    return httpx.post(url, json=body, headers=headers, timeout=PATIENCE)


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": (GENERATE, {"text_input": PROMPT, "max_tokens": 20}),
    "generate_stream": (STREAM, {"text_input": PROMPT, "max_tokens": 20, "temperature": 0.9}),
    "completions": (
        "/v1/completions",
        {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "logprobs": 2},
    ),
    "chat": (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 20,
            "temperature": 0.8,
            "logprobs": True,
            "top_logprobs": 3,
        },
    ),
    "chat stream": (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 20,
            "stream": True,
        },
    ),
    "one token": (GENERATE, {"text_input": PROMPT, "max_tokens": 1}),
    "a stop string in the first token": (
        GENERATE,
        {"text_input": PROMPT, "max_tokens": 20, "stop": [" ", "\n", "a", "e", "i"]},
    ),
}


def answer_of(response: httpx.Response) -> str:
    """Without what is another each time."""
    assert response.status_code == 200, response.text
    return "".join(
        part
        for part in response.text.split('"')
        if not part.startswith(("cmpl-", "chatcmpl-", ":"))
    )


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_answer_is_the_one_of_a_single_node(name: str, transport: str) -> None:
    path, body = REQUESTS[name]
    body = {**body, "seed": 11}
    make = tcp if transport == "tcp" else HeldShm
    transports = [make(), make()]
    for each in transports:
        if isinstance(each, HeldShm):
            each.may_go_on.set()
    with (
        node("prefill", transports[0]) as prefill,
        node("decode", transports[1]) as decode,
        node("both") as alone,
        proxy_before([prefill.url], [decode.url]) as (_, http),
    ):
        parted = post(http.port, path, body)
        whole = alone.post(path, body)
        assert answer_of(parted) == answer_of(whole)
        wait_until_idle(prefill, decode)
        is_longer = name not in ("one token", "a stop string in the first token")
        assert prefill.released(ReleaseKind.IN_BAND) == is_longer
        assert decode.engine.stats().num_loaded_tokens == (
            prefill.engine.stats().num_prompt_tokens if is_longer else 0
        )
        assert decode.engine.stats().num_failed_loads == 0


def test_requests_at_the_same_time_over_several_nodes_keep_their_answers() -> None:
    prompts = [PROMPT[index:] for index in range(8)]
    with ExitStack() as ending:
        prefills = [ending.enter_context(node("prefill")) for _ in range(2)]
        decodes = [ending.enter_context(node("decode")) for _ in range(2)]
        urls = [each.url for each in prefills], [each.url for each in decodes]
        proxy, http = ending.enter_context(proxy_before(*urls))
        clients = [ending.enter_context(Client(http.port)) for _ in prompts]
        bodies = [{"text_input": prompt, "max_tokens": 24} for prompt in prompts]
        for client, body in zip(clients, bodies, strict=True):
            client.post(GENERATE, body)
        parted = [client.read_response()[2] for client in clients]
        assert parted == [decodes[0].post(GENERATE, body).content for body in bodies]
        wait_until_idle(*prefills, *decodes)
        wait_until(lambda: not any(n.num_running for n in proxy.prefill.nodes))
        assert sum(each.released(ReleaseKind.IN_BAND) for each in prefills) == len(prompts)


@pytest.mark.parametrize("layer", [0, 1])
def test_who_leaves_in_the_prefill_has_nothing_retained(
    prefill: ThreadedNode, decode: ThreadedNode, proxy: int, layer: int
) -> None:
    with gated(prefill.engine, layer=layer) as gate:
        with Client(proxy) as client:
            client.post(STREAM, ENDLESS)
            gate.wait()
        wait_until(lambda: prefill.watcher.stats().num_armed == 0)
    wait_until_idle(prefill, decode)
    assert not any(prefill.role.node.stats().num_released.values())
    assert decode.engine.stats().num_requests == 0


def test_who_leaves_between_the_two_nodes_frees_the_first(
    prefill: ThreadedNode, decode: ThreadedNode
) -> None:
    with proxy_before([prefill.url], [decode.url], GatedProxy) as (gate, http):
        assert isinstance(gate, GatedProxy)
        with Client(http.port) as client:
            client.post(STREAM, ENDLESS)
            assert gate.has_come.wait(PATIENCE)
            assert prefill.role.node.stats().num_transfers == 1
            assert prefill.engine.stats().num_blocks_retained > 0
        wait_until_idle(prefill)
        assert prefill.released(ReleaseKind.ABORT) == 1
        assert decode.engine.stats().num_requests == 0


def test_who_leaves_in_the_transfer_frees_both_behind_the_copy(prefill: ThreadedNode) -> None:
    transport = HeldShm()
    with (
        node("decode", transport) as decode,
        proxy_before([prefill.url], [decode.url]) as (_, http),
    ):
        with Client(http.port) as client:
            client.post(STREAM, ENDLESS)
            assert transport.has_begun.wait(PATIENCE)
        wait_until(lambda: decode.engine.stats().num_running == 0)
        # The copy has not stopped: what it may write to, and reads, is nobody else's.
        assert decode.engine.stats().num_blocks_held > 0
        transport.may_go_on.set()
        wait_until_idle(prefill, decode)
        assert decode.engine.stats().num_failed_loads == 0
        assert not prefill.released(ReleaseKind.LEASE)


def test_who_leaves_in_the_decode_frees_it(
    prefill: ThreadedNode, decode: ThreadedNode, proxy: int
) -> None:
    with gated(decode.engine, after_steps=8) as gate:
        with Client(proxy) as client:
            client.post(STREAM, ENDLESS)
            client.read_until(b"text_output")
            gate.wait()
        wait_until(lambda: decode.watcher.stats().num_armed == 0)
        gate.open()
    wait_until_idle(prefill, decode)
    outcomes = decode.engine.stats().outcomes
    assert outcomes["cancelled", "decode"] == 1
    assert prefill.released(ReleaseKind.IN_BAND) == 1


def test_who_leaves_in_the_queue_of_the_decode_releases_in_band(prefill: ThreadedNode) -> None:
    with node("decode", max_num_seqs=1) as decode, prefill.prefilled(GENERATE, ENDLESS) as found:
        with gated(decode.engine) as gate, Client(decode.http.port) as first:
            key = {"authorization": f"Bearer {SERVICE_KEY}"}
            first.post(GENERATE, ENDLESS, **key)
            gate.wait()
            with Client(decode.http.port) as second:
                second.post(GENERATE, ENDLESS, x_kv_ticket=found.header(), **key)
                wait_until(lambda: decode.watcher.stats().num_armed == 2)
                assert prefill.role.node.stats().num_transfers == 1
            gate.open()
            wait_until(lambda: prefill.role.node.stats().num_transfers == 0)
        wait_until_idle(prefill, decode)
        assert prefill.released(ReleaseKind.IN_BAND) == 1
        assert decode.engine.stats().num_loaded_tokens == 0


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (GENERATE, {"text_input": PROMPT, "max_tokens": 0}, 400),
        (GENERATE, {"no": "prompt"}, 400),
        ("/v2/models/other/generate", {"text_input": PROMPT}, 404),
        ("/v1/completions", {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 2}, 200),
        ("/v1/completions", {"model": "tiny", "prompt": "a", "n": 2, "max_tokens": 2}, 200),
        (GENERATE, {"text_input": "another prompt", "max_tokens": 3}, 200),
    ],
)
def test_what_the_decode_has_no_use_for_is_released_in_band(
    prefill: ThreadedNode, decode: ThreadedNode, path: str, body: Any, status: int
) -> None:
    with prefill.prefilled(GENERATE, ENDLESS) as found:
        assert prefill.role.node.stats().num_transfers == 1
        response = decode.decode(path, body, found)
        assert response.status_code == status, response.text
        wait_until(lambda: prefill.released(ReleaseKind.IN_BAND) == 1)
    assert decode.engine.stats().num_loaded_tokens == 0


def test_a_full_queue_of_the_decode_releases_in_band(prefill: ThreadedNode) -> None:
    with (
        node("decode", max_num_seqs=1, max_queue=1) as decode,
        prefill.prefilled(GENERATE, ENDLESS) as found,
        ExitStack() as clients,
        gated(decode.engine) as gate,
    ):
        key = {"authorization": f"Bearer {SERVICE_KEY}"}
        first, *others = [clients.enter_context(Client(decode.http.port)) for _ in range(4)]
        first.post(GENERATE, ENDLESS, **key)
        gate.wait()
        for client in others[:2]:
            client.post(GENERATE, {"text_input": "a", "max_tokens": 2}, **key)
        others[2].post(GENERATE, ENDLESS, x_kv_ticket=found.header(), **key)

        def are_refused() -> bool:
            gate.pass_steps(1)  # behind which the engine looks at who has come meanwhile
            return sum(unread_bytes(client.sock) > 0 for client in others) == 2

        wait_until(are_refused)
        first.sock.close()
        gate.open()
        assert sorted(client.read_response()[0] for client in others) == [200, 503, 503]
        wait_until(lambda: prefill.role.node.stats().num_transfers == 0)
        assert not prefill.released(ReleaseKind.LEASE)


def test_losing_who_asked_for_a_prefill_frees_it(prefill: ThreadedNode) -> None:
    with prefill.prefilled(GENERATE, ENDLESS):
        assert prefill.role.node.stats().num_transfers == 1
    wait_until_idle(prefill)
    assert prefill.released(ReleaseKind.ABORT) == 1


def test_a_cancel_by_its_name_frees_what_is_kept(prefill: ThreadedNode) -> None:
    with prefill.prefilled(GENERATE, ENDLESS, name="mine"):
        stranger = prefill.post("/v1/requests/mine/cancel", {}, key=OTHER_KEY)
        assert stranger.status_code == 404
        assert prefill.role.node.stats().num_transfers == 1
        cancelled = prefill.post("/v1/requests/mine/cancel", {}).json()
        assert cancelled["status"] == "cancelled"
        assert cancelled["blocks_freed"] > 0
        assert prefill.released(ReleaseKind.ABORT) == 1
        again = prefill.post("/v1/requests/mine/cancel", {}).json()
        assert again["status"] != "cancelled"
    wait_until_idle(prefill)


@pytest.mark.parametrize("by", ["request", "transfer"])
def test_a_release_is_the_owners_and_idempotent(prefill: ThreadedNode, by: str) -> None:
    with prefill.prefilled(GENERATE, ENDLESS, name="mine") as found:
        assert found.ticket is not None
        asked = {"name": "mine" if by == "request" else found.ticket.transfer_id}
        others = prefill.post("/v1/kv/release", asked, key=OTHER_KEY).json()
        assert others["outcome"] == "not_found"
        assert prefill.role.node.stats().num_transfers == 1
        released = prefill.post("/v1/kv/release", asked).json()
        assert (released["outcome"], released["kind"]) == ("released", "abort")
        assert released["blocks_freed"] > 0
        again = prefill.post("/v1/kv/release", asked).json()
        assert again["outcome"] == "already_released"
    assert prefill.post("/v1/kv/release", {}).status_code == 400


def test_a_release_before_the_prefill_leaves_nothing_to_keep(prefill: ThreadedNode) -> None:
    asked = {"name": "early"}
    assert prefill.post("/v1/kv/release", asked).json()["outcome"] == "not_found"
    headers = {PREFILL_HEADER: "1", "x-request-id": "early"}
    response = prefill.post(GENERATE, ENDLESS, **headers)
    assert response.status_code == 499
    assert response.headers["x-should-retry"] == "false"


def test_a_ticket_is_good_once_and_a_lost_one_costs_a_prefill_only(
    prefill: ThreadedNode, decode: ThreadedNode
) -> None:
    body = {"text_input": PROMPT, "max_tokens": 12}
    with prefill.prefilled(GENERATE, body) as found:
        answers = [decode.decode(GENERATE, body, found).json()]
        # The cache of the first would hide that nothing was fetched.
        with node("decode") as another:
            answers.append(another.decode(GENERATE, body, found).json())
            assert another.engine.stats().num_failed_loads == 1
    assert answers[0] == answers[1]


@pytest.mark.parametrize("key", [USER_KEY, ""])
@pytest.mark.parametrize("header", [PREFILL_HEADER, "x-kv-ticket"])
def test_only_a_proxy_has_requests_parted(prefill: ThreadedNode, header: str, key: str) -> None:
    value = Prefilled().header() if header == "x-kv-ticket" else "1"
    response = prefill.post(GENERATE, ENDLESS, key=key, **{header: value})
    assert response.status_code == (403 if key else 401)
    assert prefill.engine.stats().num_requests == 0


def test_a_node_does_what_it_is_for(prefill: ThreadedNode, decode: ThreadedNode) -> None:
    refused = decode.post(GENERATE, ENDLESS, **{PREFILL_HEADER: "1"})
    assert (refused.status_code, "--role" in refused.text) == (403, True)
    refused = prefill.post(GENERATE, ENDLESS, **{"x-kv-ticket": Prefilled().header()})
    assert (refused.status_code, "--role" in refused.text) == (403, True)


@pytest.mark.parametrize("value", ["", "!", "e30", "eyJmaXJzdF90b2tlbiI6ICJhIn0=", "a" * 40000])
def test_what_is_no_ticket_is_refused(decode: ThreadedNode, value: str) -> None:
    response = decode.post(GENERATE, ENDLESS, **{"x-kv-ticket": value})
    assert response.status_code == 400


def test_a_client_of_the_proxy_brings_no_ticket_of_its_own(
    prefill: ThreadedNode, decode: ThreadedNode, proxy: int
) -> None:
    body = {"text_input": PROMPT, "max_tokens": 3}
    for header in (PREFILL_HEADER, "x-kv-ticket"):
        assert post(proxy, GENERATE, body, **{header: "1"}).status_code == 200


@pytest.mark.parametrize(
    "more", [{"prompt": ["a b c", "d e f"]}, {"n": 2, "temperature": 1.0}], ids=["prompts", "n"]
)
def test_what_cannot_be_parted_is_computed_whole(
    prefill: ThreadedNode, decode: ThreadedNode, proxy: int, more: dict[str, Any]
) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, **more}
    response = post(proxy, "/v1/completions", body)
    assert len(response.json()["choices"]) == 2
    assert not any(prefill.role.node.stats().num_released.values())


def test_what_makes_no_sense_is_answered_by_the_first_node(
    prefill: ThreadedNode, decode: ThreadedNode, proxy: int
) -> None:
    response = post(proxy, GENERATE, {"text_input": PROMPT, "max_tokens": -1})
    assert response.status_code == 400
    assert "max_tokens" in response.json()["error"]
    assert prefill.role.node.stats().num_tombstones == 0
    assert post(proxy, "/v1/models", {}).status_code == 405


def test_without_a_prefill_node_the_decode_does_all(decode: ThreadedNode) -> None:
    body = {"text_input": PROMPT, "max_tokens": 5}
    with (
        held_port() as port,
        proxy_before([f"http://127.0.0.1:{port}"], [decode.url]) as (_, http),
    ):
        response = post(http.port, GENERATE, body)
        assert response.json() == decode.post(GENERATE, body).json()


def test_without_a_decode_node_the_first_keeps_nothing(prefill: ThreadedNode) -> None:
    with (
        held_port() as port,
        proxy_before([prefill.url], [f"http://127.0.0.1:{port}"]) as (_, http),
    ):
        assert post(http.port, GENERATE, ENDLESS).status_code == 502
        wait_until_idle(prefill)
        assert not prefill.released(ReleaseKind.LEASE)
        assert httpx.get(f"http://127.0.0.1:{http.port}/health").status_code == 503


def test_the_lease_is_the_last_way(decode: ThreadedNode) -> None:
    """A proxy that keeps its connection, and sends the request nowhere."""
    with node("prefill", lease=3.0) as prefill, prefill.prefilled(GENERATE, ENDLESS):
        wait_until(lambda: prefill.released(ReleaseKind.LEASE) == 1)
        wait_until_idle(prefill)


def test_a_prefix_that_is_shared_is_not_written(
    prefill: ThreadedNode, decode: ThreadedNode
) -> None:
    """The other node may have rounded it otherwise, while somebody reads it here."""
    body = {"text_input": PROMPT, "max_tokens": 3}
    decode.post(GENERATE, body)
    longer = {"text_input": PROMPT + "and another thing that is new here", "max_tokens": 12}
    whole = decode.engine.kv_cache.blocks.clone()
    with prefill.prefilled(GENERATE, longer) as found:
        prefill.engine.kv_cache.blocks.add_(1.0)  # rounded otherwise, to be seen
        decode.decode(GENERATE, longer, found)
        num_loaded = decode.engine.stats().num_loaded_tokens
    assert 0 < num_loaded < prefill.engine.stats().num_prompt_tokens
    block_size = decode.engine.config.block_size
    num_shared = (prefill.engine.stats().num_prompt_tokens - num_loaded) // block_size
    kept = (whole != 0).any(dim=5).any(dim=4).any(dim=3).all(dim=1).all(dim=0).nonzero()
    shared = kept[:num_shared].flatten().tolist()
    assert shared
    assert (decode.engine.kv_cache.blocks[:, :, shared] == whole[:, :, shared]).all()
