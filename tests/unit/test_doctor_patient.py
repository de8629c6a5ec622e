"""The handler that waits for its client to leave, called as a server would."""

import asyncio
from typing import Any

from disconnect_watch import CancelToken
from disconnect_watch.adapters import TOKEN_KEY
from disconnect_watch.doctor.patient import PATH, Means, Patient


def scope_of(path: str, token: CancelToken) -> dict[str, Any]:
    query = path.partition("?")[2].encode()
    return {
        "type": "http",
        "http_version": "1.1",
        "headers": [(b"X-A", b"1")],
        "query_string": query,
        "state": {TOKEN_KEY: token},
    }


async def answer_to(patient: Patient, path: str, token: CancelToken) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()  # nobody leaves
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    async with asyncio.timeout(40):
        await patient(scope_of(path, token), receive, send)
    return sent


def test_visit_ends_with_its_token_and_is_not_begun_again() -> None:
    async def main() -> None:
        patient = Patient()
        path, visit = patient.expect(Means.TOKEN)
        token = CancelToken()
        asyncio.get_running_loop().call_soon(token.cancel)
        await answer_to(patient, path, token)
        assert visit.has_token
        assert visit.headers == [("x-a", "1")]
        heard_at = visit.heard_at
        assert heard_at is not None
        # The same request, which was pipelined behind it.
        await answer_to(patient, path, CancelToken())
        assert visit.heard_at == heard_at

    asyncio.run(main())


def test_request_that_nobody_expects_is_answered_at_once() -> None:
    async def main() -> None:
        sent = await answer_to(Patient(), f"{PATH}?visit=7", CancelToken())
        assert sent[0]["status"] == 204

    asyncio.run(main())


def test_nobody_waits_when_it_is_over() -> None:
    async def main() -> None:
        patient = Patient()
        visits = [patient.expect(means) for means in (Means.TOKEN, Means.RECEIVE)]
        asyncio.get_running_loop().call_later(0.01, setattr, patient, "is_over", True)
        await asyncio.gather(*(answer_to(patient, path, CancelToken()) for path, _ in visits))
        assert [visit.heard_at for _, visit in visits] == [None, None]

    asyncio.run(main())
