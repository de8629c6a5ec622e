"""Cancel tokens for ``generate`` of transformers.

    model.generate(**inputs, stopping_criteria=[CancelCriteria(token)])

Looked at after each new token. A prompt is read in one forward pass, which
``hooks.torch.cancel_between(model.model.layers, token)`` ends between two layers.
"""

from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteria

from disconnect_watch.token import CancelToken

__all__ = ["CancelCriteria"]


class CancelCriteria(StoppingCriteria):
    """Ends the rows whose tokens have fired; ``generate`` returns when all rows have ended.

    Until then transformers computes those that have ended along with the others, as it does
    after an end of text. What it returns is what there was by then, and
    ``token.raise_if_cancelled()`` tells that from an answer. Beams and several answers to a
    prompt share the prompt's token.

    Threads: ``generate`` may run in any.
    """

    def __init__(self, *tokens: CancelToken) -> None:
        """Take one token for the whole batch, or one for each of its prompts."""
        if not tokens:
            raise ValueError("CancelCriteria(): no token, give one, or one for each prompt")
        self._tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: Any) -> torch.Tensor:
        """Which rows end here.

        Args:
            input_ids: [num_rows, num_tokens], the rows of a prompt next to each other.

        Returns:
            [num_rows], bool, same device as ``input_ids``.

        Raises:
            ValueError: the rows are no multiple of the tokens.
        """
        num_rows = input_ids.shape[0]
        num_each, rest = divmod(num_rows, len(self._tokens))
        if rest:
            raise ValueError(
                f"CancelCriteria of {len(self._tokens)} tokens for {num_rows} rows: give one, or "
                "one for each prompt"
            )
        # Made on the device, with nothing to copy there, while nobody has left.
        ended = torch.zeros(num_rows, dtype=torch.bool, device=input_ids.device)
        for index, token in enumerate(self._tokens):
            if token.cancelled:
                ended[index * num_each : (index + 1) * num_each] = True
        return ended
