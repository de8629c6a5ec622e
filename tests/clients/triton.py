"""Triton's own HTTP clients, on ``/v2/models/slow/infer``."""

import asyncio
import contextlib

import gevent  # type: ignore[import-untyped]
import numpy as np
import pytest
import tritonclient.http as blocking  # type: ignore[import-untyped]
import tritonclient.http.aio as looping  # type: ignore[import-untyped]

from tests.clients.looping import cancel
from tests.clients.visit import PATIENCE, Visit, case

gevent.sleep(0)  # the hub of the blocking client opens its files once, for good


def inputs() -> list[blocking.InferInput]:
    given = blocking.InferInput("IN", [1], "INT32")
    given.set_data_from_numpy(np.zeros(1, np.int32), binary_data=False)
    return [given]


@case("tritonclient.http", "`network_timeout=`")
def triton_timeout(visit: Visit) -> None:
    host = visit.base.removeprefix("http://")
    with contextlib.closing(
        blocking.InferenceServerClient(host, network_timeout=PATIENCE)
    ) as client:
        with pytest.raises(Exception, match="timed out"):
            client.infer("slow", inputs())
        visit.is_noticed()


@case("tritonclient.http", "`client.close()` amid `async_infer()`")
def triton_close(visit: Visit) -> None:
    client = blocking.InferenceServerClient(visit.base.removeprefix("http://"))
    asked = client.async_infer("slow", inputs())
    with gevent.Timeout(20):
        while not visit.calls():
            gevent.sleep(0.001)
    closing = gevent.spawn(client.close)
    gevent.sleep(0)
    visit.is_unnoticed("it waits for what was asked")
    visit.is_answered()
    closing.join(40)
    assert closing.successful()
    assert asked.get_result().as_numpy("IN_OUT") == [0]


@case("tritonclient.http.aio", "`conn_timeout=`")
async def triton_aio_timeout(visit: Visit) -> None:
    host = visit.base.removeprefix("http://")
    async with looping.InferenceServerClient(host, conn_timeout=PATIENCE) as client:
        with pytest.raises(asyncio.TimeoutError):
            await client.infer("slow", inputs())
        await asyncio.to_thread(visit.is_noticed)


@case("tritonclient.http.aio", "`task.cancel()`")
async def triton_cancel(visit: Visit) -> None:
    host = visit.base.removeprefix("http://")
    async with looping.InferenceServerClient(host) as client:
        await cancel(visit, client.infer("slow", inputs()))
        await asyncio.to_thread(visit.is_noticed)
