"""Prefill in one engine, decode in another: the same tokens, and no block left behind.

Here both are in one thread, and a load is carried out when the test says so. How the cache travels
between processes is not looked at.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from disconnect_watch.engine import Engine, Request, RequestOutput, SamplingParams
from disconnect_watch.engine.outcome import Outcome, Sampled
from disconnect_watch.engine.remote import KVLoad, RemotePrefill, prompt_digest
from disconnect_watch.token import CancelToken, Reason
from tests.support.engine import collect, make_engine, run_to_end, tokens_of

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.5, top_k=40, seed=7)


def prompt_of(num_tokens: int) -> list[int]:
    return [(7 * index + 3) % 250 for index in range(num_tokens)]


class PrefillNode:
    """An engine that keeps the blocks of what it has computed until they are released."""

    def __init__(self, **config: Any) -> None:
        self.engine = make_engine(**config)
        self.engine.on_retain = self._retain
        self.requests: dict[str, Request] = {}

    def _retain(self, request: Request, blocks: tuple[int, ...]) -> object:
        self.requests[request.request_id] = request
        return blocks

    def prefill(
        self, request_id: str, prompt: list[int], params: SamplingParams = GREEDY
    ) -> tuple[Outcome, tuple[RequestOutput, ...]]:
        self.engine.add_request(prompt, params, request_id=request_id, prefill_only=True)
        (outputs,) = run_to_end(self.engine).values()
        outcome = outputs[-1].outcome
        assert outcome is not None
        return outcome, tuple(outputs)

    def remote(
        self, request_id: str, prompt: list[int], params: SamplingParams = GREEDY
    ) -> RemotePrefill:
        """Compute a prompt, and tell another engine how to come by it."""
        outcome, (output,) = self.prefill(request_id, prompt, params)
        blocks = outcome.transfer
        assert isinstance(blocks, tuple)
        logprobs = output.logprobs[0] if output.logprobs else None
        return RemotePrefill(
            Sampled(output.token_ids[0], logprobs),
            self.requests[request_id].seed,
            pull=Copy(self.engine, blocks),
            release=lambda: self.engine.release_blocks(blocks),
        )

    def is_idle(self) -> bool:
        self.engine.settle()
        return is_idle(self.engine)


class Copy:
    """Copies from a prefill node's cache into a decode node's, and releases there."""

    into: Engine

    def __init__(self, engine: Engine, blocks: tuple[int, ...]) -> None:
        self.engine = engine
        self.blocks = blocks

    def __call__(
        self, block_ids: tuple[int, ...], *, first_block: int, cancel: CancelToken
    ) -> None:
        theirs, ours = list(self.blocks[first_block:]), list(block_ids[first_block:])
        cache = self.into.kv_cache.blocks
        cache[:, :, ours] = self.engine.kv_cache.blocks[:, :, theirs]
        self.engine.release_blocks(self.blocks)


class DecodeNode:
    """An engine whose loads wait for ``finish``."""

    def __init__(self, **config: Any) -> None:
        self.engine = make_engine(**config)
        self.engine.on_load = self._begin
        self.loads: list[KVLoad] = []
        self.is_held = False

    def _begin(self, load: KVLoad) -> None:
        self.loads.append(load)
        if not self.is_held:
            self.finish()

    def finish(self, error: Exception | None = None) -> None:
        """Carry out the load that has waited longest, or let it fail."""
        load = self.loads.pop(0)
        if error is None and not load.cancel.cancelled:
            assert isinstance(load.pull, Copy)
            load.pull.into = self.engine
            load.pull(load.block_ids, first_block=load.first_block, cancel=load.cancel)
        self.engine.finish_load(load, error)

    def decode(
        self, request_id: str, prompt: list[int], remote: RemotePrefill, params: SamplingParams
    ) -> list[int]:
        self.engine.add_request(prompt, params, request_id=request_id, remote=remote)
        return tokens_of(run_to_end(self.engine)[request_id])


def is_idle(engine: Engine) -> bool:
    stats = engine.stats()
    engine.check_integrity()
    return (
        stats.num_blocks_available == stats.num_blocks
        and stats.num_blocks_held == 0
        and engine.block_ledger == {}
    )


def alone(prompt: list[int], params: SamplingParams) -> list[int]:
    engine = make_engine()
    engine.add_request(prompt, params, request_id="alone")
    return tokens_of(run_to_end(engine)["alone"])


@pytest.fixture
def nodes() -> Iterator[tuple[PrefillNode, DecodeNode]]:
    prefill, decode = PrefillNode(), DecodeNode()
    yield prefill, decode
    assert prefill.is_idle()
    assert is_idle(decode.engine)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 33])
def test_two_engines_give_the_tokens_of_one(params: SamplingParams, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens)
    prefill, decode = PrefillNode(), DecodeNode()
    remote = prefill.remote("a", prompt, params)
    assert decode.decode("a", prompt, remote, params) == alone(prompt, params)
    assert decode.engine.stats().num_loaded_tokens == num_tokens
    assert prefill.is_idle()
    assert is_idle(decode.engine)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_chunks_on_one_side_and_a_prefix_on_the_other_change_no_token(
    params: SamplingParams,
) -> None:
    prompt = prompt_of(50)
    prefill = PrefillNode(max_num_batched_tokens=8, max_num_seqs=8)
    decode = DecodeNode()
    decode.engine.add_request(prompt[:22], GREEDY, request_id="before")
    run_to_end(decode.engine)
    remote = prefill.remote("a", prompt, params)
    assert decode.decode("a", prompt, remote, params) == alone(prompt, params)
    # Five full blocks were there.
    assert decode.engine.stats().num_loaded_tokens == 50 - 20
    assert prefill.is_idle()


def test_many_requests_over_several_nodes_keep_their_tokens() -> None:
    prefills = [PrefillNode(), PrefillNode(enable_prefix_caching=False)]
    decodes = [DecodeNode(), DecodeNode(enable_prefix_caching=False)]
    texts = {f"r{index}": prompt_of(5 + 3 * index) for index in range(6)}
    for index, (name, prompt) in enumerate(texts.items()):
        remote = prefills[index % 2].remote(name, prompt)
        decodes[index // 3].engine.add_request(prompt, GREEDY, request_id=name, remote=remote)
    told = run_to_end(decodes[0].engine) | run_to_end(decodes[1].engine)
    assert {name: tokens_of(outputs) for name, outputs in told.items()} == {
        name: alone(prompt, GREEDY) for name, prompt in texts.items()
    }
    assert all(node.is_idle() for node in prefills)
    assert all(is_idle(node.engine) for node in decodes)


def test_what_was_loaded_is_found_by_who_begins_alike(
    nodes: tuple[PrefillNode, DecodeNode],
) -> None:
    prefill, decode = nodes
    prompt = prompt_of(16)
    decode.decode("a", prompt, prefill.remote("a", prompt), GREEDY)
    decode.engine.add_request(prompt, GREEDY, request_id="b")
    outcome = run_to_end(decode.engine)["b"][-1].outcome
    assert outcome is not None
    assert outcome.num_cached_tokens == 12  # all full blocks, but the one of the last token


def test_a_finished_prefill_keeps_its_blocks_out_of_the_pool_until_they_are_released() -> None:
    prefill = PrefillNode(num_blocks=32, enable_prefix_caching=False)
    outcome, (output,) = prefill.prefill("a", prompt_of(9))
    engine = prefill.engine
    assert outcome.kind == "finished"
    assert outcome.finish_reason is None
    assert len(output.token_ids) == 1
    blocks = outcome.transfer
    assert isinstance(blocks, tuple)
    stats = engine.stats()
    assert (stats.num_blocks_retained, stats.num_blocks_used, stats.num_blocks_free) == (3, 0, 29)
    assert {block for block, entry in engine.block_ledger.items() if not entry.owners} == {*blocks}
    assert [engine.view().blocks[block] for block in blocks] == [2, 2, 2]
    engine.check_integrity()
    engine.release_blocks(blocks)
    engine.step()
    assert is_idle(engine)


def test_a_block_that_two_transfers_have_is_free_after_the_last() -> None:
    prefill = PrefillNode(num_blocks=32)
    prompt = prompt_of(9)
    kept = [prefill.prefill(name, prompt)[0].transfer for name in ("a", "b")]
    assert prefill.engine.stats().num_blocks_retained == 4  # two full ones are shared
    for index, blocks in enumerate(kept):
        assert isinstance(blocks, tuple)
        assert not prefill.is_idle()
        prefill.engine.release_blocks(blocks)
        prefill.engine.settle()
        assert prefill.engine.stats().num_blocks_retained == (3, 0)[index]
    assert prefill.is_idle()


def test_an_answer_of_one_token_leaves_nothing_to_hand_over() -> None:
    prefill = PrefillNode()
    outcome, outputs = prefill.prefill("a", prompt_of(9), SamplingParams(max_tokens=1))
    assert (outcome.finish_reason, outcome.transfer) == ("length", None)
    assert prefill.is_idle()
    # Whoever decodes is told of the token all the same, and ends there.
    decode = DecodeNode()
    remote = RemotePrefill(Sampled(outputs[0].token_ids[0]), 0)
    params = SamplingParams(max_tokens=1)
    assert decode.decode("a", prompt_of(9), remote, params) == [outputs[0].token_ids[0]]
    assert decode.engine.stats().num_steps <= 1


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_prefill_that_is_cancelled_on_its_way_retains_nothing(layer: int) -> None:
    prefill = PrefillNode()
    cancel = CancelToken()

    def leave(_: int, index: int) -> None:
        if index == layer:
            cancel.cancel(Reason.FIN)

    prefill.engine.layer_hook = leave
    prefill.engine.add_request(
        prompt_of(9), GREEDY, request_id="a", prefill_only=True, cancel=cancel
    )
    (outputs,) = run_to_end(prefill.engine).values()
    assert outputs[-1].outcome is not None
    assert outputs[-1].outcome.kind == "cancelled"
    assert outputs[-1].outcome.transfer is None
    assert not prefill.requests
    assert prefill.is_idle()


def test_where_nothing_can_be_retained_the_prompt_is_computed_again() -> None:
    prefill = PrefillNode()

    def refuse(*_: object) -> object:
        raise MemoryError("full")

    prefill.engine.on_retain = refuse
    outcome, (output,) = prefill.prefill("a", prompt_of(9))
    assert (outcome.kind, outcome.finish_reason, outcome.transfer) == ("finished", None, None)
    assert prefill.is_idle()
    decode = DecodeNode()
    remote = RemotePrefill(Sampled(output.token_ids[0]), 0)
    assert decode.decode("a", prompt_of(9), remote, GREEDY) == alone(prompt_of(9), GREEDY)


def test_a_load_that_fails_is_computed_here(nodes: tuple[PrefillNode, DecodeNode]) -> None:
    prefill, decode = nodes
    decode.is_held = True
    remote = prefill.remote("a", prompt_of(33), SEEDED)
    decode.engine.add_request(prompt_of(33), SEEDED, request_id="a", remote=remote)
    (first,) = decode.engine.step()
    decode.finish(ConnectionError("the peer is gone"))
    remote.release()
    tokens = [*first.token_ids, *tokens_of(run_to_end(decode.engine)["a"])]
    assert tokens == alone(prompt_of(33), SEEDED)
    assert decode.engine.stats().num_failed_loads == 1
    assert decode.engine.stats().num_loaded_tokens == 0


def test_the_first_token_waits_for_no_load(nodes: tuple[PrefillNode, DecodeNode]) -> None:
    prefill, decode = nodes
    decode.is_held = True
    remote = prefill.remote("a", prompt_of(9))
    decode.engine.add_request(prompt_of(9), GREEDY, request_id="a", remote=remote)
    assert [output.token_ids for output in decode.engine.take_outputs()] == [
        (remote.first.token_id,)
    ]
    decode.engine.step()
    assert decode.engine.is_stalled
    decode.finish()
    run_to_end(decode.engine)


def test_others_go_on_while_one_is_loaded(nodes: tuple[PrefillNode, DecodeNode]) -> None:
    prefill, decode = nodes
    decode.is_held = True
    remote = prefill.remote("a", prompt_of(9))
    decode.engine.add_request(prompt_of(9), GREEDY, request_id="a", remote=remote)
    decode.engine.add_request(prompt_of(7), GREEDY, request_id="b")
    outputs: list[RequestOutput] = []
    while not any(o.request_id == "b" and o.outcome for o in outputs):
        outputs += decode.engine.step()
    assert sum(len(o.token_ids) for o in outputs if o.request_id == "a") == 1
    decode.finish()
    run_to_end(decode.engine)


def test_one_that_leaves_in_its_load_gives_its_blocks_back_behind_the_load(
    nodes: tuple[PrefillNode, DecodeNode],
) -> None:
    prefill, decode = nodes
    decode.is_held = True
    remote = prefill.remote("a", prompt_of(9))
    cancel = CancelToken()
    engine = decode.engine
    engine.add_request(prompt_of(9), GREEDY, request_id="a", remote=remote, cancel=cancel)
    engine.step()
    cancel.cancel(Reason.FIN)
    (told,) = engine.step()
    assert told.outcome is not None
    assert told.outcome.kind == "cancelled"
    # The copy may still write, so nobody else may have them yet.
    assert engine.stats().num_blocks_retained == 3
    assert decode.loads[0].cancel.cancelled
    engine.check_integrity()
    decode.finish()
    engine.settle()
    assert is_idle(engine)
    remote.release()


def test_one_that_is_preempted_in_its_load_computes_its_prompt(
    nodes: tuple[PrefillNode, DecodeNode],
) -> None:
    prefill, _ = nodes
    decode = DecodeNode(num_blocks=16, max_model_len=64)
    decode.is_held = True
    engine = decode.engine
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    engine.add_request(prompt_of(23)[::-1], params, request_id="b")
    remote = prefill.remote("a", prompt_of(33))
    engine.add_request(prompt_of(33), GREEDY, request_id="a", remote=remote)
    outputs: dict[str, list[RequestOutput]] = {}
    while not engine.stats().num_preemptions:
        collect(engine.step(), outputs)
    (load,) = decode.loads
    assert load.cancel.cancelled
    # The blocks come back when the load has stopped: nobody else has to go for them.
    assert not engine.is_stalled or not engine.step()
    assert engine.stats().num_running == 1
    decode.finish()
    collect((o for told in run_to_end(engine).values() for o in told), outputs)
    assert tokens_of(outputs["a"]) == alone(prompt_of(33), GREEDY)
    assert tokens_of(outputs["b"]) == alone(prompt_of(23)[::-1], params)
    assert engine.stats().num_preemptions == 1
    assert is_idle(engine)
    remote.release()


class Counted:
    """A ``release`` that counts."""

    def __init__(self, release: Callable[[], None]) -> None:
        self.num_calls = 0
        self._release = release

    def __call__(self) -> None:
        self.num_calls += 1
        self._release()


@pytest.mark.parametrize("way", ["cached", "waiting", "first token", "another prompt"])
def test_what_is_not_pulled_is_released_once(
    nodes: tuple[PrefillNode, DecodeNode], way: str
) -> None:
    prefill, decode = nodes
    prompt = prompt_of(16)
    params = GREEDY
    if way == "cached":
        decode.engine.add_request(prompt, GREEDY, request_id="before")
        run_to_end(decode.engine)
    remote = prefill.remote("a", prompt)
    release = Counted(remote.release)
    remote = RemotePrefill(
        remote.first, remote.seed, prompt_digest(prompt), pull=remote.pull, release=release
    )
    if way == "another prompt":  # of the same length
        prompt = prompt_of(17)[1:]
    if way == "first token":
        params = SamplingParams(max_tokens=12, stop_token_ids=(remote.first.token_id,))
    cancel = CancelToken()
    if way == "waiting":
        cancel.cancel(Reason.FIN)
    decode.engine.add_request(prompt, params, request_id="a", remote=remote, cancel=cancel)
    outputs = run_to_end(decode.engine)["a"]
    assert release.num_calls == 1
    assert decode.engine.stats().num_loaded_tokens == 0
    expected: dict[str, list[int]] = {"waiting": []} | dict.fromkeys(
        ("cached", "another prompt"), alone(prompt, GREEDY)
    )
    assert tokens_of(outputs) == expected.get(way, [remote.first.token_id])


def test_held_blocks_keep_nobody_from_being_preempted() -> None:
    """Else a decode would wait for a lease, though one behind it has what it needs."""
    prefill = PrefillNode(num_blocks=16, max_model_len=64, enable_prefix_caching=False)
    outcome, _ = prefill.prefill("kept", prompt_of(15))
    engine = prefill.engine
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    for name in ("a", "b"):
        engine.add_request(prompt_of(12), params, request_id=name)
    outputs = run_to_end(engine)
    assert {name: len(tokens_of(told)) for name, told in outputs.items()} == {"a": 16, "b": 16}
    assert engine.stats().num_preemptions
    blocks = outcome.transfer
    assert isinstance(blocks, tuple)
    engine.release_blocks(blocks)
    assert prefill.is_idle()


def test_several_answers_are_not_parted() -> None:
    with pytest.raises(ValueError, match="parted"):
        make_engine().make_request([1], SamplingParams(n=2), request_id="a", prefill_only=True)


def test_an_engine_that_nobody_loads_for_computes_itself() -> None:
    prefill = PrefillNode()
    remote = prefill.remote("a", prompt_of(9))
    engine = make_engine()
    engine.add_request(prompt_of(9), GREEDY, request_id="a", remote=remote)
    assert tokens_of(run_to_end(engine)["a"]) == alone(prompt_of(9), GREEDY)
    assert engine.stats().num_failed_loads == 1
