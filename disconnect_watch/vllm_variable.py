"""The environment variable by which vLLM's processes are told what they shall do with us."""

__all__ = ["ENGINE", "VARIABLE"]

VARIABLE = "DISCONNECT_WATCH_VLLM"
#: For an engine behind a server of another kind, which names the flags itself.
ENGINE = "engine"
