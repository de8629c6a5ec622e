"""What a client says of a model that is to be loaded, as gRPC has it."""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from disconnect_watch.backends.infer import Code, InferError
from disconnect_watch.errors import cut

__all__ = ["load_parameters"]


def load_parameters(request: Any, parameters: Mapping[str, str]) -> None:
    """Put the parameters of the HTTP request into that of gRPC, where files are bytes.

    Raises:
        InferError: INVALID_ARG, a file is no base64.
    """
    for key, value in parameters.items():
        if not key.startswith("file:"):
            request.parameters[key].string_param = value
            continue
        try:
            content = base64.b64decode(value, validate=True)
        except binascii.Error as error:
            raise InferError(
                Code.INVALID_ARG, f"cannot read '{cut(key)}' as base64: {error}"
            ) from error
        request.parameters[key].bytes_param = content
