"""A client leaves while its prompt of 8,000 tokens is read: how much is still computed, counted.

Counted, not timed: the layers that ran by the record of each step, and the steps and tokens
until the next client has its first token beside what an engine that was idle before needs.
"""

from collections.abc import Callable

import pytest

from disconnect_watch.engine import Engine, RequestOutput, SamplingParams
from disconnect_watch.engine.core import EngineCore
from disconnect_watch.engine.model import LlamaModel
from disconnect_watch.engine.model_config import ModelConfig
from disconnect_watch.token import CancelToken, Reason
from tests.support.engine import TINY_CONFIG, collect, make_engine, run_to_end, tiny_model

NUM_TOKENS = 8000
CHUNK = 512
NUM_LAYERS = 3
PROMPT = [(17 * index + index // 251) % 256 for index in range(NUM_TOKENS)]
NEXT = [(29 * index + 5) % 256 for index in range(40)]
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    """The tiny model with room for the prompt."""
    config = {**TINY_CONFIG, "max_position_embeddings": NUM_TOKENS + 64}
    model = LlamaModel(ModelConfig.from_dict(config))
    model.load_state_dict(tiny_model().state_dict())
    return model.eval().requires_grad_(False)


def make(model: LlamaModel) -> Engine:
    return make_engine(
        model,
        block_size=16,
        num_blocks=520,
        max_model_len=NUM_TOKENS + 64,
        max_num_batched_tokens=CHUNK,
    )


def by_token(engine: EngineCore, token: CancelToken) -> Reason:
    token.cancel(Reason.RESET)
    return Reason.RESET


def by_mark(engine: EngineCore, token: CancelToken) -> Reason:
    request = engine.find("long")
    assert request is not None
    request.mark_cancelled(Reason.ABORTED)
    return Reason.ABORTED


@pytest.mark.parametrize("cause", [by_token, by_mark])
@pytest.mark.parametrize(("chunk", "layer"), [(1, 0), (3, 1), (5, 2)])
def test_nothing_is_computed_behind_the_layer_in_which_the_client_left(
    model: LlamaModel, chunk: int, layer: int, cause: Callable[[EngineCore, CancelToken], Reason]
) -> None:
    engine, token = make(model), CancelToken()
    told: list[Reason] = []

    def hook(step: int, at: int) -> None:
        # Before the layer is begun: what runs is the layer before it.
        if (step, at) == (chunk, layer):
            told.append(cause(engine, token))

    engine.layer_hook = hook
    engine.add_request(PROMPT, PARAMS, request_id="long", cancel=token)
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(chunk):
        collect(engine.step(), outputs)
        engine.check_integrity()
    *whole, cut = engine.step_log
    assert [record.layer_tokens for record in whole] == [(CHUNK,) * NUM_LAYERS] * (chunk - 1)
    assert cut.layer_tokens == (CHUNK,) * layer
    assert cut.dropped == {"long": layer}
    [output] = outputs["long"]
    outcome = output.outcome
    assert (output.token_ids, output.text_delta) == ((), "")
    assert outcome is not None
    assert (outcome.kind, outcome.phase, outcome.reason) == ("cancelled", "prefill", told[0])
    assert (outcome.num_generated_tokens, outcome.num_wasted_tokens) == (0, 0)
    # All blocks of the prompt, a part of which was never computed.
    assert outcome.num_blocks_freed == NUM_TOKENS // 16
    assert engine.block_owners == set()
    assert not engine.has_work


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_next_client_needs_no_step_more_than_on_an_idle_engine(
    model: LlamaModel, layer: int
) -> None:
    def work_to_first_token(engine: Engine) -> list[tuple[int, ...]]:
        engine.add_request(NEXT, PARAMS, request_id="next")
        first = engine.step_log[-1].step if engine.step_log else 0
        while True:
            tokens = [out.token_ids for out in engine.step() if out.request_id == "next"]
            if tokens and tokens[0]:
                return [record.layer_tokens for record in engine.step_log if record.step > first]

    idle = work_to_first_token(make(model))
    engine, token = make(model), CancelToken()

    def hook(step: int, at: int) -> None:
        if (step, at) == (2, layer):
            token.cancel(Reason.FIN)

    engine.layer_hook = hook
    engine.add_request(PROMPT, PARAMS, request_id="long", cancel=token)
    engine.step()
    engine.step()
    engine.layer_hook = None
    assert work_to_first_token(engine) == idle
    run_to_end(engine)


def test_an_abort_between_two_chunks_is_acked_with_all_blocks_and_its_latency(
    model: LlamaModel,
) -> None:
    engine = make(model)
    engine.add_request(PROMPT, PARAMS, request_id="long")
    for _ in range(4):
        engine.step()
    result = engine.abort("long")
    assert (result.outcome, result.phase) == ("cancelled", "prefill")
    assert result.num_blocks_freed == NUM_TOKENS // 16
    assert result.latency_ns > 0
    stats = engine.stats()
    # Four chunks were computed whole, and their blocks spare the next client that part.
    assert stats.num_blocks_cached == 4 * CHUNK // 16
    assert stats.num_blocks_available == stats.num_blocks
    [output] = engine.step()
    assert output.outcome is not None
    assert output.token_ids == ()
    engine.add_request(PROMPT, PARAMS, request_id="again")
    engine.step()
    assert engine.step_log[-1].scheduled == {"again": CHUNK}
    request = engine.find("again")
    assert request is not None
    assert request.num_cached_tokens == 4 * CHUNK
    engine.abort("again")
