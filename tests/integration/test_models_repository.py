"""A repository's models come and go as its mode says, and its index tells the truth."""

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disconnect_watch import Reason
from disconnect_watch.backends.infer import Code, InferError, InferRequest
from disconnect_watch.backends.statistics import IndexEntry
from tests.support.models import (
    TIME_LIMIT,
    EventLog,
    ModelHost,
    ended,
    responses_of,
    tensors,
    until,
    write_model,
)

pytestmark = pytest.mark.timeout(TIME_LIMIT)

#: Answers with the number that it was made with, and the version that it is of.
NUMBER = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        self.version = int(args["model_version"])
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array(numbers, np.int32))])
            for numbers in [[%d, self.version]] * len(requests)
        ]
"""
OUTPUT = 'output { name: "Y" data_type: TYPE_INT32 dims: 2 }'

SLOW = """
import os, time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        open(os.environ["STARTED"], "w").close()
        while not os.path.exists(os.environ["GO"]) and not requests[0].is_cancelled():
            time.sleep(0.01)
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""


def asked(host: ModelHost, name: str, version: str | None = None) -> list[int]:
    model = host.repository.find(name, version)
    (response,) = host.run(responses_of(model, InferRequest()))
    numbers: list[int] = response.outputs[0].to_numpy().tolist()
    return numbers


def refused(host: ModelHost, name: str, version: str | None = None) -> InferError:
    with pytest.raises(InferError) as caught:
        host.repository.find(name, version)
    return caught.value


def test_latest_version_is_served_unless_the_policy_says_otherwise(tmp_path: Path) -> None:
    for version in (1, 2, 10):
        write_model(tmp_path, "latest", NUMBER % 5, OUTPUT, version)
        policy = "version_policy { specific { versions: [1, 2] } }"
        write_model(tmp_path, "some", NUMBER % 6, f"{OUTPUT} {policy}", version)
    with ModelHost(tmp_path) as host:
        assert asked(host, "latest") == [5, 10]
        assert asked(host, "some") == [6, 2]
        assert asked(host, "some", "1") == [6, 1]
        assert host.repository.is_ready()
        assert host.repository.index() == [
            IndexEntry("latest", "10", "READY"),
            IndexEntry("some", "1", "READY"),
            IndexEntry("some", "2", "READY"),
        ]
        error = refused(host, "some", "10")
        assert (error.code, error.message) == (
            Code.NOT_FOUND,
            "Request for unknown model: 'some' version 10 is not found",
        )
        assert [s.version for s in host.repository.statistics("some")] == ["1", "2"]
        assert [s.version for s in host.repository.statistics("some", "2")] == ["2"]
        assert len(host.repository.statistics()) == 3
        with pytest.raises(InferError, match="requested model 'none' is not available"):
            host.repository.statistics("none")
        with pytest.raises(InferError, match="version is not available for model 'some'"):
            host.repository.statistics("some", "7")
        with pytest.raises(InferError, match="explicit model load / unload is not allowed"):
            host.run(host.repository.load("some"))
        with pytest.raises(InferError, match="explicit model load / unload is not allowed"):
            host.run(host.repository.unload("some"))


def test_models_are_loaded_and_unloaded_as_clients_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    source = write_model(tmp_path, "one", NUMBER % 1, OUTPUT) / "1" / "model.py"
    with ModelHost(tmp_path, mode="explicit") as host:
        repository = host.repository
        assert repository.index() == [IndexEntry("one")]
        assert refused(host, "one").message == "Request for unknown model: 'one' is not found"
        host.run(repository.load("one"))
        assert asked(host, "one") == [1, 1]
        old = host.model("one")

        written_ns = source.stat().st_mtime_ns
        write_model(tmp_path, "one", NUMBER % 2, OUTPUT)
        os.utime(source, ns=(written_ns, written_ns))  # as within one tick of the clock
        host.run(repository.load("one"))
        assert asked(host, "one") == [2, 1]
        host.run(until(lambda: not old.is_ready))

        host.run(repository.unload("one"))
        assert refused(host, "one").message == (
            "Request for unknown model: 'one' has no available versions"
        )
        assert repository.index() == [IndexEntry("one", "1", "UNAVAILABLE", "unloaded")]
        assert repository.index(ready=True) == []
        host.run(repository.unload("none"))
        with pytest.raises(InferError) as caught:
            host.run(repository.load("nope"))
        assert (caught.value.code, caught.value.message) == (
            Code.INTERNAL,
            "failed to load 'nope', failed to poll from model repository",
        )


def test_model_that_fails_to_load_again_goes_on_as_it_was(tmp_path: Path) -> None:
    write_model(tmp_path, "one", NUMBER % 1, OUTPUT)
    with ModelHost(tmp_path, mode="explicit", load_models=["*"]) as host:
        write_model(tmp_path, "one", "raise RuntimeError('broken now')", OUTPUT)
        with pytest.raises(InferError, match="Internal: RuntimeError: broken now"):
            host.run(host.repository.load("one"))
        assert asked(host, "one") == [1, 1]
        assert host.repository.index() == [IndexEntry("one", "1", "READY")]


def test_model_that_fails_to_load_is_told_to_who_loads_it(tmp_path: Path) -> None:
    write_model(tmp_path, "one", "raise RuntimeError('broken')", OUTPUT)
    with ModelHost(tmp_path, mode="explicit") as host:
        with pytest.raises(InferError) as caught:
            host.run(host.repository.load("one"))
        assert caught.value.message.startswith(
            "load failed for model 'one': version 1 is at UNAVAILABLE state: Internal: "
            "RuntimeError: broken"
        )


def test_configuration_and_files_may_come_with_the_load(tmp_path: Path) -> None:
    write_model(tmp_path, "one", NUMBER % 1, OUTPUT)
    document: dict[str, Any] = {
        "backend": "python",
        "output": [{"name": "Y", "data_type": "TYPE_INT32", "dims": [2]}],
        "parameters": {"a": {"string_value": "b"}},
    }
    code = base64.b64encode((NUMBER % 9).encode()).decode()
    with ModelHost(tmp_path, mode="explicit") as host:
        load = host.repository.load
        host.run(load("one", {"config": json.dumps(document)}))
        assert asked(host, "one") == [1, 1]
        assert host.model("one").config.parameters["a"].string_value == "b"
        host.run(load("one", {"config": json.dumps(document), "file:3/model.py": code}))
        assert asked(host, "one") == [9, 3]
        for parameters, message in (
            ({"colour": 1}, "unexpected error on creating Triton parameter"),
            ({"file:1/model.py": code}, "give 'config' too"),
            ({"config": "{"}, "failed to read the model configuration"),
            ({"config": "{}", "file:../x": code}, "outside of the model's directory"),
            ({"config": "{}", "file:1/x": "§"}, "can't be written"),
        ):
            with pytest.raises(InferError, match=message):
                host.run(load("one", parameters))
        assert asked(host, "one") == [9, 3]


def test_name_that_leads_out_of_the_repository_is_no_model(tmp_path: Path) -> None:
    write_model(tmp_path, "outside", NUMBER % 1, OUTPUT)
    inner = tmp_path / "repository"
    inner.mkdir()
    with ModelHost(inner, mode="explicit") as host:
        for name in ("..", ".", "../outside"):
            with pytest.raises(InferError, match="failed to poll"):
                host.run(host.repository.load(name))
            with pytest.raises(InferError, match="is not in the repository"):
                host.run(host.repository.load(name, {"config": json.dumps({"name": name})}))


def test_repository_follows_its_directory_where_it_polls(tmp_path: Path) -> None:
    write_model(tmp_path, "one", NUMBER % 1, OUTPUT)
    with ModelHost(tmp_path, mode="poll", poll_seconds=3600) as host:
        repository = host.repository
        assert asked(host, "one") == [1, 1]
        first = host.model("one")
        (tmp_path / "one" / "1" / "__pycache__").mkdir()  # no change of the model
        host.run(repository.poll())
        assert host.model("one") is first
        write_model(tmp_path, "one", NUMBER % 3, OUTPUT, 2)
        write_model(tmp_path, "two", NUMBER % 4, OUTPUT)
        host.run(repository.poll())
        assert (asked(host, "one"), asked(host, "two")) == ([3, 2], [4, 1])
        for path in sorted((tmp_path / "two").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (tmp_path / "two").rmdir()
        host.run(repository.poll())
        assert "has no available versions" in refused(host, "two").message


def test_repository_polls_by_itself(tmp_path: Path) -> None:
    with ModelHost(tmp_path, mode="poll", poll_seconds=0.01) as host:
        write_model(tmp_path, "one", NUMBER % 1, OUTPUT)
        host.run(until(lambda: host.repository.index(ready=True)))


@pytest.mark.parametrize("is_patient", [True, False])
def test_unloading_waits_for_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_patient: bool
) -> None:
    started, go = tmp_path / "started", tmp_path / "go"
    monkeypatch.setenv("STARTED", str(started))
    monkeypatch.setenv("GO", str(go))
    write_model(tmp_path / "models", "slow", SLOW)

    async def main(host: ModelHost) -> None:
        model = host.model("slow")
        request = InferRequest()
        task = asyncio.ensure_future(responses_of(model, request))
        await until(started.exists)
        unload = asyncio.ensure_future(host.repository.unload("slow"))
        await until(lambda: host.repository.index()[0].state != "READY")
        assert not is_patient or host.repository.index()[0].state == "UNLOADING"
        with pytest.raises(InferError, match="has no available versions"):
            host.repository.find("slow")
        with pytest.raises(InferError, match="is not at ready state"):
            await responses_of(model, InferRequest())
        if is_patient:
            go.touch()
            assert await ended(task)
        else:
            with pytest.raises(InferError, match="cancelled: shutdown"):
                await ended(task)
        await ended(unload)
        assert host.repository.index() == [IndexEntry("slow", "1", "UNAVAILABLE", "unloaded")]

    grace = 30.0 if is_patient else 0.05
    with ModelHost(tmp_path / "models", mode="explicit", load_models=["slow"], grace=grace) as host:
        host.run(main(host))


@pytest.mark.parametrize("is_replaced", [False, True])
def test_closing_cancels_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    started = tmp_path / "started"
    monkeypatch.setenv("STARTED", str(started))
    monkeypatch.setenv("GO", str(tmp_path / "never"))
    write_model(tmp_path / "models", "slow", SLOW)

    async def main(host: ModelHost) -> None:
        request = InferRequest()
        model = host.model("slow")
        task = asyncio.ensure_future(responses_of(model, request))
        await until(started.exists)
        if is_replaced:
            await host.repository.load("slow")
        await host.repository.close()
        assert request.cancel.reason is Reason.SHUTDOWN
        with pytest.raises(InferError, match="cancelled: shutdown"):
            await ended(task)
        for pid in model.pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    with ModelHost(tmp_path / "models", mode="explicit", load_models=["slow"]) as host:
        host.run(main(host))


COMPLETES = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(4)
        config.set_dynamic_batching()
        return config
    def initialize(self, args):
        import json
        assert json.loads(args["model_config"])["max_batch_size"] == 4
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy() * 2)])
            for r in requests
        ]
"""


def test_model_without_a_configuration_completes_its_own(tmp_path: Path) -> None:
    write_model(tmp_path, "auto", COMPLETES)
    with ModelHost(tmp_path) as host:
        model = host.model("auto")
        assert model.config.max_batch_size == 4
        assert model.inputs[0].shape == (-1, -1)
        assert list(model.config.dynamic_batching.preferred_batch_size) == [4]
        array = np.ones((2, 3), np.float32)
        (response,) = host.infer("auto", InferRequest(inputs=tensors(X=array)))
        assert response.outputs[0].to_numpy().tolist() == (array * 2).tolist()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('input { name: "X" data_type: TYPE_INT32 dims: -1 }', "but model provides TYPE_FP32"),
        ("max_batch_size: 8", "specified max_batch_size 8"),
        ("sequence_batching {} max_batch_size: 1", "specified sequence_batching"),
    ],
)
def test_model_that_contradicts_its_configuration_is_not_loaded(
    tmp_path: Path, config: str, message: str
) -> None:
    write_model(tmp_path, "auto", COMPLETES, config)
    with ModelHost(tmp_path) as host:
        (entry,) = host.repository.index()
        assert entry.state == "UNAVAILABLE"
        assert entry.reason is not None
        assert message in entry.reason


WARMED = """
import json, os
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        out = []
        for r in requests:
            x = r.inputs()[0].as_numpy()
            event = {"ev": r.request_id(), "shape": x.shape, "sum": float(x.sum())}
            with open(os.environ["MODEL_LOG"], "a") as log:
                log.write(json.dumps(event) + "\\n")
            error = pb_utils.TritonError("cold") if x.sum() < 0 else None
            out.append(pb_utils.InferenceResponse([], error))
        return out
"""


def test_model_is_warmed_up_before_it_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "log")
    monkeypatch.setenv("MODEL_LOG", str(log.path))
    one = 'input { name: "X" data_type: TYPE_FP32 dims: 2 } max_batch_size: 4'

    def sample(name: str, how_many: str, data: str) -> str:
        value = f"data_type: TYPE_FP32 dims: 2 {data}"
        return (
            f'model_warmup {{ name: "{name}" {how_many} '
            f'inputs {{ key: "X" value {{ {value} }} }} }}'
        )

    models = tmp_path / "models"
    directory = write_model(
        models,
        "warm",
        WARMED,
        "\n".join(
            [
                one,
                sample("zeros", "batch_size: 3", "zero_data: true"),
                sample("random", "batch_size: 1 count: 2", "random_data: true"),
                sample("file", "batch_size: 2", 'input_data_file: "x"'),
            ]
        ),
    )
    (directory / "warmup").mkdir()
    (directory / "warmup" / "x").write_bytes(np.array([1, 2], np.float32).tobytes())
    failing = sample("c", "batch_size: 1", 'input_data_file: "y"')
    cold = write_model(models, "cold", WARMED, f"{one} {failing}")
    (cold / "warmup").mkdir()
    (cold / "warmup" / "y").write_bytes(np.array([-1, 0], np.float32).tobytes())
    with ModelHost(models) as host:
        assert [event["shape"] for event in log.events("zeros")] == [[3, 2]]
        assert len(log.events("random")) == 2
        assert [event["sum"] for event in log.events("file")] == [6.0]
        statistics = host.model("warm").statistics
        assert (statistics.success.count, statistics.execution_count) == (0, 0)
        (entry,) = [entry for entry in host.repository.index() if entry.name == "cold"]
        assert entry.reason == "Internal: warm-up 'c' failed: cold"


def test_labels_come_from_the_models_file(tmp_path: Path) -> None:
    output = 'output { name: "Y" data_type: TYPE_INT32 dims: 2 label_filename: "labels.txt" }'
    directory = write_model(tmp_path, "labelled", NUMBER % 1, output)
    (directory / "labels.txt").write_text("cat\ndog\n")
    write_model(tmp_path, "unlabelled", NUMBER % 1, output)
    with ModelHost(tmp_path) as host:
        assert host.repository.find("labelled").labels("Y") == ("cat", "dog")
        assert host.repository.find("labelled").labels("Z") == ()
        (entry,) = [entry for entry in host.repository.index() if entry.name == "unlabelled"]
        assert entry.reason is not None
        assert "failed to read the labels of 'Y'" in entry.reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "sometimes"}, "model control mode 'sometimes'"),
        ({"load_models": ["x"]}, "in the mode 'explicit' only"),
    ],
)
def test_repository_with_arguments_that_make_no_sense_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message), ModelHost(tmp_path, **options):
        pass


def test_repository_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no directory"), ModelHost(tmp_path / "none"):
        pass
