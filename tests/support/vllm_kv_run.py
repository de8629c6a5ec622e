"""vLLM's engine in this process as a prefill node, and a decode node of ours. Prints JSON.

Run by a Python that has vLLM, with the folder of a checkpoint.
"""

import json
import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_PLUGINS="",
)

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from disconnect_watch.disagg import (
    Connector,
    KVBlocks,
    KVMemory,
    RetainedStore,
    Ticket,
    UnknownTransferError,
)
from disconnect_watch.disagg.tcp import TcpPeer

BLOCK = 32
PROMPT = list(range(1, 201))
NUM_BLOCKS = -(-len(PROMPT) // BLOCK)
#: Nothing lapses unless the test turns the store's clock.
LEASE_S = 3600.0
PATIENCE_STEPS = 100_000


class Prefill:
    """The engine, and what it answered."""

    def __init__(self, model: str, key_file: Path) -> None:
        extra = {"listen": "127.0.0.1:0", "key_file": str(key_file), "lease": LEASE_S}
        self.llm = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            max_num_seqs=8,
            max_model_len=1024,
            block_size=BLOCK,
            enable_prefix_caching=False,
            kv_transfer_config=KVTransferConfig(
                kv_connector="RetainingConnector",
                kv_connector_module_path="disconnect_watch.backends.hooks.vllm_kv",
                kv_role="kv_both",
                kv_connector_extra_config=extra,
            ),
        )
        self.engine: Any = self.llm.llm_engine
        self.core: Any = self.engine.engine_core.engine_core
        self.scheduler: Any = self.core.scheduler
        self.store: RetainedStore = self.scheduler.connector.store
        self.answers: dict[str, Any] = {}
        self.num_computed: dict[str, int] = {}
        self._schedule = self.scheduler.schedule
        self.scheduler.schedule = self._count

    def _count(self, *args: Any) -> Any:
        """Note how many tokens each request is computed of."""
        planned = self._schedule(*args)
        for name, number in planned.num_scheduled_tokens.items():
            # vLLM's own name of it is longer.
            name = name.rpartition("-")[0]
            self.num_computed[name] = self.num_computed.get(name, 0) + number
        return planned

    @property
    def num_held(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def add(self, name: str, *, is_parted: bool = True) -> None:
        params = {"do_remote_decode": True, "owner": "alice", "request_id": name}
        sampling = SamplingParams(
            max_tokens=1,
            temperature=0,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if is_parted else None,
        )
        self.engine.add_request(name, {"prompt_token_ids": PROMPT}, sampling)

    def step(self) -> None:
        # Below the client, which takes no step when nobody waits for an answer.
        for output in self.engine.step() if self.engine.has_unfinished_requests() else ():
            self.answers[output.request_id] = output
        if not self.engine.has_unfinished_requests():
            self.core.step_fn()

    def finish(self, name: str) -> Ticket | None:
        self.add(name)
        while name not in self.answers or not self.answers[name].finished:
            self.step()
        params = self.answers[name].kv_transfer_params
        return Ticket(**params["ticket"]) if params else None

    def run_until_free(self) -> int:
        """Step as an idle engine does, until nothing is held; returns what is held at the end."""
        for _ in range(PATIENCE_STEPS):
            if not self.num_held:
                break
            self.step()
        assert not self.scheduler.requests
        return self.num_held


def decode_by(node: Prefill) -> dict[str, Any]:
    """The node decodes what it has prefilled, by the ticket; and is left by who waits for that."""

    def ask(name: str, params: dict[str, Any] | None, num_tokens: int = 12) -> None:
        sampling = SamplingParams(
            max_tokens=num_tokens,
            temperature=0,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        node.engine.add_request(name, {"prompt_token_ids": PROMPT}, sampling)

    def tokens(name: str) -> list[int]:
        while name not in node.answers or not node.answers[name].finished:
            node.step()
        return list(node.answers[name].outputs[0].token_ids)

    ask("alone", None)
    expected = tokens("alone")
    node.finish("first")
    ask("second", node.answers["first"].kv_transfer_params)
    is_same = tokens("second") == expected
    in_band = node.store.stats().num_released["in_band"]  # type: ignore[index]
    left = node.run_until_free()

    # Aborted in the queue, before its blocks were asked for; then with the load under way.
    for num_steps in (0, 1):
        name = f"prefilled-{num_steps}"
        node.finish(name)
        ask(f"leaves-{num_steps}", node.answers[name].kv_transfer_params)
        for _ in range(num_steps):
            node.step()
        node.engine.abort_request([f"leaves-{num_steps}"])
        left += node.run_until_free()
    return {"is_same": is_same, "computed": node.num_computed, "in_band": in_band, "left": left}


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        key = secrets.token_bytes(32).hex().encode()
        key_file = Path(directory) / "key"
        key_file.write_bytes(key)
        node = Prefill(sys.argv[1], key_file)
        caches = list(node.core.model_executor.driver_worker.worker.model_runner.kv_caches)
        found: dict[str, Any] = {"shape": list(caches[0].shape)}
        server_memory = node.scheduler.connector._retained._connector.memory
        into = KVMemory.empty(server_memory.layout, NUM_BLOCKS)
        with Connector(
            RetainedStore(0, 1), into, dial=lambda address: TcpPeer(address, key=key)
        ) as decode:
            ticket = node.finish("pulled")
            assert ticket is not None
            held = node.num_held
            [view] = node.store.view()
            blocks = list(node.store._ledger.find(view.id).blocks)  # type: ignore[union-attr]
            # The engine goes on with steps, and keeps them.
            for _ in range(10):
                node.step()
            decode.pull(ticket, KVBlocks(into, range(NUM_BLOCKS)))
            is_equal = all(
                into.block(place)[layer].tobytes() == cache[block].numpy().tobytes()
                for place, block in enumerate(blocks)
                for layer, cache in enumerate(caches)
            )
            found["pulled"] = {"held": held, "is_equal": is_equal, "left": node.run_until_free()}

            ticket = node.finish("released")
            assert ticket is not None
            outcomes = [decode.release(ticket).outcome for _ in range(2)]
            found["released"] = {"outcomes": outcomes, "left": node.run_until_free()}
            try:
                decode.pull(ticket, KVBlocks(into, range(NUM_BLOCKS)))
            except UnknownTransferError:
                found["released"]["pull"] = "unknown"

            # What the abort API of a proxy says, by the id that it gave.
            decode.tombstone(ticket.address, "early", "alice")
            node.finish("early")
            found["early"] = {"left": node.run_until_free()}

            found["decode"] = decode_by(node)

            node.finish("lapses")
            node.store.reap(node.store._clock() + 2 * node.store.lease_ns)
            found["lapses"] = {"left": node.run_until_free()}

            node.add("aborted")
            node.engine.abort_request(["aborted"])
            node.add("plain", is_parted=False)
            while "plain" not in node.answers or not node.answers["plain"].finished:
                node.step()
            found["others"] = {
                "left": node.run_until_free(),
                "params": node.answers["plain"].kv_transfer_params,
            }
        found["released_by"] = dict(node.store.stats().num_released)
        node.scheduler.connector.shutdown()
        print(json.dumps(found))


if __name__ == "__main__":
    main()
