"""vLLM's engine looks at the flags of its requests: before each step, and within one.

A request carries the name of its client's flag (``remote.FLAG_KEY`` in the ``extra_args`` of its
sampling parameters) from the process that serves HTTP to the engine's, and on to the worker's. The
scheduler drops what was cancelled before it plans a step. The worker looks again in each layer,
and gives a step up where that is worth it: a long prompt that nobody waits for any more ends within
a layer. What the others had in that step is computed anew in the next, so their answers stay.

Within a step the looks are only where they are safe: one worker, the first model runner, attention
layers alone, no speculative decoding, no connector, no asynchronous scheduling. Elsewhere the look
before each step is what there is, and the worker's log says so.

What is used of vLLM beyond its documented surface (0.32, held by ``tests/gateways/test_vllm.py``):
``Scheduler.schedule``, ``update_from_output``, ``add_request`` and ``finish_requests``, its block
pool, ``GPUModelRunner.execute_model`` and the ``impl`` of attention layers.
"""

__all__ = ["install"]


def install() -> None:
    """Put the looks into this process's scheduler and model runner. Idempotent.

    Which processes have one is vLLM's to say; in all others nothing ever calls them.
    """
    from disconnect_watch.backends.hooks.vllm import _runner, _scheduler

    _scheduler.install()
    _runner.install()
