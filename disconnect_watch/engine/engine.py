"""The engine: a model from a directory, its cache, and the step loop over both."""

import logging
import secrets
from collections.abc import Sequence
from operator import index
from pathlib import Path
from typing import Self

import torch

from disconnect_watch.engine.arithmetic import choose, dtype_of
from disconnect_watch.engine.checkpoint import load_model
from disconnect_watch.engine.config import EngineConfig
from disconnect_watch.engine.core import EngineCore
from disconnect_watch.engine.errors import PromptTooLongError
from disconnect_watch.engine.kv_cache import Allocate, KVCache
from disconnect_watch.engine.model import LlamaModel
from disconnect_watch.engine.model_config import ModelConfig
from disconnect_watch.engine.params import SamplingParams
from disconnect_watch.engine.places import DEFAULT_MODEL
from disconnect_watch.engine.remote import RemotePrefill, prompt_digest
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.rotary import Rotary
from disconnect_watch.engine.runner import ModelRunner
from disconnect_watch.engine.tokenizer import Tokenizer
from disconnect_watch.errors import shown
from disconnect_watch.token import CancelToken

__all__ = ["DEFAULT_MODEL", "SMALL_MODEL", "Engine"]

logger = logging.getLogger(__name__)

#: Parameters below which one thread is the default: a second gains a factor of 1.4 on an idle
#: machine, but on a busy one each operation waits for the slower of the two, which has been seen
#: to cost a factor of ten.
SMALL_MODEL = 50_000_000

#: Longest time that a request may be given, in seconds: a year.
MAX_TIME_LIMIT = 365 * 86400


class Engine(EngineCore):
    """A model that serves many requests at once, one ``step`` at a time.

    Threads: see ``EngineCore``. ``EngineThread`` runs an engine for event loops.
    """

    _runner: ModelRunner

    def __init__(
        self,
        model: LlamaModel,
        tokenizer: Tokenizer,
        *,
        config: EngineConfig | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        config = config or EngineConfig()
        self.model_config = model.config
        self.tokenizer = tokenizer
        num_threads = config.num_threads
        if num_threads is None and sum(p.numel() for p in model.parameters()) < SMALL_MODEL:
            num_threads = 1
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        dtype = model.embed_tokens.weight.dtype
        num_blocks, max_model_len = _size_cache(config, model.config, dtype)
        arithmetic = choose(config, model)
        device = arithmetic.device
        decoder = arithmetic.make_decoder(
            model.to(device),
            KVCache(
                model.config,
                num_blocks=num_blocks,
                block_size=config.block_size,
                dtype=dtype,
                device=device,
                allocate=allocate,
            ),
            Rotary(model.config, length=max_model_len, dtype=dtype, device=device),
            config=config,
            max_model_len=max_model_len,
        )
        super().__init__(
            ModelRunner(decoder),
            tokenizer,
            config=config,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            eos_token_ids=model.config.eos_token_ids,
        )
        self.arithmetic = arithmetic.name
        self.missing = arithmetic.missing
        mode = ", batch-invariant" if config.batch_invariant else ""
        logger.info("the engine computes by %s%s", self.arithmetic, mode)
        for lack in self.missing:
            logger.info("%s", lack)

    @property
    def kv_cache(self) -> KVCache:
        """Where keys and values lie."""
        return self._runner.decoder.cache

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path = DEFAULT_MODEL,
        config: EngineConfig | None = None,
        *,
        allocate: Allocate | None = None,
    ) -> Self:
        """Load a Hugging Face directory: config.json, safetensors files, tokenizer.json.

        Args:
            allocate: see ``KVCache``; None takes memory of the process's own.

        Raises:
            CheckpointError: something is missing, damaged or not supported.
            ValueError: the limits of ``config`` do not fit each other or the model.
        """
        config = config or EngineConfig()
        model_config = ModelConfig.from_pretrained(path)
        tokenizer = Tokenizer.from_pretrained(path)
        model = load_model(path, model_config, dtype=dtype_of(config))
        return cls(model, tokenizer, config=config, allocate=allocate)

    def make_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str,
        cancel: CancelToken | None = None,
        priority: int = 0,
        time_limit: float | None = None,
        prefill_only: bool = False,
        remote: RemotePrefill | None = None,
    ) -> Request:
        """Tokenize and check a request, without giving it a place in the queue yet.

        Args:
            prompt: text, or token ids in [0, vocab_size).
            params: of sampling; None takes the defaults.
            request_id: by which outputs and ``abort`` name it; unique among live requests.
            cancel: fires when nobody wants the answer any more; may be shared by several.
            priority: the lowest number runs first, at the cost of greater ones if need be.
            time_limit: seconds from now after which the request is cancelled with reason DEADLINE,
                whatever it is doing then; None for no limit.
            prefill_only: compute the prompt and the first token, and leave the rest, with the
                prompt's blocks, to another engine; see ``on_retain`` and ``Outcome.transfer``.
            remote: what another engine has computed of it so; not used if its digest is that of
                another prompt.

        Raises:
            ValueError: the prompt is empty, no unicode, or has a token id that is out of range or
                no integer; priority or time_limit is none; more answers are wanted than the one
                that can be parted between two engines; or as ``check_fits``.
            PromptTooLongError: it leaves no room to generate.

        Threads: any.
        """
        params = params or SamplingParams()
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority is {shown(priority)}, it must be an integer")
        if not -(2**63) <= priority < 2**63:
            raise ValueError(f"priority is {shown(priority)}, it must be in [-2**63, 2**63)")
        deadline_ns = None
        if time_limit is not None:
            if not 0 <= time_limit <= MAX_TIME_LIMIT:
                raise ValueError(
                    f"time_limit is {time_limit}, it must be in [0, {MAX_TIME_LIMIT}] seconds"
                )
            deadline_ns = self.clock() + int(time_limit * 1e9)
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _integers(prompt)
        if not token_ids:
            raise ValueError("prompt has no tokens, send at least one")
        if len(token_ids) >= self.max_model_len:
            raise PromptTooLongError(len(token_ids), self.max_model_len)
        vocab_size = self.model_config.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            raise ValueError(f"prompt has a token id outside [0, {vocab_size})")
        if (prefill_only or remote) and params.num_generations > 1:
            raise ValueError(
                f"{params.num_generations} answers are wanted, prefill and decode can be parted "
                "for one only"
            )
        if remote is not None and remote.digest not in ("", prompt_digest(token_ids)):
            logger.warning("request %s: the prompt was another where it was computed", request_id)
            remote.release()
            remote = None
        if remote is not None:
            seed = remote.seed
        else:
            seed = secrets.randbits(63) if params.seed is None else params.seed
        self.check_fits(params.num_generations)
        request = Request(
            request_id,
            token_ids,
            params=params,
            seed=seed,
            cancel=cancel,
            priority=priority,
            deadline_ns=deadline_ns,
            prefill_only=prefill_only,
            remote=remote,
        )
        request.fan_out(params.num_generations)
        return request

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str,
        cancel: CancelToken | None = None,
        priority: int = 0,
        time_limit: float | None = None,
        prefill_only: bool = False,
        remote: RemotePrefill | None = None,
    ) -> Request:
        """``make_request``, then ``admit``; see there."""
        request = self.make_request(
            prompt,
            params,
            request_id=request_id,
            cancel=cancel,
            priority=priority,
            time_limit=time_limit,
            prefill_only=prefill_only,
            remote=remote,
        )
        self.admit(request)
        return request


def _integers(token_ids: Sequence[int]) -> list[int]:
    """Return a list of them; a float would only be found where it is the end of the engine."""
    try:
        return list(map(index, token_ids))
    except TypeError as error:
        raise ValueError(f"prompt has a token id that is no integer: {error}") from error


def _size_cache(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype
) -> tuple[int, int]:
    """Return the number of blocks and the longest request, which must fit into them alone."""
    block_size = config.block_size
    max_model_len = config.max_model_len or model_config.max_position_embeddings
    if max_model_len > model_config.max_position_embeddings:
        raise ValueError(
            f"max_model_len is {max_model_len}, the model knows "
            f"{model_config.max_position_embeddings} positions"
        )
    num_blocks = config.num_blocks
    if num_blocks is None:
        block_bytes = KVCache.block_bytes(model_config, block_size=block_size, dtype=dtype)
        num_usable = config.max_num_seqs * -(-max_model_len // block_size)
        num_blocks = min(config.kv_cache_bytes // block_bytes, num_usable)
    if config.max_model_len is None:
        max_model_len = min(max_model_len, num_blocks * block_size)
    if max_model_len > num_blocks * block_size or max_model_len < 2:
        raise ValueError(
            f"a cache of {num_blocks} blocks of {block_size} tokens cannot hold one request of "
            f"{max(max_model_len, 2)} tokens, lower max_model_len or give it more memory"
        )
    return num_blocks, max_model_len
