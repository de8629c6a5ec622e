"""The kernels as a caller sees them; ``backend.kernels_for`` says which implementation runs.

All of them keep two rules. A dead row (``seq_lens`` 0, a slot of -1) costs next to nothing and
gives zeros. What a live row gets is computed from its own inputs alone, in an order that does not
depend on its neighbours.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from disconnect_watch.kernels.rows import DecodeState, RowState
from disconnect_watch.kernels.view import FlagView

__all__ = [
    "DECODE_SPLIT",
    "KEY_TILE",
    "MIN_TEMPERATURE",
    "QUERY_TILE",
    "AttentionParams",
    "Kernels",
    "PagedKV",
    "Sampling",
]

#: Keys that attention works on at a time; ``AttentionParams.poll_every`` counts these.
KEY_TILE = 64
#: Tokens of a row's context that one program of decode attention works on. Always as many, so that
#: how a row is summed up depends on no other row.
DECODE_SPLIT = 1024
#: Queries that a prefill works on at a time.
QUERY_TILE = 128
#: At or below it the likeliest token is taken: scores divided by less could overflow.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class PagedKV:
    """One layer's keys and values, and which blocks of them each row has.

    Attributes:
        keys, values: [num_slots, num_kv_heads, head_dim]; a slot is ``block_id * block_size +
            offset``.
        block_tables: [num_rows, max_blocks], int32.
        block_size: tokens a block.
    """

    keys: Tensor
    values: Tensor
    block_tables: Tensor
    block_size: int


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How scores become weights.

    Attributes:
        scale: factor of the scores, usually ``head_dim ** -0.5``.
        window: how many tokens, itself included, one sees at most; 0 for all.
        softcap: scores are bent into (-softcap, softcap) by a tanh; 0 for not at all.
        poll_every: tiles of keys between two looks at the row's flag; 0 for none at all.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    poll_every: int = 16


@dataclass(frozen=True, slots=True)
class Sampling:
    """How each row's token is drawn, [num_rows] each.

    Attributes:
        temperatures: float32; at or below ``MIN_TEMPERATURE`` the likeliest token is taken.
        seeds: int64; of the row's random numbers.
        top_k: int32, 0 for all; None if no row has one.
        top_p: float32, 1 for all; None if no row has one.
    """

    temperatures: Tensor
    seeds: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None


class Kernels(Protocol):
    """One implementation of all kernels, without a state.

    Triton's never wait for the device, and may be captured in a graph.
    """

    def latch(self, flags: FlagView, rows: RowState) -> None:
        """Make the rows dead whose flags have fired, acknowledge them, and decide on a next step.

        ``rows.control`` is counted on by one step.

        Source: ``dw_latch.h``.
        """
        ...

    def write_kv(self, key: Tensor, value: Tensor, kv: PagedKV, slot_mapping: Tensor) -> None:
        """Write each token's key and value to its slot.

        Args:
            key, value: [num_tokens, num_kv_heads, head_dim].
            kv: whose keys and values are written.
            slot_mapping: [num_tokens], int64; a token of slot -1 is not written.
        """
        ...

    def decode_attention(
        self,
        query: Tensor,
        kv: PagedKV,
        rows: RowState,
        flags: FlagView,
        *,
        params: AttentionParams,
        progress: Tensor | None = None,
    ) -> Tensor:
        """Attend from each row's one token to its ``seq_lens`` tokens, of which it is the last.

        Args:
            query: [num_rows, num_heads, head_dim].
            kv: keys and values, this step's included.
            rows: ``seq_lens`` and flags; nothing of them is written.
            flags: a row whose flag fires during the kernel is left at the next look.
            params: see there.
            progress: [num_rows, num_kv_heads, num_splits], int32, with a split for every
                ``DECODE_SPLIT`` tokens that ``kv.block_tables`` has room for; how many tiles of
                keys were worked on.

        Returns:
            Like ``query``; zeros for a row that is dead or was left.
        """
        ...

    def prefill_attention(
        self,
        query: Tensor,
        kv: PagedKV,
        rows: RowState,
        flags: FlagView,
        *,
        query_starts: Tensor,
        max_query_len: int,
        params: AttentionParams,
        progress: Tensor | None = None,
    ) -> Tensor:
        """Attend from the last tokens of each row to those before them, and to themselves.

        Args:
            query: [num_tokens, num_heads, head_dim], the rows behind each other.
            kv, rows, flags, params: as for ``decode_attention``.
            query_starts: [num_rows + 1], int32; where each row's tokens begin.
            max_query_len: of the longest row.
            progress: [num_rows, num_heads, num_tiles], int32, with a tile for every
                ``QUERY_TILE`` of ``max_query_len``; how many tiles of keys were worked on.

        Returns:
            Like ``query``; zeros for a tile of queries whose row is dead or was left.
        """
        ...

    def sample(self, logits: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
        """Draw a token a row, by the random number of its seed and position.

        Args:
            logits: [num_rows, vocab_size], any float dtype.
            positions: [num_rows], int64; the position that each token is drawn for.
            sampling: see there.

        Returns:
            [num_rows], int64; -1 where the scores are no finite numbers.
        """
        ...

    def advance(self, tokens: Tensor, state: DecodeState) -> None:
        """Append each live row's token and set it up for its next step, or end it.

        Args:
            tokens: [num_rows], int64, from ``sample``; -1 ends the row without a token.
            state: written in place.
        """
        ...
