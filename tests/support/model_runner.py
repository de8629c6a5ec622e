"""A runner that computes nothing, but keeps the memory of a real one and looks at every block.

It writes each token to its slot and reads its whole context back, so a block that was shared
wrongly, or given away too early, is seen at the first read. Its acknowledgements may lag behind,
as those of a device do.
"""

from collections.abc import Sequence

from disconnect_watch.engine.outcome import Drawn, Sampled
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
    ) -> dict[str, Drawn]:
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
        for row in batch:
            self._write(row, row.start, row.request.token_ids[row.start : row.stop])
        return {row.request.key: drawn for row in batch if (drawn := self._draw(row))}

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

    def _write(self, row: ScheduledRow, start: int, token_ids: Sequence[int]) -> None:
        for position, token_id in enumerate(token_ids, start):
            self._memory[self._slot(row, position)] = token_id

    def _draw(self, row: ScheduledRow) -> Drawn:
        """Up to as many tokens as the row may draw, each read back before the next."""
        request, text = row.request, list(row.request.token_ids[: row.stop])
        drawn: Drawn = []
        self._read(row, text)
        while row.is_sampled and len(drawn) < row.num_draws:
            if drawn:
                self._write(row, len(text) - 1, text[-1:])
                self._read(row, text)
            num_generated = len(text) - request.num_prompt_tokens
            if request.seed in self.poisoned and num_generated == 1:
                return [*drawn, FloatingPointError("poisoned")]
            text.append(next_token(request.seed, text))
            drawn.append(Sampled(text[-1]))
            if text[-1] in request.params.stop_token_ids:
                break
        return drawn

    def _read(self, row: ScheduledRow, text: list[int]) -> None:
        context = [self._memory.get(self._slot(row, position)) for position in range(len(text))]
        assert context == text, (
            f"{row.request.key} finds another's text in its blocks {row.block_ids}"
        )

    def _slot(self, row: ScheduledRow, position: int) -> int:
        block = row.block_ids[position // self._block_size]
        return block * self._block_size + position % self._block_size
