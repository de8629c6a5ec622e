"""An engine that decodes, and the looks at flags that its steps make, each to be repeated alone.

As a program it runs under callgrind and marks where each begins and ends:
``python -m bench._flag_steps NUM_ROWS``.
"""

import ctypes
import sys
from collections.abc import Callable

from bench._build import build_library
from disconnect_watch import CancelToken
from disconnect_watch.engine import Engine, EngineConfig, Request, SamplingParams

__all__ = ["NUM_COUNTED", "FlagSteps"]

#: How often each is repeated between two marks.
NUM_COUNTED = {"step": 2, "look": 200, "glance": 200, "read": 200}
PROMPT_LEN = 16


class FlagSteps:
    """So many requests that decode, each with a token, and others that wait.

    Attributes:
        num_layers: before each of which the flags of those that run are looked at; those of all
            are once a step, before it is planned.
        num_reads: of one request's flags, in one step: before each token is handed out.
    """

    def __init__(self, num_rows: int, *, num_waiting: int = 0) -> None:
        self.engine = Engine.from_pretrained(config=EngineConfig(max_num_seqs=num_rows))
        self.num_layers = self.engine.model_config.num_layers
        self.num_reads = num_rows
        self._requests = [self._submit(index) for index in range(num_rows + num_waiting)]
        while self.engine.stats().num_generated_tokens < num_rows:
            self.engine.step()

    def _submit(self, index: int) -> Request:
        prompt = [1 + (index * 31 + position * 7) % 1000 for position in range(PROMPT_LEN)]
        params = SamplingParams(max_tokens=self.engine.max_model_len, ignore_eos=True)
        return self.engine.add_request(
            prompt, params, request_id=str(index), cancel=CancelToken(), time_limit=3600
        )

    def cost(self, look: float, glance: float, read: float) -> float:
        """What a step pays for all of it, given the cost of each."""
        return look + self.num_layers * glance + self.num_reads * read

    def step(self, count: int) -> None:
        """Run so many steps."""
        for _ in range(count):
            self.engine.step()

    def look(self, count: int) -> None:
        """Look so often at all flags and deadlines."""
        has_fired, clock = self.engine._scan.has_fired, self.engine.clock
        for _ in range(count):
            assert not has_fired(clock)

    def glance(self, count: int) -> None:
        """Look so often at the flags of those that run, and all deadlines."""
        has_fired, clock = self.engine._scan.has_running_fired, self.engine.clock
        for _ in range(count):
            assert not has_fired(clock)

    def read(self, count: int) -> None:
        """Read so often the flags of one request."""
        request = self._requests[0]
        for _ in range(count):
            assert not request.is_cancelled

    @property
    def parts(self) -> dict[str, Callable[[int], None]]:
        """What is measured, by the names of ``NUM_COUNTED``."""
        return {"step": self.step, "look": self.look, "glance": self.glance, "read": self.read}


def main() -> None:
    marks = ctypes.CDLL(str(build_library("marks")))
    steps = FlagSteps(int(sys.argv[1]))
    marks.marks_begin()
    for name, part in steps.parts.items():
        marks.marks_zero()
        part(NUM_COUNTED[name])
        marks.marks_dump(name.encode())


if __name__ == "__main__":
    main()
