"""The configuration as ``auto_complete_config`` sees and completes it."""

import json
from typing import Any

__all__ = ["ModelConfig"]


class ModelConfig:
    """A configuration that a model may complete. What a file says stays as it is.

    Args:
        model_config: as JSON.
    """

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """The configuration as it is now."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest batch, unless a larger one was set.

        Raises:
            ValueError: a smaller one was set.
        """
        was = self._model_config.get("max_batch_size", 0)
        if was > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {was}, but in auto_complete_config "
                f"function for model '{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Form batches, unless the configuration says how requests are scheduled.

        Raises:
            ValueError: it says another way.
        """
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._model_config:
                raise ValueError(
                    f"configuration specified {other}, but in auto_complete_config function for "
                    f"model '{self._name}' tried to set dynamic_batching"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, bool]) -> None:
        """Say whether a request has any number of responses, as ``{"decoupled": True}``.

        Raises:
            ValueError: another property, or not what the configuration says.
        """
        if unknown := set(transaction_policy_dict) - {"decoupled"}:
            raise ValueError(
                f"model transaction policy property in auto_complete_config function for model "
                f"'{self._name}' contains property other than 'decoupled': {sorted(unknown)}"
            )
        policy = self._model_config.get("model_transaction_policy")
        if policy and policy != transaction_policy_dict:
            raise ValueError(
                f"configuration of model '{self._name}' has the transaction policy {policy}, "
                f"auto_complete_config would make it {transaction_policy_dict}"
            )
        self._model_config["model_transaction_policy"] = transaction_policy_dict

    def add_input(self, input: dict[str, Any]) -> None:  # noqa: A002  a name models may use
        """Add an input, unless the configuration has it.

        Raises:
            ValueError: a property is missing or unknown, or it is there and differs.
        """
        self._add("input", input, {"name", "data_type", "dims", "optional"})

    def add_output(self, output: dict[str, Any]) -> None:
        """Add an output, unless the configuration has it.

        Raises:
            ValueError: as for ``add_input``.
        """
        self._add("output", output, {"name", "data_type", "dims"})

    @property
    def _name(self) -> str:
        return str(self._model_config.get("name", ""))

    def _add(self, kind: str, tensor: dict[str, Any], known: set[str]) -> None:
        where = f"{kind} in auto_complete_config function for model '{self._name}'"
        if unknown := set(tensor) - known:
            raise ValueError(f"{where} contains properties that are not known: {sorted(unknown)}")
        for required in ("name", "data_type", "dims"):
            if required not in tensor:
                raise ValueError(f"{where} is missing '{required}' property")
        present = self._model_config.setdefault(kind, [])
        for other in present:
            if other["name"] != tensor["name"]:
                continue
            for key, value in tensor.items():
                stated = other.get(key)
                if key == "dims":
                    value, stated = list(map(int, value)), list(map(int, stated or []))
                if key == "optional":
                    stated = bool(stated)
                if stated and stated != value:
                    raise ValueError(
                        f"unable to load model '{self._name}', configuration expects {key} "
                        f"{stated} for {kind} '{tensor['name']}' but model provides {value}"
                    )
                other[key] = tensor[key]
            return
        present.append(dict(tensor))
