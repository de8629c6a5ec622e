"""Requests that a model is given before it is ready, so that no client waits for its first."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

from disconnect_watch.backends.datatypes import BY_NAME
from disconnect_watch.backends.infer import InferRequest, InferTensor
from disconnect_watch.backends.model_config import ConfigError, datatype_of

__all__ = ["warmup_requests"]


def warmup_requests(config: Any, directory: Path) -> list[InferRequest]:
    """The samples of ``model_warmup``, each as often as it says.

    Args:
        directory: of the model, whose ``warmup`` directory has the files of data.

    Raises:
        ConfigError: a sample makes no sense, or its file can't be read.
    """
    requests = []
    for sample in config.model_warmup:
        batch_size = sample.batch_size if config.max_batch_size else 0
        inputs = [
            _tensor(name, data, batch_size, directory / "warmup")
            for name, data in sorted(sample.inputs.items())
        ]
        requests += [
            InferRequest(id=sample.name, inputs=inputs) for _ in range(max(1, sample.count))
        ]
    return requests


def _tensor(name: str, data: Any, batch_size: int, files: Path) -> InferTensor:
    datatype = datatype_of(data.data_type)
    if any(dim < 1 for dim in data.dims):
        raise ConfigError(f"warm-up input '{name}' has dims {list(data.dims)}, each must be known")
    num = int(np.prod(list(data.dims), dtype=np.int64))
    size_bytes = BY_NAME[datatype].size_bytes
    source = data.WhichOneof("input_data_type")
    if source == "input_data_file":
        path = files / data.input_data_file
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"failed to read the warm-up data of '{name}': {error}") from error
        if size_bytes and len(content) != num * size_bytes:
            raise ConfigError(
                f"warm-up data of '{name}' in {path} is {len(content)} bytes, "
                f"it must be {num * size_bytes}"
            )
    elif source == "random_data":
        content = _random(datatype, num)
    else:
        content = bytes(num * (size_bytes or 4))  # of BYTES, as many empty elements
    shape = tuple(data.dims)
    if batch_size:
        shape = (batch_size, *shape)
    return InferTensor(name, datatype, shape, content * max(1, batch_size))


def _random(datatype: str, num: int) -> bytes:
    generator = np.random.default_rng(0)
    kind = BY_NAME[datatype]
    if kind.dtype is None:
        return b"".join(
            struct.pack("<I", 8) + generator.integers(97, 123, 8, np.uint8).tobytes()
            for _ in range(num)
        )
    if kind.dtype.kind == "f":
        return generator.random(num).astype(kind.dtype).tobytes()
    if kind.dtype.kind == "b" or datatype == "BF16":
        return generator.integers(0, 2, num).astype(kind.dtype).tobytes()
    return generator.integers(0, 100, num).astype(kind.dtype).tobytes()
