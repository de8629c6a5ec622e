"""The docs' alert rules and dashboard, taken by a real Prometheus that reads our metrics."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.net import held_port, wait_until
from tests.support.serve import Client, packaged_engine, serving_engine
from tests.support.tools import path_of

GIVEN = Path(__file__).parents[2] / "docs/monitoring"
RULES = GIVEN / "alerts.yml"
DASHBOARD = json.loads((GIVEN / "grafana.json").read_text())
CASES = Path(__file__).with_name("alerts_test.yml")

#: What Grafana puts in for the names of a query.
VARIABLES = {"$instance": ".*", "$__rate_interval": "1m"}


def queries() -> list[str]:
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    for name, value in VARIABLES.items():
        found = [query.replace(name, value) for query in found]
    assert not any("$" in query for query in found)
    return found


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:dw|nv)_[a-z_]+\b", text))


def program(name: str) -> str:
    path = path_of(name)
    if not path:
        pytest.skip(f"{name} is not here: make test-programs")
    return path


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """It has read the metrics of a server that one client left."""
    path = program("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    shutil.copy(RULES, folder)
    with serving_engine(packaged_engine()) as serving, held_port() as port:
        with Client(serving.port) as client:
            client.post(
                "/v2/models/tiny/generate_stream",
                {"text_input": "x", "max_tokens": 100_000, "ignore_eos": True},
            )
            client.read_until(b"data:")
        wait_until(lambda: serving.outcomes)
        (folder / "prometheus.yml").write_text(
            json.dumps(
                {
                    "rule_files": [RULES.name],
                    "scrape_configs": [
                        {
                            "job_name": "disconnect-watch",
                            "scrape_interval": "1s",
                            "static_configs": [{"targets": [f"127.0.0.1:{serving.port}"]}],
                        }
                    ],
                }
            )
        )
        with subprocess.Popen(
            [
                path,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                with httpx.Client(
                    base_url=f"http://127.0.0.1:{port}/api/v1", timeout=40
                ) as client_:
                    wait_until(lambda: _has_read(client_) or process.poll() is not None)
                    yield client_
            finally:
                process.terminate()


def _has_read(prometheus: httpx.Client) -> bool:
    try:
        return bool(ask(prometheus, "dw_connections"))
    except httpx.TransportError:
        return False


def ask(prometheus: httpx.Client, query: str) -> list[Any]:
    response = prometheus.get("/query", params={"query": query})
    if response.status_code == 503:
        return []  # it starts
    answer = response.json()
    assert answer["status"] == "success", (query, answer)
    return list(answer["data"]["result"])


def test_every_metric_that_is_named_is_one_of_ours(prometheus: httpx.Client) -> None:
    known = set(prometheus.get("/label/__name__/values").json()["data"])
    named = names_in(RULES.read_text()) | {name for query in queries() for name in names_in(query)}
    of_gateways = {"dw_upstream_ready", "dw_upstream_outstanding"}  # test_gateway_command has them
    assert named - known == of_gateways


def test_prometheus_takes_every_rule(prometheus: httpx.Client) -> None:
    (group,) = prometheus.get("/rules").json()["data"]["groups"]
    assert len(group["rules"]) == RULES.read_text().count("- alert:")
    assert not any(rule.get("lastError") for rule in group["rules"])


@pytest.mark.parametrize("query", sorted(set(queries())))
def test_prometheus_takes_every_query_of_the_dashboard(
    prometheus: httpx.Client, query: str
) -> None:
    ask(prometheus, query)


def test_the_dashboard_shows_who_left(prometheus: httpx.Client) -> None:
    assert ask(prometheus, 'dw_requests_total{outcome="cancelled",phase="decode"} == 1')


def test_each_alert_rings_for_what_it_names_and_for_nothing_else(tmp_path: Path) -> None:
    for path in (RULES, CASES):
        shutil.copy(path, tmp_path)
    names = re.findall(r"- alert: (\w+)", RULES.read_text())
    assert all(f"alertname: {name}\n" in CASES.read_text() for name in names)
    done = subprocess.run(
        [program("promtool"), "test", "rules", CASES.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
