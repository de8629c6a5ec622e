"""requests, urllib3 and httpx, as threads use them."""

import httpx
import pytest
import requests
import urllib3

from tests.clients.visit import ENDED, PATIENCE, Visit, case

HELD = "the response holds its connection until it is closed"


@case("requests", "`timeout=`")
def requests_timeout(visit: Visit) -> None:
    with requests.Session() as session:
        with pytest.raises(requests.ReadTimeout):
            session.get(visit.url, timeout=PATIENCE)
        visit.is_noticed()


@case("requests", "`break` in `with session.get(stream=True)`", answer="stream")
def requests_break(visit: Visit) -> None:
    with requests.Session() as session:
        with session.get(visit.url, stream=True, timeout=40) as response:
            assert next(response.iter_lines())
        visit.is_noticed(*ENDED)


@case("requests", "`break`, the response kept", answer="stream")
def requests_keep_response(visit: Visit) -> None:
    with requests.Session() as session:
        response = session.get(visit.url, stream=True, timeout=40)
        lines = response.iter_lines()
        assert next(lines)
        visit.is_unnoticed(HELD)
        visit.then("`session.close()`")
        session.close()
        visit.is_unnoticed("it closes only what is back in the pool")
        visit.then("`response.close()`")
        response.close()
        visit.is_noticed(*ENDED)


@case("urllib3", "`timeout=`")
def urllib3_timeout(visit: Visit) -> None:
    with urllib3.PoolManager() as pool:
        with pytest.raises(urllib3.exceptions.ReadTimeoutError):
            pool.request("GET", visit.url, timeout=PATIENCE, retries=False)
        visit.is_noticed()


@case("urllib3", "`timeout=`, `retries=1`")
def urllib3_retries(visit: Visit) -> None:
    with urllib3.PoolManager() as pool:
        with pytest.raises(urllib3.exceptions.MaxRetryError):
            pool.request("GET", visit.url, timeout=PATIENCE, retries=1)
        visit.is_noticed()
        visit.then("the retry, a request of its own")
        visit.is_noticed(number=1)


@case("urllib3", "`response.close()`", answer="stream")
def urllib3_close(visit: Visit) -> None:
    with urllib3.PoolManager() as pool:
        response = pool.request("GET", visit.url, preload_content=False)
        assert response.read(4)
        response.close()
        visit.is_noticed(*ENDED)


@case("urllib3", "`response.release_conn()` before the end", answer="stream")
def urllib3_release(visit: Visit) -> None:
    with urllib3.PoolManager() as pool:
        response = pool.request("GET", visit.url, preload_content=False)
        assert response.read(4)
        response.release_conn()
        visit.is_unnoticed("the pool has the connection back, with the answer still coming")
        visit.then("`response.close()`")
        response.close()
        visit.is_unnoticed("the pool holds the connection")
        visit.then("`pool.clear()`, and nobody holds the response")
        del response
        pool.clear()
        visit.is_noticed(*ENDED)


@case("httpx", "`timeout=`")
def httpx_timeout(visit: Visit) -> None:
    with httpx.Client(timeout=PATIENCE) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.get(visit.url)
        visit.is_noticed()


@case("httpx", "`break` in `with client.stream()`", answer="stream")
def httpx_break(visit: Visit) -> None:
    with httpx.Client(timeout=40) as client:
        with client.stream("GET", visit.url) as response:
            assert next(response.iter_lines())
        visit.is_noticed(*ENDED)


@case("httpx", "`break` in `with client.stream()`", answer="stream", scheme="https")
def httpx_break_over_tls(visit: Visit) -> None:
    with httpx.Client(timeout=40, verify=False) as client:
        with client.stream("GET", visit.url) as response:
            assert next(response.iter_lines())
        # The TLS layer may hear of it before the watcher, and closes the transport then.
        visit.is_noticed(*ENDED, "OWNER_CLOSED")


@case("httpx", "`send(stream=True)`, the response kept", answer="stream")
def httpx_keep_response(visit: Visit) -> None:
    with httpx.Client(timeout=40) as client:
        response = client.send(client.build_request("GET", visit.url), stream=True)
        lines = response.iter_lines()
        assert next(lines)
        visit.is_unnoticed(HELD)
        visit.then("`client.close()`")
        client.close()
        visit.is_noticed(*ENDED)
