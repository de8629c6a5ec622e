"""What cancelling inside a step costs on a GPU, and how fast a GPU lets go of a request.

    python -m bench.gpu [--quick]

Sections: B0 the bus; B1 flag stored to row dead; B2 what latch and loop add to a step; B3 looks
at the flag in a long prefill; B4 a leave to its row being free again, and the time that leaves
cost beyond an oracle; B5 tokens a second that reach a client, with and without others to take the
free rows, and the time between two tokens; B8 a client's reset to the end of its work; and the
embedded engine with one step a launch and with several. (B6 and B7, which are right or wrong and no
matter of degree, are in tests/gpu.)
"""

import ctypes
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from bench._device_engine import make_engine, run_engine
from bench._device_loop import make_loop
from bench._device_serving import ORACLE, POLICIES, Served, make_arrivals, serve
from bench._device_stop import prefill_times, stop_after_leave, stop_after_store
from bench._device_work import LLAMA_8B, TINY, DecodeWork, ModelShape
from bench._harness import Report, median_of_ratios, ratio_of_medians, run_command
from disconnect_watch import CancelToken
from disconnect_watch.kernels import (
    FlagSource,
    FlagView,
    UnavailableError,
    open_view,
    probe,
    triton_device,
)

__all__ = ["FULL", "QUICK", "Config", "rows_for", "run"]


@dataclass(frozen=True, slots=True)
class Config:
    """How much is measured.

    Attributes:
        shape: of the decoder of B2, B4 and B5.
        batch_sizes: of B2.
        contexts: of B5, tokens that each row has before; B2 and B4 take the first.
        step_seconds: of B1's steps; 0 for a loop whose body is empty but for the latch.
        num_stops: trials of B1 at each length, a tenth of it in B8.
        num_replays: steps of one sample of B2.
        num_samples: of B2 and B3.
        prefill_contexts: of B3.
        num_queries: of B3's prefill.
        polls: tiles of keys between B3's looks; 0 for none.
        shares: of clients that leave, B5; B4 takes the middle one.
        num_rows: of B4 and B5, and fewer where the context is so long that more do not fit.
        max_kv_bytes: that keys and values of B4 and B5 may take.
        num_requests: of each run of B4 and B5.
        num_tokens: that a request wants at most.
        device_steps: of the embedded engine, the first the baseline.
    """

    shape: ModelShape
    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    step_seconds: tuple[float, ...]
    num_stops: int
    num_replays: int
    num_samples: int
    prefill_contexts: tuple[int, ...]
    num_queries: int
    polls: tuple[int, ...]
    shares: tuple[float, ...]
    num_rows: int
    max_kv_bytes: int
    num_requests: int
    num_tokens: int
    device_steps: tuple[int, ...] = (1, 8, 32)
    dtype: str = "bfloat16"


FULL = Config(
    shape=LLAMA_8B,
    batch_sizes=(1, 16, 64, 256),
    contexts=(512, 8192, 32_768),
    step_seconds=(0.0, 1e-4, 1e-3, 5e-3, 2e-2),
    num_stops=2000,
    num_replays=50,
    num_samples=20,
    prefill_contexts=(32_768, 131_072),
    num_queries=2048,
    polls=(0, 1, 4, 16, 64),
    shares=(0.1, 0.5, 0.9),
    num_rows=64,
    max_kv_bytes=80 << 30,
    num_requests=256,
    num_tokens=256,
)
QUICK = Config(
    shape=ModelShape(4, 2048, 8192, 16, 4, 128, 32000),
    batch_sizes=(1, 64),
    contexts=(512,),
    step_seconds=(0.0, 1e-3, 5e-3),
    num_stops=100,
    num_replays=20,
    num_samples=5,
    prefill_contexts=(32_768,),
    num_queries=512,
    polls=(0, 1, 16),
    shares=(0.1, 0.5, 0.9),
    num_rows=64,
    max_kv_bytes=40 << 30,
    num_requests=128,
    num_tokens=64,
)
#: Enough to run every line on a CPU. Its numbers mean nothing.
DRY = Config(
    shape=TINY,
    batch_sizes=(2,),
    contexts=(16,),
    step_seconds=(0.0, 1e-3),
    num_stops=10,
    num_replays=2,
    num_samples=2,
    prefill_contexts=(256,),
    num_queries=4,
    polls=(0, 1),
    shares=(0.5,),
    num_rows=2,
    max_kv_bytes=1 << 20,
    num_requests=4,
    num_tokens=4,
    device_steps=(1, 2),
    dtype="float32",
)


def run(config: Config, *, device: torch.device | str = "cuda") -> Report:
    """Measure all of it."""
    device = torch.device(device)
    report = Report("gpu", asdict(config))
    support = probe(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU: no results"
    with open_view(device) as flags:
        report.notes.append(
            f"device: {name}; flags: {flags.source.value}; kernels: {support.backend.value}"
        )
        report.notes += [*support.missing, *flags.missing]
        if device.type == "cuda":
            _bus(report, flags, config)
        _stops(report, flags, config)
        _overhead(report, flags, config)
        _prefills(report, flags, config)
        _serving(report, flags, config)
        _leaves(report, flags, config)
    _engine(report, config)
    return report


def _bus(report: Report, flags: FlagView, config: Config) -> None:
    """B0: a load over the bus, one from the device's own memory, and there and back again."""
    from bench._device_bus import chase, echo

    own = torch.zeros_like(flags.words)
    output = torch.zeros(1, dtype=torch.int32, device=own.device)
    # Slot 0's word may be taken; a free slot's is 0, as the chase needs it.
    free = CancelToken().slot
    for name, words in (("mapped", flags.words[free:]), ("device", own)):
        samples = []
        for trial in range(config.num_stops + 1):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            events[0].record()
            chase[(1,)](words, output, 1000, num_warps=1, enable_fp_fusion=True)
            events[1].record()
            torch.cuda.synchronize()
            if trial:
                samples.append(events[0].elapsed_time(events[1]))  # ms a thousand: us each
        report.add(f"B0 load of a {name} word", "us", samples)
    if flags.source is not FlagSource.REGISTERED:
        report.notes.append("B0: no echo, since the table's pages are not registered")
        return
    token = CancelToken()
    word = ctypes.c_int32.from_address(token.address)
    ack = ctypes.c_int32.from_address(flags.table.acks_address + 4 * token.slot)
    kept, word.value = word.value, 0
    echo[(1,)](
        flags.words[token.slot :],
        flags.acks[token.slot :],
        config.num_stops,
        NUM_THREADS=32,
        num_warps=1,
        enable_fp_fusion=True,
    )
    samples = []
    for number in range(1, config.num_stops + 1):
        begin = time.perf_counter_ns()
        word.value = number
        while ack.value != number:
            pass
        samples.append((time.perf_counter_ns() - begin) / 1e3)
    torch.cuda.synchronize()
    word.value = kept
    report.add("B0 store, look, ack, look", "us", samples)


def _stops(report: Report, flags: FlagView, config: Config) -> None:
    """B1, in lengths of a step: half of one on average, never two."""
    for seconds in config.step_seconds:
        samples, step = stop_after_store(flags, step_seconds=seconds, num_trials=config.num_stops)
        if not seconds:
            name = "B1 store to ack, an empty body"
            report.add(name, "us", [sample * 1e6 for sample in samples])
            continue
        name = f"B1 store to ack, steps of {seconds * 1e3:g} ms"
        report.add(name, "steps", [sample / step for sample in samples])
        report.add(f"{name}, beyond the step", "us", [(sample - step) * 1e6 for sample in samples])


def _overhead(report: Report, flags: FlagView, config: Config) -> None:
    """B2: so many steps in the loop, beside as many replays of the step alone."""
    for num_rows in config.batch_sizes:
        work = DecodeWork(
            config.shape,
            flags,
            num_rows=num_rows,
            context=config.contexts[0],
            max_new_tokens=config.num_replays + 2,
            dtype=getattr(torch, config.dtype),
        )
        loop = make_loop(work.step, work.rows, flags)
        looped: list[float] = []
        bare: list[float] = []
        for trial in range(config.num_samples + 1):
            for into, launch in ((looped, loop.launch), (bare, loop.run_bare)):
                for row in range(num_rows):
                    work.put(row, num_tokens=config.num_replays + 2, token=CancelToken())
                loop.wait()
                begin = time.perf_counter()
                launch(config.num_replays)
                loop.wait()
                if trial:
                    into.append((time.perf_counter() - begin) * 1e6 / config.num_replays)
        loop.close()
        names = [f"B2 {kind}, {num_rows} rows" for kind in ("step in the loop", "step alone")]
        for name, samples in zip(names, (looped, bare), strict=True):
            report.add(name, "us", samples)
        report.ratios.append(median_of_ratios(*names, measured=looped, baseline=bare))


def _prefills(report: Report, flags: FlagView, config: Config) -> None:
    """B3: a chunk's attention over a long context, and what is left of it after a cancel."""
    for context in config.prefill_contexts:
        baseline: list[float] = []
        for poll_every in config.polls:
            whole, stopped = prefill_times(
                flags,
                num_queries=config.num_queries,
                context=context,
                num_heads=config.shape.num_heads,
                num_kv_heads=config.shape.num_kv_heads,
                head_dim=config.shape.head_dim,
                poll_every=poll_every,
                num_trials=config.num_samples,
                dtype=getattr(torch, config.dtype),
            )
            name = f"B3 prefill over {context}, a look every {poll_every} tiles"
            report.add(name, "us", [sample * 1e6 for sample in whole])
            report.add(f"{name}, after a cancel", "us", [sample * 1e6 for sample in stopped])
            if poll_every == 0:
                baseline = whole
            else:
                report.ratios.append(
                    ratio_of_medians(
                        name,
                        f"B3 prefill over {context}, a look every 0 tiles",
                        measured=whole,
                        baseline=baseline,
                    )
                )


def _serving(report: Report, flags: FlagView, config: Config) -> None:
    """B4 and B5: the same requests and the same leaves under each policy."""
    middle = config.shares[len(config.shares) // 2]
    for context in config.contexts:
        num_rows = rows_for(config, context)
        where = f"context {context}, {num_rows} rows"
        work = DecodeWork(
            config.shape,
            flags,
            num_rows=num_rows,
            context=context,
            max_new_tokens=config.num_tokens + 2,
            dtype=getattr(torch, config.dtype),
        )
        loop = make_loop(work.step, work.rows, flags)
        begin = time.perf_counter()
        loop.run_bare(4)
        step = (time.perf_counter() - begin) / 4
        for share in config.shares:
            arrivals = make_arrivals(
                config.num_requests,
                share=share,
                num_tokens=config.num_tokens,
                mean_seconds=step * config.num_tokens / 3,
            )
            for refill, some in (("", arrivals), (", no refill", arrivals[:num_rows])):
                results: dict[str, Served] = {}
                for policy in POLICIES:
                    for row in range(num_rows):
                        work.retire(row)
                    results[policy.name] = serve(work, loop, policy, some)
                for name, served in results.items():
                    what = f"{name}, {share:.0%} leave, {where}{refill}"
                    report.add(f"B5 {what}", "tokens/s", [served.num_tokens / served.seconds])
                    report.add(f"B5 wasted: {what}", "tokens", [served.num_wasted])
                    report.add(f"B5 between two tokens: {what}", "ms", served.gaps_ms or [0.0])
                if share == middle and context == config.contexts[0] and not refill:
                    _waste(report, results)
        loop.close()


def _waste(report: Report, results: Mapping[str, Served]) -> None:
    """B4: what a leave cost under each policy."""
    oracle = results[ORACLE]
    for name, served in results.items():
        if served.reusable_ms:
            report.add(f"B4 leave to free row: {name}", "ms", served.reusable_ms)
        if name != ORACLE and served.num_left:
            beyond = (served.seconds - oracle.seconds) * 1e3 / served.num_left
            report.add(f"B4 time beyond the oracle's, a leave: {name}", "ms", [beyond])


def rows_for(config: Config, context: int) -> int:
    """Return for how many rows of such a context there is memory."""
    shape, itemsize = config.shape, getattr(torch, config.dtype).itemsize
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * itemsize
    fitting: int = config.max_kv_bytes // (per_token * (context + config.num_tokens + 2))
    return max(1, min(config.num_rows, fitting))


def _leaves(report: Report, flags: FlagView, config: Config) -> None:
    """B8: a client's reset over TCP, with threads that keep the GIL from all others."""
    names = {by: f"B8 reset to stop, by {by}" for by in ("watcher", "asyncio")}
    samples = {
        by: stop_after_leave(
            flags,
            step_seconds=config.step_seconds[-1],
            num_trials=max(10, config.num_stops // 10),
            num_hogs=2,
            by=by,
        )
        for by in names
    }
    for by, name in names.items():
        report.add(name, "us", [sample * 1e6 for sample in samples[by]])
    report.ratios.append(
        ratio_of_medians(
            names["watcher"],
            names["asyncio"],
            measured=samples["watcher"],
            baseline=samples["asyncio"],
        )
    )


def _engine(report: Report, config: Config) -> None:
    """The embedded engine: a full batch that stays, and one of which a half leaves."""
    try:
        device = triton_device()
    except UnavailableError as lack:
        report.notes.append(f"no engine: {lack}")
        return
    rows = {"num_rows": config.num_rows, "num_tokens": config.num_tokens}
    rates: dict[int, list[float]] = {}
    for steps in config.device_steps:
        engine = make_engine(
            config.shape,
            device=device,
            dtype=getattr(torch, config.dtype),
            device_steps=steps,
            **rows,
        )
        run_engine(engine, **rows)  # compiles and captures
        calm = [run_engine(engine, **rows) for _ in range(config.num_samples)]
        rates[steps] = [each.num_tokens / each.seconds for each in calm]
        within = min(each.seconds for each in calm)
        left = [run_engine(engine, share=0.5, within=within, **rows) for _ in calm]
        name = f"engine, {steps} steps a launch"
        report.add(name, "tokens/s", rates[steps])
        late = [delay for each in left for delay in each.reusable_ms]
        report.add(f"{name}, leave to free blocks", "ms", late or [0.0])
        wasted = [each.num_wasted / max(1, each.num_left) for each in left]
        report.add(f"{name}, wasted a leave", "tokens", wasted)
    first, *others = config.device_steps
    for steps in others:
        names = [f"engine, {each} steps a launch" for each in (steps, first)]
        ratio = ratio_of_medians(*names, measured=rates[steps], baseline=rates[first])
        report.ratios.append(ratio)


def main() -> None:
    """The command."""
    if not torch.cuda.is_available():
        sys.exit("bench.gpu: no CUDA device here, and nothing is measured without one")
    run_command("gpu", lambda is_quick: run(QUICK if is_quick else FULL))


if __name__ == "__main__":
    main()
