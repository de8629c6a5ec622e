"""What a decode node in vLLM makes of tickets, which clients bring; vLLM itself is not needed."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from disconnect_watch.backends.hooks.vllm_kv_loads import Layers, Loads, ticket_of
from disconnect_watch.disagg import Ticket
from disconnect_watch.disagg.tcp import TcpPeer
from tests.disagg.nodes import KEY, LEASE_NS
from tests.support.net import wait_until

TICKET = {"address": "tcp://h:1", "transfer_id": "t", "owner": "o", "lease_ns": LEASE_NS}


def test_a_ticket_is_read() -> None:
    params = {"do_remote_prefill": True, "ticket": TICKET}
    assert ticket_of(params) == Ticket("tcp://h:1", "t", "o", LEASE_NS)
    assert ticket_of({}) is None


@pytest.mark.parametrize("ticket", [None, "t", {}, TICKET | {"address": 5}])
def test_a_ticket_that_is_none_raises_nothing(ticket: Any) -> None:
    assert ticket_of({"do_remote_prefill": True, "ticket": ticket}) is None


def test_a_load_from_what_is_no_address_ends_as_failed() -> None:
    memory = Layers([np.zeros((4, 2), np.uint8)])
    loads = Loads(partial(TcpPeer, key=KEY))
    try:
        loads.start("r", Ticket("nowhere", "t", "o", LEASE_NS), memory, [0])
        ended: list[tuple[set[str], set[str]]] = []

        def has_ended() -> bool:
            ended.append(loads.take_ended())
            return bool(ended[-1][0])

        wait_until(has_ended)
        assert ended[-1] == ({"r"}, {"r"})
    finally:
        loads.close()
