"""A model's configuration: read, completed and checked as Triton does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disconnect_watch.backends.model_config import (
    ConfigError,
    check,
    complete,
    config_document,
    from_document,
    inputs_of,
    read_config,
)
from disconnect_watch.backends.schema import model_config_class
from disconnect_watch.backends.unsupported import passed_over
from disconnect_watch.backends.versions import choose_versions, versions_in

MODELS = Path(__file__).parents[1] / "triton" / "models"


def fields_of(message: Any) -> Iterator[tuple[object, ...]]:
    for field in message.fields:
        yield message.name, field.name, field.number, field.type, field.is_repeated
    for nested in message.nested_types:
        yield from fields_of(nested)


def config_of(text: str, name: str = "m", *, tmp_path: Path) -> Any:
    (tmp_path / "config.pbtxt").write_text(text)
    config = read_config(tmp_path)
    complete(config, name)
    check(config, name)
    return config


def test_schema_has_the_published_names_and_numbers() -> None:
    from tritonclient.grpc import model_config_pb2  # type: ignore[import-untyped]

    published = model_config_pb2.DESCRIPTOR.message_types_by_name.values()
    ours = model_config_class().DESCRIPTOR.file.message_types_by_name.values()
    assert {field for message in ours for field in fields_of(message)} == {
        field for message in published for field in fields_of(message)
    }


@pytest.mark.parametrize("name", sorted(path.name for path in MODELS.iterdir()))
def test_configuration_of_each_model_is_read_and_shown_as_it_was_written(name: str) -> None:
    config = read_config(MODELS / name)
    complete(config, name)
    check(config, name)
    assert from_document(json.dumps(config_document(config))) == config


def test_configuration_is_shown_as_triton_shows_it() -> None:
    config = read_config(MODELS / "simple")
    complete(config, "simple")
    shown = config_document(config)
    assert shown["version_policy"] == {"latest": {"num_versions": 1}}
    assert shown["input"][0]["dims"] == [16]
    assert shown["instance_group"][0]["name"] == "simple_0"
    assert shown["optimization"]["input_pinned_memory"] == {"enable": True}
    assert shown["default_model_filename"] == "model.py"
    assert "dynamic_batching" not in shown


def test_configuration_that_says_nothing_is_a_python_model(tmp_path: Path) -> None:
    config = config_of("", tmp_path=tmp_path)
    assert (config.name, config.backend, config.instance_group[0].count) == ("m", "python", 1)


def test_shapes_have_the_batch_where_there_is_one(tmp_path: Path) -> None:
    one = 'input { name: "x" data_type: TYPE_FP32 dims: 4 }'
    assert inputs_of(config_of(one, tmp_path=tmp_path))[0].shape == (4,)
    assert inputs_of(config_of(f"{one} max_batch_size: 2", tmp_path=tmp_path))[0].shape == (-1, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_size: many", "failed to read .*config.pbtxt: 1:17"),
        ('colour: "red"', 'no field named "colour"'),
        ('name: "other"', "directory name must equal model name"),
        ("max_batch_size: -1", "must be non-negative"),
        ('backend: "onnxruntime"', "is for the backend 'onnxruntime'"),
        ('input { data_type: TYPE_FP32 dims: 1 name: "" }', "must specify 'name'"),
        ('input { name: "x" dims: 1 }', "'x' must specify 'data_type'"),
        ('input { name: "x" data_type: TYPE_FP32 }', "'x' must specify 'dims'"),
        ('output { name: "x" data_type: TYPE_FP32 dims: 0 }', "each must be positive, or -1"),
        (
            'input { name: "x" data_type: TYPE_FP32 dims: 4 reshape { shape: [2, 3] } }',
            "both must hold as many elements",
        ),
        (
            'input { name: "x" data_type: TYPE_FP32 dims: 4 }' * 2,
            "has more than one input 'x'",
        ),
        ("instance_group { count: -2 }", "a count of -2"),
        ("max_batch_size: 4 dynamic_batching { preferred_batch_size: 8 }", "it is 8"),
        ("dynamic_batching { preferred_batch_size: 8 }", "must be <= max batch size"),
        ("dynamic_batching { priority_levels: 2 }", r"in range \[1, 2\] for m, it is 0"),
        (
            "dynamic_batching { priority_levels: 1 default_priority_level: 1 "
            "priority_queue_policy { key: 3 value {} } }",
            "it is for 3",
        ),
        (
            'sequence_batching { state { input_name: "i" output_name: "o" } }',
            "can't be served with sequence_batching.state: Python models keep",
        ),
        ("sequence_batching { iterative_sequence: true }", "iterative_sequence: a request is not"),
        ("instance_group [ {}, { passive: true } ]", "instance_group.passive"),
        ("batch_input { kind: BATCH_ITEM_SHAPE }", "with batch_input"),
        ('model_repository_agents { agents { name: "checksum" } }', "model_repository_agents"),
        ('model_operations { op_library_filename: "x" }', "model_operations"),
        (
            'platform: "ensemble" ensemble_scheduling {} '
            'input { name: "x" data_type: TYPE_FP32 dims: 1 reshape { shape: [] } }',
            "reshape: an ensemble",
        ),
    ],
)
def test_configuration_that_makes_no_sense_is_refused(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(text, tmp_path=tmp_path)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("max_batch_size: 4 dynamic_batching { preserve_ordering: true }", ["dynamic_batching"]),
        ("response_cache { enable: true }", ["response_cache.enable"]),
        ("instance_group { rate_limiter { priority: 1 } }", ["instance_group.rate_limiter"]),
        ("sequence_batching { oldest { preferred_batch_size: 2 } }", ["sequence_batching.oldest"]),
        ('parameters { key: "EXECUTION_ENV_PATH" value {} }', ["parameters.EXECUTION_ENV_PATH"]),
        ("optimization { graph { level: 1 } cuda { graphs: true } }", ["optimization"] * 2),
        ("", []),
    ],
)
def test_what_has_no_effect_is_named(text: str, fields: list[str], tmp_path: Path) -> None:
    named = list(passed_over(config_of(text, tmp_path=tmp_path)))
    assert len(named) == len(fields)
    assert all(each.startswith(field) for each, field in zip(named, fields, strict=True))


@pytest.mark.parametrize("document", ["{", '{"colour": 1}', '{"max_batch_size": "x"}', "[1]"])
def test_document_that_is_no_configuration_is_refused(document: str) -> None:
    with pytest.raises(ConfigError, match="failed to read the model configuration"):
        from_document(document)


def test_versions_are_the_directories_named_by_a_number(tmp_path: Path) -> None:
    for name in ("1", "10", "2", "02", "0", "x", "1x"):
        (tmp_path / name).mkdir()
    (tmp_path / "7").write_text("no directory")
    assert versions_in(tmp_path) == [1, 2, 10]


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [
        ({}, [10]),
        ({"latest": {"num_versions": 2}}, [2, 10]),
        ({"all": {}}, [1, 2, 10]),
        ({"specific": {"versions": [1, 7]}}, [1]),
    ],
)
def test_policy_chooses_among_the_versions(policy: dict[str, Any], chosen: list[int]) -> None:
    config = from_document({"version_policy": policy})
    assert choose_versions(config.version_policy, [1, 2, 10]) == chosen
