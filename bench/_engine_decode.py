"""Decoding with a full batch: the embedded engine, ``transformers.generate``, vLLM's CPU build.

All have the same checkpoint and prompts, take the likeliest token, and stop at no end token.
"""

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from bench._child import REPOSITORY, Child
from disconnect_watch.engine import DEFAULT_MODEL, Engine, EngineConfig, SamplingParams

__all__ = ["Generate", "Prompts", "generators", "make_prompts", "tokens_per_second", "vllm_python"]

Prompts = list[list[int]]
#: From prompts and a number of tokens to the tokens that follow each.
Generate = Callable[[Prompts, int], list[list[int]]]

OURS, THEIRS = "our engine", "transformers.generate"


def make_prompts(num: int, length: int, *, seed: int) -> Prompts:
    """Make so many prompts of one length, which a static batch needs."""
    rng = random.Random(seed)
    return [[rng.randrange(1, 2048) for _ in range(length)] for _ in range(num)]


def tokens_per_second(
    generate: Generate, prompts: Prompts, num_tokens: int
) -> tuple[float, list[list[int]]]:
    """Measure decoding alone: the time of so many tokens less that of the first ones.

    Returns:
        Tokens a second over all prompts, and the tokens.
    """
    start = time.perf_counter()
    generate(prompts, 1)
    middle = time.perf_counter()
    tokens = generate(prompts, num_tokens)
    seconds = (time.perf_counter() - middle) - (middle - start)
    return len(prompts) * (num_tokens - 1) / seconds, tokens


@contextmanager
def generators(num_seqs: int, *, vllm: Path | None) -> Iterator[dict[str, Generate]]:
    """Load all of them, by their names in the results; ours first.

    Args:
        num_seqs: requests at the same time.
        vllm: Python of a venv that has it; None leaves it out.
    """
    with ExitStack() as stack:
        found: dict[str, Generate] = {OURS: _ours(num_seqs), THEIRS: _transformers()}
        if vllm is not None:
            for dtype in ("float32", "bfloat16"):
                child = stack.enter_context(_VllmChild(vllm, dtype, num_seqs))
                found[f"vLLM, {dtype}"] = child.generate
        yield found


def vllm_python() -> Path | None:
    """Return the Python of the venv that ``.ci/vllm`` has made; VLLM_VENV may say where."""
    venv = Path(os.environ.get("VLLM_VENV", REPOSITORY / ".venv-vllm"))
    python = venv / "bin" / "python"
    return python if python.exists() else None


def _ours(num_seqs: int) -> Generate:
    engine = Engine.from_pretrained(
        DEFAULT_MODEL,
        EngineConfig(
            num_threads=1,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
        ),
    )

    def generate(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            engine.add_request(prompt, params, request_id=str(index))
        tokens: list[list[int]] = [[] for _ in prompts]
        while engine.has_work:
            for output in engine.step():
                tokens[int(output.request_id)] += output.token_ids
        return tokens

    return generate


def _transformers() -> Generate:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    # Neither has types.
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float32)
    model.eval()

    def generate(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output: torch.Tensor = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        tokens: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return tokens

    return generate


class _VllmChild(Child):
    #: It frees its memory first.
    END_LIMIT = 60.0

    def __init__(self, python: Path, dtype: str, num_seqs: int) -> None:
        script = Path(__file__).parent / "_vllm_child.py"
        command = [str(python), str(script), str(DEFAULT_MODEL), dtype, str(num_seqs), "1024"]
        super().__init__(command, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self._answer()

    def _answer(self) -> object:
        line = self.answers.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with status {self.process.wait()}, see above")
        return json.loads(line)

    def generate(self, prompts: Prompts, num_tokens: int) -> list[list[int]]:
        print(json.dumps([num_tokens, prompts]), file=self.orders, flush=True)
        answer = self._answer()
        assert isinstance(answer, list)
        tokens: list[list[int]] = answer[1]
        return tokens
