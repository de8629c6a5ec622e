"""What the graph and the registration do on a driver that is none: see ``fake_cuda.c``.

    python -m tests.kernels.on_fake_driver      as JSON, what became of each scenario

A process of its own, in which ``LD_LIBRARY_PATH`` leads to the fake. All else is real: the
bindings, their structures, the graph that is built, and the kernels, which are interpreted.
"""

import ctypes
import json
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from disconnect_watch import CancelToken
from disconnect_watch.engine import Engine, SamplingParams, kernel_loop
from disconnect_watch.engine.kernel_decoder import KernelDecoder
from disconnect_watch.kernels import (
    Backend,
    Control,
    DecodeState,
    DriverError,
    FlagView,
    RowState,
    UnavailableError,
    kernels_for,
    open_view,
    probe,
)
from disconnect_watch.kernels import view as view_module
from disconnect_watch.kernels.driver import load_driver
from disconnect_watch.kernels.graph import WhileGraph
from disconnect_watch.kernels.loop import GraphLoop
from disconnect_watch.kernels.pages import RegisteredPages
from disconnect_watch.token import flag_table
from tests.support.engine import dense_greedy, make_engine, run_to_end, tiny_model, tokens_of

SCENARIOS: dict[str, Callable[[], None]] = {}
DEVICE_OFFSET = 1 << 56
HostFunction = ctypes.CFUNCTYPE(None)

fake = ctypes.CDLL("libcuda.so.1")
fake.fake_graph.restype = ctypes.c_void_p


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


@contextmanager
def lacking(what: str) -> Iterator[None]:
    """Make the driver one that cannot do something."""
    os.environ["FAKE_CUDA"] = what
    load_driver.cache_clear()
    try:
        yield
    finally:
        del os.environ["FAKE_CUDA"]
        load_driver.cache_clear()


class Loop:
    """A loop over functions of this process, on rows of the CPU."""

    def __init__(self, num_rows: int = 3, *, is_empty: bool = False) -> None:
        self.flags = open_view()
        self.rows = RowState.create(num_rows)
        self.tokens = [CancelToken() for _ in range(num_rows)]
        for row, token in enumerate(self.tokens):
            self.rows.put(row, seq_len=9, slot_mapping=row, token=token)
        self.kernels = kernels_for(backend=Backend.TRITON)
        self.calls: list[str] = []
        self.on_step: Callable[[int], None] = lambda step: None
        self._functions = [HostFunction(self.step), HostFunction(self.latch)]
        step, latch = (int(fake.fake_graph(function)) for function in self._functions)
        go = self.rows.control.data_ptr() + 4 * Control.GO
        self.graph = WhileGraph(
            load_driver(), step=None if is_empty else step, latch=latch, go_address=go
        )

    def step(self) -> None:
        self.calls.append("step")
        self.on_step(self.calls.count("step"))

    def latch(self) -> None:
        self.calls.append("latch")
        self.kernels.latch(self.flags, self.rows)

    def launch(self, num_steps: int) -> list[str]:
        self.calls.clear()
        self.rows.begin(num_steps)
        self.graph.launch(0)
        return self.calls


@scenario
def loop_runs_its_steps_each_between_two_latches() -> None:
    loop = Loop()
    with loop.graph:
        assert loop.launch(3) == ["latch"] + ["step", "latch"] * 3
        assert loop.rows.control.tolist() == [4, 0, 3, 0]


@scenario
def loop_is_launched_again_and_takes_up_where_it_was() -> None:
    loop = Loop()
    with loop.graph:
        loop.launch(2)
        assert loop.launch(1) == ["latch", "step", "latch"]
        assert int(loop.rows.control[Control.STEP]) == 5


@scenario
def batch_that_died_before_the_launch_runs_no_step() -> None:
    loop = Loop()
    for token in loop.tokens:
        token.cancel()
    with loop.graph:
        assert loop.launch(9) == ["latch"]
        assert [token.acked for token in loop.tokens] == [1, 1, 1]


@scenario
def loop_ends_with_the_step_in_which_the_last_one_leaves() -> None:
    loop = Loop()

    def leave(step: int) -> None:
        if step in (2, 4):
            loop.tokens[0].cancel()
        if step == 4:
            loop.tokens[1].cancel()
            loop.tokens[2].cancel()

    loop.on_step = leave
    with loop.graph:
        assert loop.launch(9).count("step") == 4
        assert [token.acked for token in loop.tokens] == [3, 5, 5]
        assert int(loop.rows.control[Control.STEPS_LEFT]) == 5


@scenario
def loop_with_an_empty_body_looks_until_somebody_leaves() -> None:
    loop = Loop(1, is_empty=True)
    latch = loop.kernels.latch

    def leave(flags: FlagView, rows: RowState) -> None:
        if loop.calls.count("latch") == 4:
            loop.tokens[0].cancel()
        latch(flags, rows)

    loop.kernels.latch = leave  # type: ignore[method-assign]
    with loop.graph:
        assert loop.launch(9) == ["latch"] * 4
        assert loop.tokens[0].acked == 4


@scenario
def graph_with_a_loop_is_nobodys_child_and_leaves_nothing_open() -> None:
    loop = Loop()
    with loop.graph:
        inner = int(loop.graph._graph)
        with pytest.raises(DriverError, match="add a child graph: CUDA_ERROR_NOT_SUPPORTED"):
            WhileGraph(load_driver(), step=inner, latch=inner, go_address=0)
    loop.graph.close()


class Launched:
    """The end of what the fake driver has run: a launch returns behind all of it."""

    def __init__(self) -> None:
        self.num_looks = 2

    def record(self) -> None:
        pass

    def query(self) -> bool:
        self.num_looks -= 1
        return self.num_looks < 0

    def synchronize(self) -> None:
        pass


@contextmanager
def engine_on_the_driver(**config: Any) -> Iterator[Engine]:
    """An engine whose loops are graphs of the fake driver, all else as on a device."""
    functions: list[object] = []

    def make_loop(step: Callable[[], None], latch: Callable[[], None], rows: RowState) -> GraphLoop:
        step()  # no row is live, as when torch captures them
        latch()
        functions.extend(map(HostFunction, (step, latch)))
        graphs = [int(fake.fake_graph(function)) for function in functions[-2:]]
        go = rows.control.data_ptr() + 4 * Control.GO
        graph = WhileGraph(load_driver(), step=graphs[0], latch=graphs[1], go_address=go)
        return GraphLoop(graph, rows, stream=lambda: 0, end=Launched())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_loop, "make_loop", make_loop)
        engine = make_engine(arithmetic="triton", **config)
        yield engine
        # Nobody closes the loops of an engine: they go with it.
        decoder = engine._runner.decoder
        assert isinstance(decoder, KernelDecoder)
        decoder._loops.clear()


PROMPTS = {"a": [5, 6, 7], "b": [9] * 6}


@scenario
def engine_decodes_several_tokens_in_a_launch_of_the_graph() -> None:
    with engine_on_the_driver(device_steps=8) as engine:
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        for name, prompt in PROMPTS.items():
            engine.add_request(prompt, params, request_id=name)
        outputs = run_to_end(engine)
        for name, prompt in PROMPTS.items():
            assert tokens_of(outputs[name]) == dense_greedy(tiny_model(), prompt, 10)
        # The prompts, and so many tokens in two launches.
        assert engine.stats().num_steps == 3
        assert fake.fake_num_open() > 0


@scenario
def engine_row_that_ends_in_the_graph_is_told_nothing_and_others_go_on() -> None:
    with engine_on_the_driver(device_steps=8) as engine:
        token, params = CancelToken(), SamplingParams(max_tokens=20, ignore_eos=True)
        engine.add_request(PROMPTS["a"], params, request_id="a", cancel=token)
        engine.add_request(PROMPTS["b"], params, request_id="b")
        engine.step()
        decoder = engine._runner.decoder
        assert isinstance(decoder, KernelDecoder)
        kernels, num_steps = decoder._kernels, 0
        advance = kernels.advance

        def leave(tokens: torch.Tensor, state: DecodeState) -> None:
            nonlocal num_steps
            advance(tokens, state)
            num_steps += int(state.rows.live.sum()) > 0
            if num_steps == 3:
                token.cancel()

        kernels.advance = leave  # type: ignore[method-assign]
        outputs = engine.step()
        kernels.advance = advance  # type: ignore[method-assign]
        assert num_steps == 7, "the eighth found nobody who goes on"
        [last] = [output for output in outputs if output.request_id == "a"]
        assert last.token_ids == ()
        assert last.outcome is not None
        assert (last.outcome.kind, last.outcome.num_wasted_tokens) == ("cancelled", 3)
        assert token.acked == 2
        drawn = [output.token_ids[0] for output in outputs if output.request_id == "b"]
        assert drawn == dense_greedy(tiny_model(), PROMPTS["b"], 9)[1:]


@scenario
def pages_are_registered_once_and_given_back() -> None:
    driver, table = load_driver(), flag_table()
    size_bytes = 4 * table.num_slots
    pages = RegisteredPages(driver, table.words_address, size_bytes, device_index=0)
    assert pages.device_address == table.words_address + DEVICE_OFFSET
    with pytest.raises(
        DriverError, match="register 4194304 bytes of host memory: CUDA_ERROR_HOST_MEMORY_AL"
    ):
        RegisteredPages(driver, table.words_address, size_bytes, device_index=0)
    pages.close()
    pages.close()
    RegisteredPages(driver, table.words_address, size_bytes, device_index=0).close()


@scenario
def device_that_cannot_map_host_memory_is_named() -> None:
    table = flag_table()
    for what, text in (
        ("no-map", "device 0 has no CAN_MAP_HOST_MEMORY"),
        ("no-context", "no CUDA context is current"),
    ):
        with lacking(what), pytest.raises(UnavailableError, match=text):
            RegisteredPages(load_driver(), table.words_address, 4096, device_index=0)


@scenario
def words_and_acks_are_registered_together_or_not_at_all() -> None:
    """The tensor on top is torch's, which has no device here: what comes before it is run."""
    table, seen = flag_table(), list[int]()

    def see(address: int, num_words: int, **other: object) -> torch.Tensor:
        seen.append(address)
        return torch.zeros(num_words, dtype=torch.int32)

    whole = view_module.device_tensor, view_module._wake
    view_module.device_tensor = see
    view_module._wake = lambda device: 0
    try:
        with open_view("cuda") as view:
            assert view.source.value == "registered"
            assert seen == [table.words_address + DEVICE_OFFSET, table.acks_address + DEVICE_OFFSET]
            assert fake.fake_num_open() == 2
        assert fake.fake_num_open() == 0

        taken = RegisteredPages(load_driver(), table.acks_address, 4096, device_index=0)
        with pytest.raises(DriverError, match="ALREADY_REGISTERED"):
            view_module._register(table, torch.device("cuda"))
        taken.close()
    finally:
        view_module.device_tensor, view_module._wake = whole


@scenario
def probe_names_a_driver_that_does_not_start_or_is_too_old() -> None:
    with lacking("no-init"):
        assert probe("cuda").missing[-1] == "the CUDA driver does not start: CUDA_ERROR_NO_DEVICE"
    with lacking("old"):
        assert not probe("cuda").has_while_graph
        assert "is of 12030, and loops in graphs need 12040" in probe("cuda").missing[-1]
    assert probe("cuda").has_while_graph


def run_all() -> dict[str, str]:
    results = {}
    for name, function in SCENARIOS.items():
        try:
            function()
            assert fake.fake_num_open() == 0, "something was left open"
        except Exception:
            results[name] = traceback.format_exc()
        else:
            results[name] = "passed"
    return results


if __name__ == "__main__":
    print(json.dumps(run_all()))
