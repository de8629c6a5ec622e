"""The models of the frontend's benchmark, for our frontend and for Triton alike.

In a process of the server's own: ``echo``, ``chunks``, and three that tell when they are
called, when they see that their client left, and when they end. In the server itself, as ours
alone has them: ``identity`` and ``counter``.
"""

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf import text_format

from bench.worker import ECHO
from disconnect_watch.backends.infer import InferRequest, InferResponse, InferTensor
from disconnect_watch.backends.model_config import complete, inputs_of, outputs_of
from disconnect_watch.backends.schema import model_config_class
from disconnect_watch.backends.validate import Validator

if TYPE_CHECKING:
    from disconnect_watch.backends.base import Tensor

__all__ = ["EVENTS_VARIABLE", "NUM_CHUNKS", "LocalModel", "local_models", "write_models"]

NUM_CHUNKS = 20
#: Of the environment: where the waiting models write their events, a line each.
EVENTS_VARIABLE = "BENCH_EVENTS"

_CHUNKS = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            sender, count = r.get_response_sender(), int(r.inputs()[0].as_numpy()[0])
            for i in range(count):
                if sender.is_cancelled():
                    break
                tensor = pb_utils.Tensor("Y", np.array([i], np.int32))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
# Looks at its flag so often that the time of its looks is not what is measured. A stream's
# chunks begin after FIRST seconds.
_WAITS = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils
def tell(what, name):
    with open(os.environ["BENCH_EVENTS"], "a") as file:
        file.write(f"{time.monotonic_ns()} {what} {name}\\n")
class TritonPythonModel:
    def initialize(self, args):
        self.is_decoupled = pb_utils.using_decoupled_model_transaction_policy(
            __import__("json").loads(args["model_config"]))
    def execute(self, requests):
        return [self.work(r) for r in requests] if not self.is_decoupled else (
            [self.work(r) for r in requests] and None)
    def work(self, r):
        name = pb_utils.get_input_tensor_by_name(r, "NAME").as_numpy().flat[0].decode()
        seconds, first = pb_utils.get_input_tensor_by_name(r, "SECONDS").as_numpy().flat
        end = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        sender = r.get_response_sender() if self.is_decoupled else None
        began = sent = time.monotonic()
        tell("begin", name)
        while time.monotonic() < began + seconds and not r.is_cancelled():
            time.sleep(0.0001)
            if sender and time.monotonic() > max(began + first, sent + 0.02):
                sent = time.monotonic()
                sender.send(self.answer("chunk"))
        tell("end", name)
        if sender:
            sender.send(flags=end)
            return None
        return self.answer("done")
    def answer(self, text):
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("TEXT", np.array([text.encode()], object))])
"""
_FLOATS = """
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [-1] }
output { name: "Y" data_type: TYPE_FP32 dims: [-1] }
"""
_COUNTS = """
input { name: "X" data_type: TYPE_INT32 dims: [1] }
output { name: "Y" data_type: TYPE_INT32 dims: [1] }
model_transaction_policy { decoupled: true }
"""
_NAMED = """
input { name: "NAME" data_type: TYPE_STRING dims: [1] }
input { name: "SECONDS" data_type: TYPE_FP32 dims: [2] }
output { name: "TEXT" data_type: TYPE_STRING dims: [1] }
"""
_MODELS = {
    "echo": (ECHO, _FLOATS),
    "chunks": (_CHUNKS, _COUNTS),
    "waits": (_WAITS, f"{_NAMED} instance_group {{ count: 2 kind: KIND_CPU }}"),
    "waits_alone": (_WAITS, f"{_NAMED} instance_group {{ count: 1 kind: KIND_CPU }}"),
    "streams": (_WAITS, f"{_NAMED} model_transaction_policy {{ decoupled: true }}"),
}


def write_models(root: Path, *names: str) -> None:
    """Write some of the models to a repository; all if none is named."""
    for name in names or _MODELS:
        code, config = _MODELS[name]
        (root / name / "1").mkdir(parents=True)
        (root / name / "1" / "model.py").write_text(code)
        (root / name / "config.pbtxt").write_text(f'backend: "python"\n{config}')


class LocalModel:
    """A model in the server's own process, which answers at once.

    Args:
        num_chunks: of its streams; 0 for one answer that is what it was given.
    """

    def __init__(self, name: str, config: str, *, num_chunks: int = 0) -> None:
        self.config: Any = text_format.Parse(f'name: "{name}" {config}', model_config_class()())
        complete(self.config, name)
        self.name = name
        self.version = "1"
        self.is_ready = True
        self.is_decoupled = num_chunks > 0
        self.inputs: Sequence[Tensor] = inputs_of(self.config)
        self.outputs: Sequence[Tensor] = outputs_of(self.config)
        self._num_chunks = num_chunks
        self._validator = Validator(self.config)

    def labels(self, output: str) -> Sequence[str]:
        """None has any."""
        return ()

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """See ``ServedModel.infer``."""
        self._validator.check(request)
        if not self.is_decoupled:
            (given,) = request.inputs
            output = InferTensor("Y", given.datatype, given.shape, given.data)
            yield InferResponse(self.name, self.version, request.id, outputs=[output])
            return
        for index in range(self._num_chunks):
            output = InferTensor.from_numpy("Y", np.array([index], np.int32))
            yield InferResponse(
                self.name, self.version, request.id, outputs=[output], is_final=False
            )
        yield InferResponse(self.name, self.version, request.id)


def local_models() -> list[LocalModel]:
    """``identity`` of FP32, and ``counter``, a stream."""
    return [
        LocalModel("identity", _FLOATS),
        LocalModel("counter", _COUNTS, num_chunks=NUM_CHUNKS),
    ]
