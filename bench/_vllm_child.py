"""Generates with vLLM at each order, and answers how long it took; run by a Python that has it.

Orders are JSON, a line each: ``[num_tokens, prompts]``. Answers too: ``[seconds, token_ids]``,
after one that says ``"ready"``.
"""

import json
import os
import sys
import time
from pathlib import Path

DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Threads are said by OMP_NUM_THREADS, and may run anywhere.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # One process less between a step and the next: the faster way on few cores.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main(model: str, dtype: str, num_seqs: int, max_model_len: int) -> None:
    """Answer orders until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # What a library prints is no answer.
    os.dup2(2, 1)
    os.environ.update(DEFAULTS)
    # In the venv's own Python, which alone has it.
    import vllm

    llm = vllm.LLM(
        model,
        dtype=dtype,
        enforce_eager=True,
        max_num_seqs=num_seqs,
        max_model_len=max_model_len,
        enable_prefix_caching=False,
    )
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        num_tokens, prompts = json.loads(line)
        params = vllm.SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        seconds = time.perf_counter() - start
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps([seconds, token_ids]), file=answers)


if __name__ == "__main__":
    # Its own folder is on the path of a script, and has modules with names of others.
    sys.path.remove(str(Path(__file__).parent))
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
