"""OpenAI's endpoints through OpenAI's SDK for Node."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from disconnect_watch.adapters import LEAVES
from tests.support.net import wait_until
from tests.support.serve import packaged_engine, serving_engine
from tests.support.tools import NODE_MODULES, path_of

SCRIPT = Path(__file__).parents[1] / "clients" / "openai_sdk.mjs"
OWN = {"seed": 7, "ignore_eos": True}


@pytest.mark.skipif(
    not (path_of("node") and path_of("openai")),
    reason="Node or its openai is not here: make test-programs",
)
def test_the_sdk_for_node_is_told_what_the_one_for_python_is() -> None:
    with serving_engine(packaged_engine()) as serving:
        url = f"http://127.0.0.1:{serving.port}/v1"
        done = subprocess.run(
            [path_of("node"), str(SCRIPT), url],
            env={**os.environ, "NODE_PATH": str(NODE_MODULES)},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        with openai.OpenAI(base_url=url, api_key="none", timeout=40, max_retries=0) as client:
            completion = client.completions.create(
                model="tiny", prompt="The class", max_tokens=8, extra_body=OWN
            )
            response = client.responses.create(
                model="tiny", input="The class statement", max_output_tokens=8, extra_body=OWN
            )
            assert told["models"] == ["tiny"]
            assert told["completions"] == [completion.choices[0].text] * 2
            assert told["chat"] == [response.output_text] * 2
            assert told["responses"] == [response.output_text] * 5
            assert told["background"] == ["queued", "cancelled", "cancelled"]
            assert told["foreground"] is True
            assert told["items"] == ["text 3", "text 2", "text 1"]
            assert told["deleted"] is True
            # Who left by a break left nothing.
            wait_until(lambda: serving.frontend.responses.num_running == 0)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(told["left"])
        (outcome,) = serving.outcomes[told["left"].removeprefix("resp_")]
        assert outcome.reason in LEAVES
        wait_until(serving.is_idle)
