"""Seconds of vLLM's step over a long prompt, whole and given up; run by a Python that has vLLM.

Prints JSON: of each prompt how many layers were begun, the seconds of its step, and those from when
its client left to the end of the step, 0 for one who stays.
"""

import json
import os
import random
import sys
import threading
import time
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

PROMPT_TOKENS, STAY = 12_000, 0.5


def main(model: str, num_leaving: int) -> None:
    """Measure, one who stays first."""
    hooks.install()
    llm = LLM(
        model,
        dtype="bfloat16",
        enforce_eager=True,
        max_num_seqs=1,
        max_model_len=16_384,
        max_num_batched_tokens=12_288,
        block_size=32,
    )
    engine: Any = llm.llm_engine
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    begun: list[None] = []
    for layer in runner.model.model.layers:
        layer.register_forward_pre_hook(lambda *_: begun.append(None))

    def ask(number: int, leaves: bool) -> tuple[int, float, float]:
        token, left = CancelToken(), [0.0]
        extra = {FLAG_KEY: [list(name_of(token))]}
        prompt = [random.randrange(1, 2048) for _ in range(PROMPT_TOKENS)]
        params = SamplingParams(max_tokens=1, extra_args=extra)
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)

        def leave() -> None:
            left[0] = time.perf_counter()
            token.cancel()

        timer = threading.Timer(STAY, leave)
        begun.clear()
        start = time.perf_counter()
        if leaves:
            timer.start()
        engine.step()
        end = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        if leaves:
            timer.join()
        return len(begun), end - start, end - left[0] if leaves else 0.0

    found = [ask(number, leaves=number > 0) for number in range(num_leaving + 1)]
    engine.step()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
