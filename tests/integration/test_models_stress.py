"""Clients that leave at any moment: each request has one outcome, and all is given back."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import aclosing

import numpy as np
import pytest

from disconnect_watch import Reason
from disconnect_watch.backends.infer import Code, InferError, InferRequest
from tests.support.models import TIME_LIMIT, TRITON_MODELS, ModelHost, tensors, text_request, until

pytestmark = pytest.mark.timeout(TIME_LIMIT)

MODELS = ("identity_bytes", "identity_fp32", "stream")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelHost]:
    log = tmp_path_factory.mktemp("log") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODEL_LOG", str(log))
        with ModelHost(TRITON_MODELS, mode="explicit", load_models=MODELS) as host:
            yield host


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_each_request_has_one_outcome_whenever_its_client_leaves(
    host: ModelHost, seed: int
) -> None:
    dice = random.Random(seed)
    outcomes = {"begun": 0, "success": 0, "cancel": 0}

    def make() -> tuple[str, InferRequest]:
        name = dice.choice(MODELS)
        if name == "stream":
            return name, text_request("x", n=dice.randrange(4), gap=0.001 * dice.randrange(3))
        size = dice.choice([1, 100, 20_000])
        if name == "identity_bytes":
            return name, InferRequest(inputs=tensors(INPUT0=[["x" * size]]))
        return name, InferRequest(inputs=tensors(INPUT0=np.zeros((1, size), np.float32)))

    async def client() -> None:
        name, request = make()
        way = dice.choice(["stay", "stay", "token", "close", "task"])
        after = dice.random() * 0.02
        asking = asyncio.ensure_future(ask(name, request, way))
        loop = asyncio.get_running_loop()
        if way == "token":
            loop.call_later(after, request.cancel.cancel, Reason.FIN)
        elif way == "task":
            loop.call_later(after, asking.cancel)
        try:
            outcomes[await asking] += 1
        except asyncio.CancelledError:
            outcomes["cancel"] += 1

    async def ask(name: str, request: InferRequest, way: str) -> str:
        outcomes["begun"] += 1  # not of a task that was cancelled before
        try:
            async with aclosing(host.repository.find(name).infer(request)) as responses:
                async for response in responses:
                    assert response.error is None
                    if response.is_final:
                        return "success"
                    if way == "close":
                        return "cancel"
        except InferError as error:
            if error.code is not Code.CANCELLED:
                raise
            return "cancel"
        raise AssertionError("a request without a last response")

    async def crowd() -> None:
        before = counted(host)
        for _ in range(6):
            await asyncio.gather(*(client() for _ in range(50)))
        for name in MODELS:
            model = host.model(name)
            await until(lambda model=model: model.num_live == 0)  # type: ignore[misc]
            assert model.statistics.num_pending == 0
        success, fail, cancel = (
            now - then for now, then in zip(counted(host), before, strict=True)
        )
        assert success + cancel == outcomes["begun"]
        assert fail == 0
        # A client may be cancelled in the moment in which its answer is there already.
        assert success >= outcomes["success"]
        assert outcomes["success"] + outcomes["cancel"] == 300

    host.run(crowd())


def counted(host: ModelHost) -> tuple[int, int, int]:
    statistics = host.repository.statistics()
    return (
        sum(one.success.count for one in statistics),
        sum(one.fail.count for one in statistics),
        sum(one.cancel.count for one in statistics),
    )
