"""How the stress tool reads the metrics of each server, and what it concludes from none."""

import pytest

from disconnect_watch.stress.checks import check_server
from disconnect_watch.stress.effect import Effect
from disconnect_watch.stress.ledger import ServerCounts, counts_of_page
from disconnect_watch.stress.tally import Counts

VLLM = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="m"} 50.0
"""
SGLANG = """
sglang:num_running_reqs{model_name="m"} 3.0
sglang:num_queue_reqs{model_name="m"} 4.0
sglang:generation_tokens_total{model_name="m"} 50.0
"""
TGI = """
tgi_batch_current_size 3
tgi_queue_size 4
tgi_request_generated_tokens_sum 50
"""
LLAMA_CPP = """
llamacpp:requests_processing 3
llamacpp:requests_deferred 4
llamacpp:tokens_predicted_total 50
"""


@pytest.mark.parametrize(
    ("page", "source"),
    [(VLLM, "vLLM"), (SGLANG, "SGLang"), (TGI, "TGI"), (LLAMA_CPP, "llama.cpp")],
)
def test_engine_is_known_by_its_metrics(page: str, source: str) -> None:
    assert counts_of_page(page) == ServerCounts(
        num_running=3, num_waiting=4, num_tokens=50, source=source
    )


def test_triton_does_not_say_what_its_models_work_on() -> None:
    page = 'nv_inference_pending_request_count{model="m",version="1"} 0\n'
    counts = counts_of_page(page)
    assert counts == ServerCounts(num_waiting=0, source="Triton")
    assert counts is not None
    assert not counts.shows_work
    assert check_server(Counts(1), counts, counts) == []


@pytest.mark.parametrize("page", ["", "process_open_fds 4\n"])
def test_page_of_an_unknown_server_tells_nothing(page: str) -> None:
    assert counts_of_page(page) is None


@pytest.mark.parametrize(("num_running", "holds"), [(0, True), (1, False)])
def test_engine_that_shows_its_work_must_be_done_with_who_left(
    num_running: int, holds: bool
) -> None:
    before = ServerCounts(num_running=0, num_waiting=0, source="vLLM")
    after = ServerCounts(num_running=num_running, num_waiting=0, source="vLLM")
    (check,) = check_server(Counts(1), before, after)
    assert check.holds is holds
    assert check.detail == f"running {num_running}, waiting 0"


@pytest.mark.parametrize(
    ("effect", "cancels"),
    [
        (Effect(1.0, 4.0, 1.2, 8), True),
        (Effect(1.0, 4.0, 3.5, 8), False),
        (Effect(1.0, 1.2, 1.0, 8), None),  # others at work cost nobody anything
    ],
)
def test_server_that_tells_nothing_is_judged_by_what_who_left_costs(
    effect: Effect, cancels: bool | None
) -> None:
    assert effect.cancels is cancels
