"""Many decode steps in one launch: a graph that loops on the device until the latch says stop.

    latch ─► set ─► WHILE ┌ step ─► latch ─► set ┐
                          └──────────────────────┘

The host launches once and may do what it likes meanwhile. After each step the latch reads the
flags; when every row is dead or done, or no step is left, its ``go`` word is 0 and the loop ends.
The latch before the loop is what makes a batch that died in the queue cost no step at all.

Step and latch are captured by torch as graphs of their own and become children here. What a body
may hold is limited (kernels, copies, children without conditions), so a step draws its random
numbers from a counter, synchronises with nobody and allocates from its capture's own pool.

Source: CUDA programming guide, "Conditional Graph Nodes"; driver API, cuGraphAddNode.
"""

import ctypes
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

from disconnect_watch.kernels.driver import check, load_driver
from disconnect_watch.kernels.ptx import SET_CONDITION_NAME, SET_CONDITION_PTX
from disconnect_watch.kernels.rows import Control, RowState

__all__ = ["WhileGraph", "capture_loop"]


class WhileGraph:
    """The loop, ready to be launched.

    Args:
        driver: from ``load_driver``.
        step, latch: graphs (``cudaGraph_t`` as a number), which are copied; neither may have a
            condition in it. Without a step (None) the loop does nothing but look.
        go_address: of the 32-bit word that the latch leaves, on the device.
        keep: lives as long as this, such as whose memory the graphs write to.

    Raises:
        DriverError: the driver refused something.
    """

    def __init__(
        self, driver: Any, *, step: int | None, latch: int, go_address: int, keep: object = None
    ) -> None:
        self._driver = driver
        self._go_address = go_address
        self._keep = keep
        self._module: Any = None
        self._graph: Any = None
        self._exec: Any = None
        try:
            self._build(None if step is None else driver.CUgraph(step), driver.CUgraph(latch))
        except BaseException:
            self.close()
            raise

    def _build(self, step: Any, latch: Any) -> None:
        driver = self._driver
        context = check(driver, "find the current context", driver.cuCtxGetCurrent())
        self._module = check(
            driver, "load PTX", driver.cuModuleLoadData(SET_CONDITION_PTX.encode() + b"\0")
        )
        function = check(
            driver,
            f"find {SET_CONDITION_NAME}",
            driver.cuModuleGetFunction(self._module, SET_CONDITION_NAME.encode()),
        )
        self._graph = check(driver, "create a graph", driver.cuGraphCreate(0))
        # Without a default the value is what the set nodes made it, one before the loop and one
        # at the end of its body.
        condition = check(
            driver,
            "create a condition",
            driver.cuGraphConditionalHandleCreate(self._graph, context, 0, 0),
        )
        first = self._add_child(self._graph, latch, [])
        is_set = self._add_set(self._graph, function, condition, [first])
        body = self._add_while(context, condition, [is_set])
        before = [] if step is None else [self._add_child(body, step, [])]
        latched = self._add_child(body, latch, before)
        self._add_set(body, function, condition, [latched])
        self._exec = check(
            driver, "instantiate the loop", driver.cuGraphInstantiate(self._graph, 0)
        )

    def _add_child(self, graph: Any, child: Any, after: list[Any]) -> Any:
        added = self._driver.cuGraphAddChildGraphNode(graph, after, len(after), child)
        return check(self._driver, "add a child graph", added)

    def _add_set(self, graph: Any, function: Any, condition: Any, after: list[Any]) -> Any:
        driver = self._driver
        params = driver.CUgraphNodeParams()
        params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        kernel = params.kernel
        kernel.func = function
        kernel.gridDimX = kernel.gridDimY = kernel.gridDimZ = 1
        kernel.blockDimX = kernel.blockDimY = kernel.blockDimZ = 1
        kernel.kernelParams = (
            (int(condition), self._go_address),
            (ctypes.c_uint64, ctypes.c_uint64),
        )
        return check(
            driver,
            "add the kernel that sets the condition",
            driver.cuGraphAddNode(graph, after, None, len(after), params),
        )

    def _add_while(self, context: Any, condition: Any, after: list[Any]) -> Any:
        """Add the loop to the outer graph; returns the graph of its body."""
        driver = self._driver
        params = driver.CUgraphNodeParams()
        params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        conditional = params.conditional
        conditional.handle = condition
        conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        conditional.size = 1
        conditional.ctx = context
        check(
            driver,
            "add the loop",
            driver.cuGraphAddNode(self._graph, after, None, len(after), params),
        )
        return params.conditional.phGraph_out[0]

    def launch(self, stream: int) -> None:
        """Start the loop on a stream (``cudaStream_t`` as a number); returns at once.

        Raises:
            DriverError: the driver refused it.
        """
        driver = self._driver
        check(driver, "launch the loop", driver.cuGraphLaunch(self._exec, driver.CUstream(stream)))

    def close(self) -> None:
        """Give all of it back; it must not be running. Idempotent."""
        driver = self._driver
        for name, destroy in (
            ("_exec", "cuGraphExecDestroy"),
            ("_graph", "cuGraphDestroy"),
            ("_module", "cuModuleUnload"),
        ):
            handle = getattr(self, name)
            setattr(self, name, None)
            if handle is not None:
                check(driver, destroy, getattr(driver, destroy)(handle))
        self._keep = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def capture_loop(
    step: Callable[[], None] | None, latch: Callable[[], None], rows: RowState
) -> WhileGraph:
    """Capture a step and a latch with torch, and loop over them on the device.

    Both are called twice: once to compile what they launch, once under capture. What the first call
    did to ``rows`` and to the cache is the caller's to undo.

    Args:
        step: all of a decode step on the current device; shapes and addresses fixed. None for a
            loop that does nothing but look.
        latch: ``Kernels.latch`` on the same rows.
        rows: whose ``go`` ends the loop.

    Raises:
        UnavailableError: no driver or no bindings.
        DriverError: the driver refused something.
    """
    driver = load_driver()

    def capture(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            work()
        return graph

    stepped = None if step is None else capture(step)
    latched = capture(latch)
    return WhileGraph(
        driver,
        step=None if stepped is None else int(stepped.raw_cuda_graph()),
        latch=int(latched.raw_cuda_graph()),
        go_address=rows.control.data_ptr() + Control.GO * rows.control.element_size(),
        keep=(stepped, latched, rows),
    )
