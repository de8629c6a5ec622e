"""A small server of KServe v2's gRPC protocol: ``python -m tests.support.triton_server [PORT]``.

It speaks by the code that Triton's own client publishes. It prints its port and then a line
of JSON for each thing that happens to a request: ``begin``, ``cancelled``, ``end``.

    identity     gives what it gets
    waits        gives nothing until it is cancelled
    stream       decoupled: an index as often as its input says; with the parameter ``then`` it
                 waits behind them, or ends in an error
    fails        ends with the status that the parameter ``code`` names
    told         gives its parameters, as JSON
    says         says its text again, word by word, and behind the word ``wait`` nothing more

With ``--tls`` it shows the tests' certificate. With ``--absent MODEL`` it does not have one.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf import text_format
from grpc import aio
from tritonclient.grpc import (  # type: ignore[import-untyped]
    model_config_pb2,
    service_pb2,
    service_pb2_grpc,
)

from tests.support.tls import PEM

_IO = (
    'input {{ name: "INPUT0" data_type: TYPE_{kind} dims: [{dims}] }} '
    'output {{ name: "OUTPUT0" data_type: TYPE_{kind} dims: [{dims}] }}'
)
_DECOUPLED = " model_transaction_policy { decoupled: true }"
MODELS = {
    "identity": _IO.format(kind="FP32", dims="-1"),
    "waits": _IO.format(kind="FP32", dims="1"),
    "stream": _IO.format(kind="INT32", dims="1") + _DECOUPLED,
    "fails": _IO.format(kind="FP32", dims="1"),
    "told": _IO.format(kind="STRING", dims="1"),
    "says": _IO.format(kind="STRING", dims="1")
    .replace("INPUT0", "text_input")
    .replace("OUTPUT0", "text_output")
    + _DECOUPLED,
}


def say(event: str, **more: Any) -> None:
    print(json.dumps({"event": event, **more}), flush=True)


def values(parameters: Any) -> dict[str, Any]:
    return {key: getattr(p, p.WhichOneof("parameter_choice")) for key, p in parameters.items()}


class Service(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """What the gateway asks for."""

    def __init__(self, absent: list[str]) -> None:
        self.loaded = {name for name in MODELS if name not in absent}
        self.known = set(self.loaded)
        self.log_settings = service_pb2.LogSettingsResponse()
        self.log_settings.settings["log_info"].bool_param = True
        self.trace_settings = service_pb2.TraceSettingResponse()
        self.trace_settings.settings["trace_level"].value.append("OFF")
        self.counts = dict.fromkeys(MODELS, 0)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerMetadataResponse(
            name="small", version="1", extensions=["statistics", "cuda_shared_memory"]
        )

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        await self._require(request.name, context)
        config = model_config_pb2.ModelConfig(name=request.name, backend="python")
        text_format.Merge(MODELS[request.name], config)
        return service_pb2.ModelConfigResponse(config=config)

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        answer = service_pb2.RepositoryIndexResponse()
        for name in sorted(self.known):
            state = "READY" if name in self.loaded else "UNAVAILABLE"
            answer.models.add(name=name, version="1", state=state)
        return answer

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        parameters = {
            key: value.decode() if isinstance(value, bytes) else value
            for key, value in values(request.parameters).items()
        }
        say("load", model=request.model_name, parameters=parameters)
        self.loaded.add(request.model_name)
        return service_pb2.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        parameters = values(request.parameters)
        say("unload", model=request.model_name, parameters=parameters)
        self.loaded.discard(request.model_name)
        return service_pb2.RepositoryModelUnloadResponse()

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        answer = service_pb2.ModelStatisticsResponse()
        for name in [request.name] if request.name else sorted(self.known):
            await self._require(name, context)
            of = answer.model_stats.add(name=name, version="1", inference_count=self.counts[name])
            of.inference_stats.success.count = self.counts[name]
            of.response_stats["0"].cancel.count = 1
            of.batch_stats.add(batch_size=1).compute_infer.count = self.counts[name]
        return answer

    async def LogSettings(self, request: Any, context: Any) -> Any:
        for key, value in request.settings.items():
            kind = value.WhichOneof("parameter_choice")
            setattr(self.log_settings.settings[key], kind, getattr(value, kind))
        return self.log_settings

    async def TraceSetting(self, request: Any, context: Any) -> Any:
        for key, value in request.settings.items():
            self.trace_settings.settings[key].value[:] = value.value or ["OFF"]
        return self.trace_settings

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        async with aclosing(self._run(request, context)) as responses:
            (response,) = [response async for response in responses]
            return response

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncGenerator[Any, None]:
        async for request in requests:
            async with aclosing(self._run(request, context)) as responses:
                async for response in responses:
                    if isinstance(response, str):
                        yield service_pb2.ModelStreamInferResponse(error_message=response)
                    else:
                        yield service_pb2.ModelStreamInferResponse(infer_response=response)

    async def _run(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        name = request.model_name
        await self._require(name, context)
        say(
            "begin",
            model=name,
            id=request.id,
            version=request.model_version,
            parameters=values(request.parameters),
            outputs={output.name: values(output.parameters) for output in request.outputs},
            metadata={key: value for key, value in context.invocation_metadata()},
        )
        self.counts[name] += 1
        try:
            async for response in getattr(self, f"model_{name}")(request, context):
                yield response
        except (asyncio.CancelledError, GeneratorExit):  # while it waits, or between two of its
            say("cancelled", model=name, id=request.id)
            raise
        say("end", model=name, id=request.id)

    async def model_identity(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        (given,) = request.inputs
        yield response_to(request, given.datatype, given.shape, request.raw_input_contents[0])

    async def model_waits(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        await asyncio.get_running_loop().create_future()
        yield

    async def model_stream(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        parameters = values(request.parameters)
        number = int.from_bytes(request.raw_input_contents[0], "little")
        for index in range(number):
            yield response_to(request, "INT32", [1], index.to_bytes(4, "little"))
        then = parameters.get("then")
        if then == "wait":
            await asyncio.get_running_loop().create_future()
        elif then:
            yield then
            yield response_to(request, "INT32", [1], number.to_bytes(4, "little"))

    async def model_fails(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        code = values(request.parameters)["code"]
        await context.abort(grpc.StatusCode[code], f"it says {code}")
        yield

    async def model_told(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        text = json.dumps(values(request.parameters), sort_keys=True).encode()
        yield response_to(request, "BYTES", [1], len(text).to_bytes(4, "little") + text)

    async def model_says(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        for word in request.raw_input_contents[0][4:].split(b" "):
            data = len(word).to_bytes(4, "little") + word
            yield response_to(request, "BYTES", [1], data, name="text_output")
            if word == b"wait":
                await asyncio.get_running_loop().create_future()

    async def _require(self, name: str, context: Any) -> None:
        if name not in self.loaded:
            message = f"Request for unknown model: '{name}' is not found"
            await context.abort(grpc.StatusCode.NOT_FOUND, message)


def response_to(
    request: Any, datatype: str, shape: Any, data: bytes, *, name: str = "OUTPUT0"
) -> Any:
    response = service_pb2.ModelInferResponse(
        model_name=request.model_name, model_version="1", id=request.id
    )
    response.outputs.add(name=name, datatype=datatype, shape=shape)
    response.raw_output_contents.append(data)
    return response


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", nargs="?", default=0, type=int)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--absent", action="append", default=[])
    parser.add_argument("--max-bytes", type=int, default=-1)
    options = parser.parse_args()
    server = aio.server(options=[("grpc.max_receive_message_length", options.max_bytes)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Service(options.absent), server)
    address = f"127.0.0.1:{options.port}"
    if options.tls:
        pem = PEM.read_bytes()
        credentials = grpc.ssl_server_credentials([(pem, pem)])
        port = server.add_secure_port(address, credentials)
    else:
        port = server.add_insecure_port(address)
    await server.start()
    say("serving", port=port)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
