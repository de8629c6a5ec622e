"""Responses as models make them, and what sends them."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from disconnect_watch.backends.infer import Parameter
from disconnect_watch.backends.python_model.worker.errors import TritonError, TritonModelException
from disconnect_watch.backends.python_model.worker.tensors import Tensor

__all__ = [
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "InferenceResponse",
    "InferenceResponseSender",
]

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class InferenceResponse:
    """One response.

    Args:
        output_tensors: none of them is sent if there is an error.
        parameters: what else the client is told.
    """

    __slots__ = ("_error", "_output_tensors", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | Exception | str | None = None,
        parameters: dict[str, Parameter] | None = None,
    ) -> None:
        for tensor in output_tensors:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(
                    f"an output tensor is {type(tensor).__name__}, it must be a Tensor"
                )
        for name, value in (parameters or {}).items():
            if not isinstance(name, str) or not isinstance(value, str | int | bool | float):
                raise TritonModelException(
                    f"response parameter {name!r} is {value!r}, it must be a string, number or bool"
                )
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
                raise TritonModelException(
                    f"response parameter '{name}' is {value}, it must have no more than 64 bits"
                )
        self._output_tensors = list(output_tensors)
        if error is not None and not isinstance(error, TritonError):
            error = TritonError(str(error))
        self._error = error
        self._parameters = parameters or {}

    def output_tensors(self) -> list[Tensor]:
        """Its tensors."""
        return self._output_tensors

    def has_error(self) -> bool:
        """Whether it tells of an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error it tells of."""
        return self._error

    def parameters(self) -> dict[str, Parameter]:
        """What else the client is told."""
        return self._parameters


class InferenceResponseSender:
    """Sends the responses of one request, from any thread.

    Args:
        send: puts one on its way, with whether it is the last.
        is_set: reads the request's cancel flag.
        is_decoupled: whether there may be more than one.
    """

    __slots__ = ("_is_final", "_is_set", "_lock", "_num_sent", "_send", "is_decoupled", "is_taken")

    def __init__(
        self,
        send: Callable[[InferenceResponse | None, bool], Any],
        is_set: Callable[[], bool],
        *,
        is_decoupled: bool,
    ) -> None:
        self._send = send
        self._is_set = is_set
        self._lock = threading.Lock()
        self._is_final = False
        self._num_sent = 0
        self.is_decoupled = is_decoupled
        self.is_taken = False

    @property
    def is_finished(self) -> bool:
        """Whether the last response was sent."""
        return self._is_final

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response; with the flag ``TRITONSERVER_RESPONSE_COMPLETE_FINAL``, the last.

        Raises:
            TritonModelException: the last one was sent, or there is nothing to send.
        """
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is not None and not isinstance(response, InferenceResponse):
            raise TritonModelException(
                f"a response is {type(response).__name__}, it must be an InferenceResponse"
            )
        with self._lock:
            if self._is_final:
                raise TritonModelException(
                    "Unable to send response. Response sender has been closed."
                )
            if response is None and not flags:
                raise TritonModelException(
                    "Inference Response object must be provided when the response flags is not "
                    "set to pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL."
                )
            if response is not None and self._num_sent and not self.is_decoupled:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one "
                    "response."
                )
            self._send(response, bool(flags))
            self._num_sent += response is not None
            self._is_final = bool(flags)

    def finish(self) -> None:
        """The request was answered without it."""
        self._is_final = True

    def __del__(self) -> None:
        # Nobody can send the last response any more, and its client would wait for ever.
        if (self.is_taken or self.is_decoupled) and not self._is_final:
            error = TritonError("the model let go of its response sender before the last response")
            self._send(InferenceResponse([], error), True)

    def is_cancelled(self) -> bool:
        """Whether nobody waits for the answer any more. A load of one word of memory."""
        return self._is_set()
