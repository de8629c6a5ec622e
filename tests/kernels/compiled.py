"""Compiles every kernel for a device that need not be there, and reads the result.

    python -m tests.kernels.compiled 90      facts of each kernel on sm_90, as JSON

A process of its own, since Triton either compiles or interprets in one.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["ARCHITECTURES", "Facts", "assemble", "compile_all"]

#: Ampere, Hopper, Blackwell.
ARCHITECTURES = (80, 90, 100)

#: What each argument that is no constant points to, or is.
TYPES = {
    "key": "*bf16",
    "value": "*bf16",
    "query": "*bf16",
    "keys": "*bf16",
    "values": "*bf16",
    "scores": "*fp32",
    "parts": "*fp32",
    "masses": "*fp32",
    "temperatures": "*fp32",
    "seeds": "*i64",
    "positions": "*i64",
    "tokens": "*i64",
    "token_ids": "*i64",
    "stop_token_ids": "*i64",
    "slot_mapping": "*i64",
    "scale": "fp32",
    "softcap": "fp32",
    "max_blocks": "i32",
    "max_drawn": "i32",
    "max_stops": "i32",
    "num_kv_heads": "i32",
    "num_rows": "i32",
    "num_splits": "i32",
    "vocab_size": "i32",
    "width": "i32",
    "window": "i32",
}
#: Where they are not bfloat16: tokens, and splits that are to be merged.
OUTPUTS = {"sample": "*i64", "decode_attention": "*fp32"}
ATTENTION = {
    "HEAD_DIM": 128,
    "GROUP": 4,
    "BLOCK_SIZE": 16,
    "BLOCK_D": 128,
    "HAS_WINDOW": False,
    "HAS_SOFTCAP": False,
    "HAS_PROGRESS": False,
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What the PTX of a kernel has, and what became of it in the assembler."""

    num_volatile_loads: int
    num_stores_through: int
    num_atomics: int
    num_async_copies: int
    num_matrix_products: int
    num_registers: int
    spill_bytes: int

    @classmethod
    def of(cls, ptx: str, architecture: int) -> "Facts":
        def count(pattern: str) -> int:
            return len(re.findall(rf"\b{pattern}", ptx))

        report = assemble(ptx, architecture)
        spills = re.findall(r"(\d+) bytes spill", report)
        registers = re.search(r"Used (\d+) registers", report)
        assert registers, report
        return cls(
            num_volatile_loads=count(r"ld\.volatile"),
            num_stores_through=count(r"st\.global\.wt"),
            num_atomics=count(r"(?:atom|red)\."),
            num_async_copies=count(r"cp\.async\.c[ag]"),
            num_matrix_products=count(r"(?:wgmma\.mma|tcgen05\.mma|mma\.sync)"),
            num_registers=int(registers[1]),
            spill_bytes=max(map(int, spills)),
        )


def assemble(ptx: str, architecture: int) -> str:
    """Run the assembler that came with Triton; returns what it says of registers and spills.

    Raises:
        subprocess.CalledProcessError: it refused, with the reason in ``stderr``.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    named = re.search(r"^\.target sm_(\w+)", ptx, re.MULTILINE)
    assert named, "no target in the PTX"
    # A kernel is for one architecture and its features alone; the short one is for any later.
    name = named[1] if named[1].startswith(str(architecture)) else str(architecture)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        done = subprocess.run(
            [
                get_ptxas(architecture).path,
                "-v",
                f"--gpu-name=sm_{name}",
                source,
                "-o",
                "/dev/null",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
    return done.stderr


def compile_all(architecture: int) -> dict[str, Facts]:
    """Return the facts by kernel; attention with and without its looks at the flag."""
    from disconnect_watch.kernels import jit
    from disconnect_watch.kernels.base import DECODE_SPLIT, KEY_TILE, MIN_TEMPERATURE, QUERY_TILE
    from disconnect_watch.kernels.triton_kernels import (
        DECODE_OPTIONS,
        LATCH_OPTIONS,
        PREFILL_OPTIONS,
        SMALL_OPTIONS,
        VOCAB_TILE,
    )

    rows = {"BLOCK": 64}
    plans: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        "latch": (jit.latch, rows, LATCH_OPTIONS),
        "advance": (jit.advance, rows | {"BLOCK_SIZE": 16}, SMALL_OPTIONS),
        "write_kv": (jit.write_kv, {"BLOCK": 1024}, SMALL_OPTIONS),
        "sample": (
            jit.sample,
            {"BLOCK": VOCAB_TILE, "MIN_TEMPERATURE": MIN_TEMPERATURE},
            SMALL_OPTIONS,
        ),
    }
    shared = ("HEAD_DIM", "BLOCK_D", "HAS_WINDOW")
    plans["merge"] = (
        jit.merge_splits,
        {name: ATTENTION[name] for name in shared} | {"TILE": KEY_TILE, "SPLIT": DECODE_SPLIT},
        SMALL_OPTIONS,
    )
    splits = {"SPLIT": DECODE_SPLIT, "HAS_SPLITS": True}
    for name, kernel, own, options in (
        ("decode", jit.decode_attention, splits | {"BLOCK_M": 16}, DECODE_OPTIONS),
        ("prefill", jit.prefill_attention, {"BLOCK_M": QUERY_TILE}, PREFILL_OPTIONS),
    ):
        for suffix, poll_every in (("", 16), (" unpolled", 0)):
            constants = {
                "TILE": KEY_TILE,
                "POLL_EVERY": poll_every,
                "NUM_THREADS": 32 * options["num_warps"],
            }
            plans[name + suffix] = (kernel, ATTENTION | own | constants, options)
    return {name: _compile(*plan, architecture) for name, plan in plans.items()}


def _compile(
    kernel: Any, constants: dict[str, Any], options: dict[str, Any], architecture: int
) -> Facts:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        type_name = "constexpr" if name in constants else TYPES.get(name, "*i32")
        if name == "output":
            type_name = OUTPUTS.get(kernel.__name__, "*bf16")
        signature[name] = type_name
        if type_name.startswith("*"):
            # As torch allocates them; without it nothing is copied asynchronously.
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options=options)
    return Facts.of(compiled.asm["ptx"], architecture)


if __name__ == "__main__":
    facts = compile_all(int(sys.argv[1]))
    print(json.dumps({name: asdict(each) for name, each in facts.items()}))
