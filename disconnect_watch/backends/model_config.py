"""A model's configuration: read from ``config.pbtxt``, completed, checked, shown as JSON.

A configuration may leave nearly everything out. ``complete`` fills in what Triton fills in,
so that what a client reads from ``/config`` and what runs are the same.
"""

import json
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format

from disconnect_watch.backends.base import Tensor
from disconnect_watch.backends.datatypes import BY_CONFIG_NAME
from disconnect_watch.backends.schema import model_config_class
from disconnect_watch.backends.unsupported import refused

__all__ = [
    "ENGINE",
    "ConfigError",
    "check",
    "complete",
    "config_document",
    "datatype_of",
    "from_document",
    "inputs_of",
    "outputs_of",
    "parameters_of",
    "read_config",
]

#: The backend of models that our own engine runs.
ENGINE = "disconnect_watch_engine"

#: In microseconds, as Triton's default for a sequence that says nothing.
MAX_SEQUENCE_IDLE_US = 1_000_000


class ConfigError(ValueError):
    """A model configuration that can't be read or makes no sense."""


def read_config(directory: Path) -> Any:
    """Read ``config.pbtxt`` of a model's directory; an empty configuration if there is none.

    Raises:
        ConfigError: it is no text of a ``ModelConfig``, or the file can't be read.
    """
    path = directory / "config.pbtxt"
    config = model_config_class()()
    try:
        text_format.Parse(path.read_text(), config)
    except FileNotFoundError:
        pass
    except (text_format.ParseError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"failed to read {path}: {error}") from error
    return config


def from_document(document: str | dict[str, Any]) -> Any:
    """A configuration from its JSON.

    Raises:
        ConfigError: it is no JSON, or has a field that is not known.
    """
    try:
        loaded = json.loads(document) if isinstance(document, str) else document
        return json_format.ParseDict(loaded, model_config_class()())
    except (ValueError, json_format.ParseError) as error:
        raise ConfigError(f"failed to read the model configuration: {error}") from error


def config_document(config: Any) -> dict[str, Any]:
    """The configuration as JSON, with every field that has a default.

    Integers are numbers, where protobuf's own JSON has those of 64 bits as strings.
    """
    document: dict[str, Any] = json_format.MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _numbers(document, config.DESCRIPTOR)
    return document


def _numbers(document: dict[str, Any], descriptor: Any) -> None:
    for field in descriptor.fields:
        value = document.get(field.name)
        if value is None:
            continue
        if field.message_type is None:
            if field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
                document[field.name] = [int(n) for n in value] if field.is_repeated else int(value)
        elif field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name["value"].message_type
            for item in value.values() if entry is not None else ():
                _numbers(item, entry)
        else:
            for item in value if field.is_repeated else [value]:
                _numbers(item, field.message_type)


def complete(config: Any, name: str) -> None:
    """Fill in what was left out of the configuration of the model in directory ``name``."""
    config.name = config.name or name
    if not config.backend and not config.platform and not config.HasField("ensemble_scheduling"):
        config.backend = "python"
    if config.HasField("ensemble_scheduling"):
        config.platform = config.platform or "ensemble"
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    optimization = config.optimization
    for pinned in ("input_pinned_memory", "output_pinned_memory"):
        if not optimization.HasField(pinned):
            getattr(optimization, pinned).enable = True
    if config.HasField("dynamic_batching"):
        preferred = config.dynamic_batching.preferred_batch_size
        if not preferred and config.max_batch_size > 0:
            preferred.append(config.max_batch_size)
    if config.HasField("sequence_batching"):
        sequences = config.sequence_batching
        sequences.max_sequence_idle_microseconds = (
            sequences.max_sequence_idle_microseconds or MAX_SEQUENCE_IDLE_US
        )
        if sequences.WhichOneof("strategy_choice") is None:
            sequences.direct.SetInParent()
    if config.platform == "ensemble":
        return
    config.default_model_filename = config.default_model_filename or "model.py"
    if not config.instance_group:
        config.instance_group.add()
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        group.count = group.count or 1
        if group.kind == 0:
            group.kind = group.KIND_CPU


def check(config: Any, name: str) -> None:
    """See that a complete configuration makes sense.

    Raises:
        ConfigError: it does not; the message says what to change.
    """
    if config.name != name:
        raise ConfigError(
            f"unexpected directory name '{name}' for model '{config.name}', "
            "directory name must equal model name"
        )
    if config.max_batch_size < 0:
        raise ConfigError(f"'max_batch_size' must be non-negative value for {name}")
    if config.platform != "ensemble" and config.backend not in ("python", ENGINE):
        raise ConfigError(
            f"model '{name}' is for the backend '{config.backend or config.platform}', "
            f"here 'python', '{ENGINE}' and ensembles are run"
        )
    for what, tensors in (("input", config.input), ("output", config.output)):
        names: set[str] = set()
        for tensor in tensors:
            _check_tensor(name, what, tensor)
            if tensor.name in names:
                raise ConfigError(f"model '{name}' has more than one {what} '{tensor.name}'")
            names.add(tensor.name)
    for group in config.instance_group:
        if group.count < 1:
            raise ConfigError(
                f"instance group '{group.name}' of model '{name}' has a count of {group.count}, "
                "it must be 1 or more"
            )
    if config.HasField("dynamic_batching"):
        _check_batching(config)
    for field in refused(config):
        raise ConfigError(f"model '{name}' can't be served with {field}")


def _check_tensor(name: str, what: str, tensor: Any) -> None:
    if not tensor.name:
        raise ConfigError(f"model {what} must specify 'name' for {name}")
    if _kind_name(tensor.data_type) not in BY_CONFIG_NAME:
        raise ConfigError(f"model {what} '{tensor.name}' must specify 'data_type' for {name}")
    if not tensor.dims:
        raise ConfigError(f"model {what} '{tensor.name}' must specify 'dims' for {name}")
    for dims in (tensor.dims, tensor.reshape.shape):
        if any(dim < 1 and dim != -1 for dim in dims):
            raise ConfigError(
                f"model {what} '{tensor.name}' has dims {list(dims)} for {name}, each must be "
                "positive, or -1 for any size"
            )
    if tensor.HasField("reshape"):
        fixed, shaped = _volume(tensor.dims), _volume(tensor.reshape.shape)
        wild, reshaped = list(tensor.dims).count(-1), list(tensor.reshape.shape).count(-1)
        if wild != reshaped or fixed != shaped:
            raise ConfigError(
                f"model {what} '{tensor.name}' has dims {list(tensor.dims)} and is reshaped to "
                f"{list(tensor.reshape.shape)} for {name}, both must hold as many elements"
            )


def _check_batching(config: Any) -> None:
    batching = config.dynamic_batching
    if config.max_batch_size == 0 and batching.preferred_batch_size:
        raise ConfigError(
            f"dynamic batching preferred size must be <= max batch size for {config.name}"
        )
    for size in batching.preferred_batch_size:
        if size < 1 or size > config.max_batch_size:
            raise ConfigError(
                f"dynamic batching preferred size must be positive and <= max batch size for "
                f"{config.name}, it is {size}"
            )
    levels = batching.priority_levels
    if levels and not 1 <= batching.default_priority_level <= levels:
        raise ConfigError(
            f"default priority level must be in range [1, {levels}] for {config.name}, "
            f"it is {batching.default_priority_level}"
        )
    for level in batching.priority_queue_policy:
        if not 1 <= level <= levels:
            raise ConfigError(
                f"priority queue policy must be for a level in range [1, {levels}] for "
                f"{config.name}, it is for {level}"
            )


def _volume(dims: Any) -> int:
    volume = 1
    for dim in dims:
        volume *= dim if dim > 0 else 1
    return volume


def _kind_name(data_type: int) -> str:
    kinds = model_config_class().DESCRIPTOR.file.enum_types_by_name["DataType"]
    return str(kinds.values_by_number[data_type].name)


def datatype_of(data_type: int) -> str:
    """The name on the wire of a ``DataType`` of the schema."""
    return BY_CONFIG_NAME[_kind_name(data_type)].name


def _tensors(config: Any, tensors: Any) -> tuple[Tensor, ...]:
    batch = (-1,) if config.max_batch_size > 0 else ()
    return tuple(
        Tensor(
            tensor.name,
            datatype_of(tensor.data_type),
            (*batch, *tensor.dims),
            bool(getattr(tensor, "optional", False)),
        )
        for tensor in tensors
    )


def inputs_of(config: Any) -> tuple[Tensor, ...]:
    """The inputs as metadata has them."""
    return _tensors(config, config.input)


def outputs_of(config: Any) -> tuple[Tensor, ...]:
    """The outputs as metadata has them."""
    return _tensors(config, config.output)


def parameters_of(config: Any) -> dict[str, str]:
    """The ``parameters`` of a configuration, whose values are strings all."""
    return {key: value.string_value for key, value in config.parameters.items()}
