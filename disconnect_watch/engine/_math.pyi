from typing import Self, final

INSTRUCTIONS: str
LANES: int

def linear_size(outputs: int, inputs: int) -> int: ...
def linear_pack(weight: int, outputs: int, inputs: int, packed: int) -> None: ...
def linear(
    x: int,
    rows: int,
    inputs: int,
    packed: int,
    outputs: int,
    bias: int,
    residual: int,
    out: int,
) -> None: ...
def rms_norm(
    x: int,
    stride: int,
    rows: int,
    heads: int,
    size: int,
    weight: int,
    epsilon: float,
    residual: int,
    out: int,
) -> None: ...
def gate(x: int, rows: int, size: int, is_silu: bool, out: int) -> None: ...
def rotate(
    heads: int,
    stride: int,
    rows: int,
    num_heads: int,
    head_dim: int,
    rotary_dim: int,
    cos: int,
    sin: int,
    positions: int,
) -> None: ...
def scatter(source: int, stride: int, rows: int, size: int, slots: int, to: int) -> None: ...
def argmax(x: int, rows: int, size: int, out: int) -> None: ...

@final
class Attention:
    def __new__(
        cls,
        *,
        keys: int,
        values: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        scale: float,
        softcap: float,
        window: int,
    ) -> Self: ...
    def attend(
        self,
        query: int,
        query_stride: int,
        rows: int,
        tables: int,
        table_stride: int,
        lengths: int,
        scratch: int,
        out: int,
    ) -> None: ...
