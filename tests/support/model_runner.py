"""A runner that computes nothing, but keeps the memory of a real one and looks at every block.

It writes each token to its slot and reads its whole context back, so a block that was shared
wrongly, or given away too early, is seen at the first read. Its acknowledgements may lag behind,
as those of a device do.
"""

from collections.abc import Sequence

from disconnect_watch.engine.outcome import Sampled
from disconnect_watch.engine.schedule import LayerCheck, ScheduledRow

__all__ = ["NUM_LAYERS", "VOCAB_SIZE", "ModelRunner", "next_token"]

NUM_LAYERS = 3
VOCAB_SIZE = 250


def next_token(seed: int, context: Sequence[int]) -> int:
    """What the model says after a context: any change to it gives another token."""
    return hash((seed, *context)) % VOCAB_SIZE


class ModelRunner:
    """See the head of this file.

    Attributes:
        layer_tokens: as ``schedule.Runner`` says.
        lag: how many steps the acknowledgement stays behind the last step.
        poisoned: seeds whose second token can't be computed.
    """

    def __init__(self, *, block_size: int) -> None:
        self.layer_tokens: list[int] = []
        self.lag = 0
        self.poisoned: set[int] = set()
        self._block_size = block_size
        self._last_step = 0
        self._acked_step = 0
        self._memory: dict[int, int] = {}
        #: The last step that touched a block, and the request that wrote it.
        self._touched: dict[int, int] = {}
        self._writers: dict[int, str] = {}

    @property
    def acked_step(self) -> int:
        self._acked_step = max(self._acked_step, self._last_step - self.lag)
        return self._acked_step

    def run(
        self, rows: Sequence[ScheduledRow], *, step: int, layer_check: LayerCheck
    ) -> dict[str, Sampled | Exception]:
        self._last_step = step
        batch = list(rows)
        for row in batch:
            self._touch(row, step)
        for layer in range(NUM_LAYERS):
            dead = {row.request.key for row in layer_check(layer, batch)}
            batch = [row for row in batch if row.request.key not in dead]
            if not batch:
                return {}
            self.layer_tokens.append(sum(row.num_tokens for row in batch))
        results: dict[str, Sampled | Exception] = {}
        for row in batch:
            self._write(row)
        for row in batch:
            token = self._read(row)
            if row.is_sampled:
                results[row.request.key] = token
        return results

    def _touch(self, row: ScheduledRow, step: int) -> None:
        """Note whose step a block is in; nobody else may have written to it in one under way."""
        first = row.start // self._block_size
        for index, block in enumerate(row.block_ids):
            if index >= first and self._writers.get(block) != row.request.key:
                assert self._touched.get(block, 0) <= self._acked_step, (
                    f"{row.request.key} writes block {block}, which step "
                    f"{self._touched[block]} may still touch"
                )
                self._writers[block] = row.request.key
            self._touched[block] = step

    def _write(self, row: ScheduledRow) -> None:
        for position in range(row.start, row.stop):
            self._memory[self._slot(row, position)] = row.request.token_ids[position]

    def _read(self, row: ScheduledRow) -> Sampled | Exception:
        request = row.request
        context = [self._memory.get(self._slot(row, position)) for position in range(row.stop)]
        assert context == request.token_ids[: row.stop], (
            f"{request.key} finds another's text in its blocks {row.block_ids}"
        )
        if request.seed in self.poisoned and request.num_generated_tokens == 1:
            return FloatingPointError("poisoned")
        return Sampled(next_token(request.seed, request.token_ids[: row.stop]))

    def _slot(self, row: ScheduledRow, position: int) -> int:
        block = row.block_ids[position // self._block_size]
        return block * self._block_size + position % self._block_size
