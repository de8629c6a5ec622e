"""Runs in the venv of ``.ci/llama-cpp``: requests to a small random model, one of which leaves.

    python -m tests.support.llama_cpp_run DIRECTORY

Prints as JSON what ``tests/integration/test_hooks_llama_cpp.py`` holds it to.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from llama_cpp import Llama

from disconnect_watch import CancelToken, ClientDisconnected
from disconnect_watch.backends.hooks.llama_cpp import cancel_with
from tests.support.documents import blocks_of

WIDTH, INNER, NUM_LAYERS, NUM_BYTES = 64, 128, 4, 256
PROMPT = [5 + index % 200 for index in range(300)]


def write_model(path: Path) -> None:
    """A Llama with random weights, whose tokens are bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_rope_dimension_count(WIDTH // 4)
    writer.add_layer_norm_rms_eps(1e-6)
    tokens = ["<unk>", "<s>", "</s>", " ", *(f"<0x{byte:02X}>" for byte in range(NUM_BYTES))]
    kinds = gguf.TokenType
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(
        [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, kinds.NORMAL, *[kinds.BYTE] * NUM_BYTES]
    )
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(1)
    shapes = {
        "token_embd": (len(tokens), WIDTH),
        "output": (len(tokens), WIDTH),
        "output_norm": (WIDTH,),
    }
    for layer in range(NUM_LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{layer}.{name}"] = (WIDTH,)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{layer}.{name}"] = (WIDTH, WIDTH)
        for name in ("ffn_gate", "ffn_up"):
            shapes[f"blk.{layer}.{name}"] = (INNER, WIDTH)
        shapes[f"blk.{layer}.ffn_down"] = (WIDTH, INNER)
    for name, shape in shapes.items():
        weights = random.standard_normal(shape, dtype=np.float32) * np.float32(0.3)
        writer.add_tensor(f"{name}.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Looked(CancelToken):
    """Counts the looks at it, and fires at one of them."""

    num_looks = 0
    fires_at = 0

    @property
    def cancelled(self) -> bool:
        self.num_looks += 1
        if self.num_looks == self.fires_at:
            self.cancel()
        return bool(CancelToken.cancelled.__get__(self))


def looked(fires_at: int) -> Looked:
    token = Looked()
    token.fires_at = fires_at
    return token


def generate(llama: Llama, token: CancelToken | None = None) -> list[int] | str:
    """Five tokens, or the reason for which there are none."""

    def run() -> list[int]:
        return [token for token, _ in zip(llama.generate(PROMPT, temp=0.0), range(5), strict=False)]

    llama.reset()
    if token is None:
        return run()
    try:
        with cancel_with(llama, token):
            return run()
    except ClientDisconnected as left:
        return left.reason.value


def error_of(llama: Llama, message: str) -> str:
    """What leaves the block when the client has left and something else fails."""
    token = CancelToken()
    try:
        with cancel_with(llama, token):
            token.cancel()
            raise RuntimeError(message)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(directory: Path) -> dict[str, Any]:
    path = directory / "random.gguf"
    write_model(path)
    llama = Llama(str(path), n_ctx=1024, n_threads=1, verbose=False)
    stays, leaves, gone = looked(0), looked(20), CancelToken()
    gone.cancel()
    found = {
        "plain": generate(llama),
        "stays": generate(llama, stays),
        "looks_of_who_stays": stays.num_looks,
        "leaves": generate(llama, leaves),
        "tokens_of_who_leaves": llama.n_tokens,
        "looks_of_who_leaves": leaves.num_looks,
        "gone_before": generate(llama, gone),
        "after": generate(llama),
        "other_error": error_of(llama, "llama_decode returned 1"),
    }
    names: dict[str, Any] = {"llama": llama, "token": CancelToken(), "prompt": "a"}
    (block,) = [block for block in blocks_of("hooks.md") if "hooks.llama_cpp" in block]
    exec(block, names)
    found["answer_of_the_page"] = names["answer"]["object"]
    llama.close()
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
