"""Any body and any header: answered, and never by an error of ours.

Triton answers JSON of a wrong form 500, and so do we, with the words that say what is
wrong with it; every other 5xx would be a fault.
"""

import json
import re
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disconnect_watch.server import Frontend, FrontendOptions
from tests.support.function_models import ModelTable, identity
from tests.support.serve import request_app

#: Of a 500, which are all about the request.
EXPLAINED = re.compile(
    "Unable to parse|failed to parse the request JSON buffer|"
    "Failed to parse 'data' field: shape does not match true shape"
)
UNSUPPORTED = re.compile("Unsupported compression type|shared memory is disabled")

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 3),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
parameters = st.dictionaries(
    st.sampled_from(
        [
            "binary_data_size",
            "binary_data",
            "binary_data_output",
            "classification",
            "shared_memory_region",
            "shared_memory_offset",
            "shared_memory_byte_size",
            "sequence_id",
            "sequence_start",
            "priority",
            "timeout",
            "triton_x",
            "own",
        ]
    ),
    scalars,
    max_size=3,
)
datatypes = st.sampled_from(
    ["FP32", "BYTES", "BOOL", "INT8", "INT64", "UINT8", "UINT64", "FP16", "BF16", "FP64", "X"]
)
inputs = st.fixed_dictionaries(
    {"name": st.sampled_from(["INPUT0", "INPUT1", ""])},
    optional={
        "datatype": datatypes | scalars,
        "shape": st.lists(st.integers(0, 3), max_size=3) | values,
        "data": st.lists(scalars, max_size=4) | values,
        "parameters": parameters | scalars,
    },
)
outputs = st.fixed_dictionaries(
    {"name": st.sampled_from(["OUTPUT0", "NOPE"])}, optional={"parameters": parameters | scalars}
)
documents = st.fixed_dictionaries(
    {},
    optional={
        "id": scalars,
        "inputs": st.lists(inputs | values, max_size=2) | values,
        "outputs": st.lists(outputs | values, max_size=2) | values,
        "parameters": parameters | values,
    },
)
bodies = st.one_of(
    st.binary(max_size=40),
    st.tuples(documents.map(lambda d: json.dumps(d).encode()), st.binary(max_size=12)).map(
        lambda both: both[0] + both[1]
    ),
    documents.map(lambda document: json.dumps(document).encode()),
    values.map(lambda value: json.dumps(value).encode()),
)
headers = st.fixed_dictionaries(
    {},
    optional={
        "inference-header-content-length": st.integers(-1, 80).map(str)
        | st.text("0123456789+-_ .", max_size=4),
        "content-encoding": st.sampled_from(["gzip", "deflate", "br", "identity", ""]),
        "accept-encoding": st.sampled_from(["gzip", "deflate;q=x", "*;q=0", "gzip;q=nan", ";"]),
    },
)
DATATYPES = ["FP32", "STRING", "BOOL", "INT8", "UINT64", "FP16"]
MODELS = [identity(f"m_{datatype}", datatype) for datatype in DATATYPES]


async def post(path: str, body: bytes, head: dict[str, Any]) -> httpx.Response:
    frontend = Frontend(models=ModelTable(*MODELS), options=FrontendOptions(max_body_bytes=1 << 16))
    response = await request_app(frontend, "POST", path, content=body, headers=head)
    assert frontend.stats().num_live == 0
    return response


def check(response: httpx.Response) -> None:
    if response.status_code >= 400:
        message = response.json()["error"]
        assert response.status_code < 500 or (
            (response.status_code == 500 and EXPLAINED.match(message))
            or (response.status_code == 501 and UNSUPPORTED.search(message))
        ), (response.status_code, message)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(model=st.sampled_from(MODELS), body=bodies, head=headers)
@pytest.mark.asyncio
async def test_any_infer_is_answered(model: Any, body: bytes, head: dict[str, str]) -> None:
    check(await post(f"/v2/models/{model.name}/infer", body, head))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    model=st.sampled_from(MODELS),
    document=st.fixed_dictionaries(
        {}, optional={"INPUT0": values, "id": scalars, "parameters": values, "x": values}
    ),
    action=st.sampled_from(["generate", "generate_stream"]),
)
@pytest.mark.asyncio
async def test_any_generate_is_answered(model: Any, document: Any, action: str) -> None:
    check(await post(f"/v2/models/{model.name}/{action}", json.dumps(document).encode(), {}))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    path=st.sampled_from(
        [
            "/v2/logging",
            "/v2/trace/setting",
            "/v2/repository/index",
            "/v2/repository/models/m_FP32/load",
            "/v2/systemsharedmemory/region/r/register",
        ]
    ),
    document=st.dictionaries(
        st.sampled_from(
            [
                "log_info",
                "log_verbose_level",
                "log_format",
                "trace_level",
                "trace_count",
                "trace_rate",
                "ready",
                "parameters",
                "key",
                "offset",
                "byte_size",
            ]
        ),
        values,
        max_size=3,
    ),
)
@pytest.mark.asyncio
async def test_any_setting_is_answered(path: str, document: Any) -> None:
    frontend = Frontend(models=ModelTable(*MODELS), options=FrontendOptions(allow_client_shm=True))
    body = json.dumps(document).encode()
    response = await request_app(frontend, "POST", path, content=body)
    if response.status_code >= 500:
        message = response.json()["error"]
        assert re.match(
            f"{EXPLAINED.pattern}|invalid argument for --log_format|explicit model load|"
            "unexpected error on creating Triton parameter",
            message,
        ), message
