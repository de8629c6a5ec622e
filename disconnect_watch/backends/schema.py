"""The message classes of a model configuration, made from ``model_config.proto``.

They are built when they are first needed rather than generated beforehand, because
generated code runs with few versions of protobuf only; and in a pool of their own, since
a client library in the same process may bring a schema with the same names.
"""

import re
from functools import cache
from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["model_config_class"]

_SCALARS = {
    name: getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("bool", "double", "float", "int32", "int64", "string", "uint32", "uint64")
}
_TOKEN = re.compile(r"map<(\w+), ([\w.]+)>|\"[^\"]*\"|[\w.]+|[{}=;]")


@cache
def model_config_class() -> Any:
    """The class ``ModelConfig``. Its messages are what ``ServedModel.config`` holds."""
    source = files("disconnect_watch.backends").joinpath("model_config.proto").read_text()
    pool = descriptor_pool.DescriptorPool()
    file = _Parser(source).file
    pool.Add(file)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName(f"{file.package}.ModelConfig")
    )


class _Parser:
    """Reads the part of the proto3 language that the schema is written in.

    Types of other messages are written in full, from the package down.
    """

    def __init__(self, source: str) -> None:
        self._tokens = list(_TOKEN.finditer(re.sub(r"//.*", "", source)))
        self._at = 0
        self.file = descriptor_pb2.FileDescriptorProto(name="model_config.proto")
        while self._at < len(self._tokens):
            word = self._next()
            if word == "syntax":
                self._next()
                self.file.syntax = self._next().strip('"')
                self._next()
            elif word == "package":
                self.file.package = self._next()
                self._next()
            elif word == "enum":
                self._enum(self.file.enum_type.add())
            else:
                assert word == "message", word
                self._message(self.file.message_type.add(), f".{self.file.package}")

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1].group()

    def _enum(self, enum: Any) -> None:
        enum.name = self._next()
        self._next()
        while (word := self._next()) != "}":
            self._next()
            enum.value.add(name=word, number=int(self._next()))
            self._next()

    def _message(self, message: Any, scope: str) -> None:
        message.name = self._next()
        scope += f".{message.name}"
        self._next()
        while (word := self._next()) != "}":
            if word == "message":
                self._message(message.nested_type.add(), scope)
            elif word == "enum":
                self._enum(message.enum_type.add())
            elif word == "oneof":
                index = len(message.oneof_decl)
                message.oneof_decl.add(name=self._next())
                self._next()
                while (word := self._next()) != "}":
                    self._field(message, word, scope).oneof_index = index
            else:
                self._field(message, word, scope)

    def _field(self, message: Any, word: str, scope: str) -> Any:
        kind = descriptor_pb2.FieldDescriptorProto
        label = kind.LABEL_OPTIONAL
        key_and_value = self._tokens[self._at - 1].groups()
        if word == "repeated":
            label = kind.LABEL_REPEATED
            word = self._next()
        name = self._next()
        self._next()
        field = message.field.add(name=name, number=int(self._next()), label=label)
        self._next()
        if key_and_value[0]:
            # A map is a list of entries, each a message of its own.
            entry = message.nested_type.add(
                name="".join(part.title() for part in name.split("_")) + "Entry"
            )
            entry.options.map_entry = True
            for number, (part, type_name) in enumerate(
                zip(("key", "value"), key_and_value, strict=True), 1
            ):
                self._type(
                    entry.field.add(name=part, number=number, label=kind.LABEL_OPTIONAL), type_name
                )
            field.label = kind.LABEL_REPEATED
            word = f"{scope}.{entry.name}"
        self._type(field, word)
        return field

    def _type(self, field: Any, name: str) -> None:
        if name in _SCALARS:
            field.type = _SCALARS[name]
        else:
            field.type_name = name if name.startswith(".") else f".{self.file.package}.{name}"
