"""``generate`` and the continuous batching of transformers, for clients that leave."""

import asyncio
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from disconnect_watch import CancelToken, ClientDisconnected
from tests.support.hooks import fires_at, llama
from tests.support.net import PATIENCE, until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

    from disconnect_watch.backends.hooks import continuous_batching
    from disconnect_watch.backends.hooks.torch import cancel_between
    from disconnect_watch.backends.hooks.transformers import CancelCriteria

PROMPT = [1, 2, 3, 4, 5]
NUM_LAYERS = 3


@pytest.fixture(scope="module")
def model() -> Any:
    return llama(NUM_LAYERS)


def generate(model: Any, prompts: list[list[int]], *tokens: CancelToken, **options: Any) -> Any:
    ids = torch.tensor(prompts)
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=12,
        stopping_criteria=[CancelCriteria(*tokens)],
        **options,
    )


@pytest.fixture
def token(model: Any) -> Any:
    """Fires within the third forward pass: that of the prompt, and two of a token each."""
    token = CancelToken()
    hook = model.model.layers[0].register_forward_pre_hook(fires_at(token, 3))
    yield token
    hook.remove()


def test_generate_ends_with_the_token_at_hand(model: Any, token: CancelToken) -> None:
    assert generate(model, [PROMPT], token).shape == (1, len(PROMPT) + 3)
    assert token.cancelled


def test_what_a_client_that_stays_gets_is_what_it_was(model: Any) -> None:
    plain = model.generate(
        input_ids=torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        do_sample=False,
        max_new_tokens=12,
    )
    assert generate(model, [PROMPT], CancelToken()).tolist() == plain.tolist()


def test_those_of_a_batch_who_stay_get_what_they_did(model: Any, token: CancelToken) -> None:
    prompts = [PROMPT, PROMPT[::-1]]
    stayed = generate(model, prompts, CancelToken(), CancelToken())
    assert generate(model, prompts, token, CancelToken())[1].tolist() == stayed[1].tolist()


def test_a_batch_ends_when_all_have_left(model: Any, token: CancelToken) -> None:
    left = CancelToken()
    left.cancel()
    assert generate(model, [PROMPT, PROMPT[::-1]], left, token).shape == (2, len(PROMPT) + 3)


@pytest.mark.parametrize("ways", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_beams_end_with_their_client(model: Any, token: CancelToken, ways: dict[str, int]) -> None:
    assert generate(model, [PROMPT], token, **ways).shape[1] == len(PROMPT) + 3


def test_tokens_that_fit_no_batch_are_refused(model: Any) -> None:
    tokens = [CancelToken() for _ in range(2)]
    with pytest.raises(ValueError, match="2 tokens for 3 rows"):
        generate(model, [PROMPT] * 3, *tokens)
    with pytest.raises(ValueError, match="give one"):
        CancelCriteria()


def test_a_prompt_is_given_up_between_two_layers(model: Any) -> None:
    token = CancelToken()
    passes = []
    hooks = [model.model.layers[0].register_forward_pre_hook(fires_at(token, 1))]
    hooks += [
        layer.register_forward_pre_hook(lambda module, args: passes.append(module))
        for layer in model.model.layers
    ]
    try:
        with pytest.raises(ClientDisconnected), cancel_between(model.model.layers, token):
            generate(model, [PROMPT], token)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(passes) == 1
    # Nothing of the pass is left: the next one is whole.
    assert generate(model, [PROMPT], CancelToken()).shape == (1, len(PROMPT) + 12)


@asynccontextmanager
async def batching(model: Any) -> AsyncIterator[Any]:
    """A manager with 64 pages of 32 tokens."""
    config: Any = transformers.GenerationConfig.from_dict(
        {"do_sample": False, "eos_token_id": -1, "max_new_tokens": 1000}
    )
    pages = transformers.ContinuousBatchingConfig(num_blocks=64, page_size=32, max_batch_tokens=64)
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=pages, warmup=False
    ) as manager:
        yield manager


def run_batching(model: Any, main: Callable[[Any], Awaitable[None]]) -> None:
    async def run() -> None:
        async with batching(model) as manager:
            await asyncio.wait_for(main(manager), PATIENCE)

    asyncio.run(run())


async def tokens_of(manager: Any, token: CancelToken, num_tokens: int) -> list[int]:
    outputs = continuous_batching.generate(manager, PROMPT, token, max_new_tokens=num_tokens)
    return [output.generated_tokens[-1] async for output in outputs]


def is_empty(manager: Any) -> bool:
    scheduler = manager.batch_processor.scheduler
    return not (
        scheduler.active_requests
        or scheduler.waiting_requests
        or scheduler._requests_to_cancel
        or any(allocator.block_table for allocator in allocators_of(manager))
        or manager.output_router.result_handlers
    )


def allocators_of(manager: Any) -> list[Any]:
    return list(manager.batch_processor.cache.cache_allocators.values())


def test_batched_requests_stream_what_generate_gives(model: Any) -> None:
    async def main(manager: Any) -> None:
        tokens = await tokens_of(manager, CancelToken(), 12)
        assert tokens == generate(model, [PROMPT], CancelToken())[0, len(PROMPT) :].tolist()
        await until(lambda: is_empty(manager))

    run_batching(model, main)


def test_a_batched_request_is_out_when_its_client_has_left_and_others_go_on(model: Any) -> None:
    async def main(manager: Any) -> None:
        stays = asyncio.create_task(tokens_of(manager, CancelToken(), 40))
        token = CancelToken()
        outputs = continuous_batching.generate(manager, PROMPT, token, request_id="left")
        await anext(outputs)
        token.cancel()
        with pytest.raises(ClientDisconnected):
            async for _ in outputs:
                pass
        assert not any("left" in allocator.block_table for allocator in allocators_of(manager))
        assert continuous_batching._is_out(manager, "left")
        assert "left" not in manager.output_router.result_handlers
        assert len(await stays) == 40
        await until(lambda: is_empty(manager))
        assert manager.output_router.output_queue.empty()

    run_batching(model, main)


@pytest.mark.parametrize("after", [0, 1], ids=["before its first token", "after it"])
def test_a_batched_request_that_is_closed_is_out(model: Any, after: int) -> None:
    async def main(manager: Any) -> None:
        outputs = continuous_batching.generate(manager, PROMPT, CancelToken())
        begun = asyncio.create_task(anext(outputs))
        if after:
            await begun
        else:
            await asyncio.sleep(0)  # it has asked the manager, and waits
            begun.cancel()
            with pytest.raises(asyncio.CancelledError):
                await begun
        await outputs.aclose()
        await until(lambda: is_empty(manager))
        assert manager.output_router.output_queue.empty()

    run_batching(model, main)


def test_who_waits_in_the_queue_hears_of_the_cancel(model: Any) -> None:
    async def main(manager: Any) -> None:
        with manager.pause():  # no step, and so no output, until the end of the block
            token = CancelToken()
            outputs = continuous_batching.generate(manager, PROMPT, token)
            begun = asyncio.create_task(anext(outputs))
            await until(lambda: manager.output_router.result_handlers)
            token.cancel()
            await until(lambda: not manager.cancel_queue.empty())
        with pytest.raises(ClientDisconnected):
            await begun
        await until(lambda: is_empty(manager))

    run_batching(model, main)


def test_a_request_whose_client_has_left_before_is_not_begun(model: Any) -> None:
    async def main(manager: Any) -> None:
        token = CancelToken()
        token.cancel()
        with pytest.raises(ClientDisconnected):
            await anext(continuous_batching.generate(manager, PROMPT, token))
        assert manager.input_queue.empty()
        assert not manager.output_router.result_handlers

    run_batching(model, main)
