"""What docs/hooks.md shows runs as written, with a tiny model of each framework."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from disconnect_watch import CancelToken
from tests.integration.test_hooks_diffusers import pipeline
from tests.integration.test_hooks_onnxruntime import feeds, session
from tests.integration.test_hooks_transformers import PROMPT, batching
from tests.support.documents import blocks_of
from tests.support.hooks import llama

__all__ = ["pipeline", "session"]  # fixtures

BLOCKS = blocks_of("hooks.md")
#: Run in venvs of their own, by the tests of these hooks.
ELSEWHERE = ("hooks.llama_cpp",)


def run(index: int, **names: Any) -> dict[str, Any]:
    exec(compile(BLOCKS[index], f"block {index} of docs/hooks.md", "exec"), names)
    return names


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.fixture
def token() -> CancelToken:
    return CancelToken()


def test_each_block_has_its_test() -> None:
    here = [block for block in BLOCKS if not any(name in block for name in ELSEWHERE)]
    assert len(here) == 7
    assert here == BLOCKS[:7]


@pytest.mark.parametrize("index", [0, 1])
def test_torch(index: int, model: Any, token: CancelToken) -> None:
    names = run(index, model=model, token=token, input_ids=torch.tensor([PROMPT]))
    assert names["output"].logits.shape[:2] == (1, len(PROMPT))
    if "look" in names:
        names["look"].close()


def test_generate(model: Any, token: CancelToken) -> None:
    names = run(2, model=model, token=token, input_ids=torch.tensor([PROMPT]))
    assert names["answer"].shape == (1, len(PROMPT) + 20)


def test_continuous_batching(model: Any, token: CancelToken) -> None:
    answer = run(3)["answer"]

    async def main() -> list[int]:
        async with batching(model) as manager:
            return [each async for each in answer(manager, PROMPT, token)]

    assert len(asyncio.run(main())) == 20


@pytest.mark.parametrize("index", [4, 5])
def test_diffusers(index: int, pipeline: Any, token: CancelToken) -> None:
    request = {
        "prompt_embeds": torch.zeros(1, 3, 8),
        "guidance_scale": 1.0,
        "num_inference_steps": 2,
        "height": 16,
        "width": 16,
        "output_type": "np",
    }
    names = run(index, pipeline=pipeline, token=token, request=request)
    assert names["images"].shape == (1, 16, 16, 3)


def test_onnxruntime(session: Any, token: CancelToken) -> None:
    names = run(6, session=session, token=token, inputs=feeds(3))
    assert np.array_equal(names["outputs"][0], np.ones((4, 4)))
