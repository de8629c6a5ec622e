"""A configuration and files that a client gives with a load, in place of the repository's."""

import base64
import binascii
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from disconnect_watch.backends.infer import Code, InferError
from disconnect_watch.backends.model_config import ConfigError, from_document

__all__ = ["Overrides"]


@dataclass(slots=True)
class Overrides:
    """What takes the place of a model's own.

    Attributes:
        config: not completed yet.
        directory: made for the files, None without any; the repository's is not looked at.
    """

    config: Any
    directory: Path | None

    @classmethod
    def parse(cls, name: str, parameters: dict[str, Any]) -> Self | None:
        """What the parameters of a load ask for; None if nothing.

        Raises:
            InferError: INVALID_ARG, they can't be understood.
        """
        files: dict[str, Any] = {}
        config = None
        for key, value in parameters.items():
            if key == "config":
                try:
                    config = from_document(value)
                except ConfigError as error:
                    raise InferError(Code.INVALID_ARG, str(error)) from error
            elif key.startswith("file:"):
                files[key.removeprefix("file:")] = value
            else:
                raise InferError(Code.INTERNAL, "unexpected error on creating Triton parameter")
        if files and config is None:
            raise InferError(
                Code.INVALID_ARG,
                f"failed to load '{name}', override model directory must be used with a model "
                "config, give 'config' too",
            )
        if config is None:
            return None
        return cls(config, _write(files) if files else None)

    def close(self) -> None:
        """Remove the files. Idempotent."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


def _write(files: dict[str, Any]) -> Path:
    root = Path(tempfile.mkdtemp(prefix="disconnect-watch-model-"))
    try:
        for name, value in files.items():
            path = (root / name).resolve()
            if not path.is_relative_to(root.resolve()) or path == root.resolve():
                raise InferError(
                    Code.INVALID_ARG, f"file '{name}' lies outside of the model's directory"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(
                value if isinstance(value, bytes) else base64.b64decode(value, validate=True)
            )
    except (binascii.Error, TypeError, ValueError, OSError) as error:
        shutil.rmtree(root)
        raise InferError(Code.INVALID_ARG, f"file '{name}' can't be written: {error}") from error
    except InferError:
        shutil.rmtree(root)
        raise
    return root
