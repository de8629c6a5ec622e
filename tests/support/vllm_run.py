"""vLLM's engine in this process, asked for by clients that leave within a step. Prints JSON.

Run by a Python that has vLLM, with the folder of a checkpoint. Each client leaves as a layer of
the model begins, so that nothing is left to time.
"""

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_PLUGINS="",
)

from vllm import LLM, SamplingParams

from disconnect_watch import CancelToken
from disconnect_watch.backends.hooks import vllm as hooks
from disconnect_watch.remote import FLAG_KEY, name_of

NUM_TOKENS = 12
#: Of a block, and of a step at most.
BLOCK, CHUNK = 32, 256


class Engine:
    """One engine, stepped by hand.

    Attributes:
        num_layers: that were begun since ``begin``.
    """

    def __init__(self, model: str) -> None:
        self.llm = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            max_num_seqs=8,
            max_model_len=1024,
            max_num_batched_tokens=CHUNK,
            block_size=BLOCK,
            enable_prefix_caching=True,
        )
        self.engine: Any = self.llm.llm_engine
        self.core: Any = self.engine.engine_core.engine_core
        self.scheduler: Any = self.core.scheduler
        runner: Any = self.core.model_executor.driver_worker.worker.model_runner
        self.num_layers = 0
        self._events: list[tuple[int, Callable[[], object]]] = []
        for layer in runner.model.model.layers:
            layer.register_forward_pre_hook(self._begins)
        self.outputs: dict[str, Any] = {}

    def _begins(self, *_: Any) -> None:
        self.num_layers += 1
        for event in [each for each in self._events if each[0] == self.num_layers]:
            self._events.remove(event)
            event[1]()

    def at_layer(self, number: int, call: Callable[[], object]) -> None:
        """Call it as so many layers from now have begun."""
        self._events.append((self.num_layers + number, call))

    def add(
        self, name: str, prompt: list[int], token: CancelToken | None = None, n: int = NUM_TOKENS
    ) -> None:
        extra = None if token is None else {FLAG_KEY: [list(name_of(token))]}
        params = SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, extra_args=extra)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> int:
        """Run a step; returns how many layers that took."""
        before = self.num_layers
        for output in self.engine.step():
            self.outputs[output.request_id] = output
        return self.num_layers - before

    def run(self) -> None:
        for _ in range(10_000):
            if not self.engine.has_unfinished_requests():
                return
            self.step()
        raise AssertionError("requests without an end")

    def tokens(self, name: str) -> list[int]:
        return list(self.outputs[name].outputs[0].token_ids)

    def reason(self, name: str) -> str | None:
        reason: str | None = self.outputs[name].outputs[0].finish_reason
        return reason

    @property
    def num_blocks_held(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    @contextmanager
    def clean(self) -> Iterator[None]:
        """Begin with an empty prefix cache, and end with nothing left."""
        self.engine.reset_prefix_cache()
        yield
        self.run()
        self.step()
        assert self.num_blocks_held == 0, self.num_blocks_held
        assert not self.scheduler.requests
        assert not self.scheduler.running


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 2048) for _ in range(length)]


LONG, SHORT, OTHER = prompt_of(1, 200), prompt_of(2, 20), prompt_of(3, 600)


def plain(engine: Engine, name: str, prompt: list[int]) -> dict[str, Any]:
    """What the prompt is answered, and how much of it was cached."""
    engine.add(name, prompt)
    engine.run()
    return {"tokens": engine.tokens(name), "cached": engine.outputs[name].num_cached_tokens}


def alone(engine: Engine) -> dict[str, Any]:
    token = CancelToken()
    engine.add("leaves", LONG, token)
    engine.at_layer(2, token.cancel)
    layers = engine.step()
    return {
        "layers": layers,
        "reason": engine.reason("leaves"),
        "held": engine.num_blocks_held,
        "after": plain(engine, "after", LONG),
    }


def abort_comes_within_the_step(engine: Engine) -> dict[str, Any]:
    token = CancelToken()
    engine.add("leaves", LONG, token)

    def leave() -> None:
        token.cancel()
        # What the API server does, once its event loop has heard of it.
        ids = engine.engine.output_processor.abort_requests(["leaves"], internal=False)
        engine.core.aborts_queue.put_nowait(ids)

    engine.at_layer(2, leave)
    layers = engine.step()
    return {"layers": layers, "after": plain(engine, "after", LONG)}


def beside_one_who_stays(engine: Engine) -> dict[str, Any]:
    token = CancelToken()
    engine.add("stays", SHORT, CancelToken())
    engine.step()
    engine.step()
    engine.add("leaves", LONG, token)
    engine.at_layer(2, token.cancel)
    layers = engine.step()
    has_left = engine.reason("leaves")
    engine.run()
    return {"layers": layers, "reason": has_left, "stays": engine.tokens("stays")}


def with_the_same_beginning(engine: Engine) -> dict[str, Any]:
    token = CancelToken()
    engine.add("leaves", LONG, token)
    engine.add("stays", LONG, CancelToken())
    engine.at_layer(2, token.cancel)
    layers = engine.step()
    engine.run()
    return {"layers": layers, "stays": engine.tokens("stays")}


def in_the_second_chunk(engine: Engine) -> dict[str, Any]:
    token = CancelToken()
    engine.add("leaves", OTHER, token)
    first = engine.step()
    engine.at_layer(2, token.cancel)
    second = engine.step()
    return {"layers": [first, second], "after": plain(engine, "after", OTHER)}


def between_two_steps(engine: Engine) -> dict[str, Any]:
    running, waiting = CancelToken(), CancelToken()
    engine.add("runs", SHORT, running)
    engine.step()
    engine.add("waits", LONG, waiting)
    running.cancel()
    waiting.cancel()
    layers = engine.step()
    return {
        "layers": layers,
        "reasons": [engine.reason("runs"), engine.reason("waits")],
        "held": engine.num_blocks_held,
    }


def too_little_to_give_up(engine: Engine) -> dict[str, Any]:
    token = CancelToken()
    engine.add("stays", LONG, CancelToken())
    engine.add("leaves", SHORT, token)
    engine.at_layer(2, token.cancel)
    layers = engine.step()
    engine.run()
    return {"layers": layers, "stays": engine.tokens("stays"), "reason": engine.reason("leaves")}


def at_random(engine: Engine) -> dict[str, Any]:
    """Many, half of whom leave at some layer, and those who stay are answered the same."""
    rng = random.Random(7)
    prompts = [prompt_of(100 + number, rng.randrange(5, 400)) for number in range(12)]
    expected = [plain(engine, f"plain {number}", p)["tokens"] for number, p in enumerate(prompts)]
    wrong = 0
    for trial in range(40):
        staying = []
        for place in range(8):
            number = rng.randrange(len(prompts))
            token = CancelToken()
            name = f"{trial} {place}"
            engine.add(name, prompts[number], token)
            if place % 2:
                engine.at_layer(rng.randrange(1, 60), token.cancel)
            else:
                staying.append((name, number))
        engine.run()
        wrong += sum(engine.tokens(name) != expected[number] for name, number in staying)
    return {"wrong": wrong}


def main(model: str) -> None:
    hooks.install()
    hooks.install()
    engine = Engine(model)
    found: dict[str, Any] = {
        "num_layers": engine.llm.llm_engine.model_config.hf_config.num_hidden_layers
    }
    for name, prompt in (("long", LONG), ("short", SHORT), ("other", OTHER)):
        with engine.clean():
            found[name] = plain(engine, name, prompt)
    for scenario in (
        alone,
        abort_comes_within_the_step,
        beside_one_who_stays,
        with_the_same_beginning,
        in_the_second_chunk,
        between_two_steps,
        too_little_to_give_up,
        at_random,
    ):
        with engine.clean():
            found[scenario.__name__] = scenario(engine)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
