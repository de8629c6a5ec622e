"""What is known of one response; its document and its events follow from that.

Whoever streams a response, from its beginning or from the middle, while it runs or from a store
after a restart, is told events that are computed from here, and so the same ones. They are
numbered from 0:

    created, [queued], in_progress, output_item.added, content_part.added, output_text.delta ...,
    output_text.done, content_part.done, output_item.done, completed or incomplete

One of the background is queued until the first output is there; another begins at once. One
that failed has ``failed`` after whatever was there before, and one that was cancelled nothing:
the API has no event for it.

Source: OpenAI's Responses API, streaming events.
"""

from typing import Any, Literal, Self

import msgspec

__all__ = ["Ending", "Piece", "Transcript"]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """What one step added: text, and how likely its tokens were if that was asked for."""

    text: str
    logprobs: list[dict[str, Any]] = []


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a response ended; there is one, and it stays.

    Attributes:
        at: seconds since the epoch.
        usage: numbers of tokens; None if it did not come to be generated.
        error: ``code`` and ``message``, of one that failed.
        incomplete_reason: why one that is incomplete stopped.
        is_cut: whether it had said more than is known, to whoever listened.
    """

    status: Literal["completed", "incomplete", "failed", "cancelled"]
    at: int
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    incomplete_reason: str | None = None
    is_cut: bool = False


class Transcript(msgspec.Struct, kw_only=True):
    """One response, as far as it has come.

    Attributes:
        head: what of its document does not change.
        input_items: what was asked, see ``items.items_of``.
        has_begun: whether it is told to be in progress.
        has_item: whether its message has begun.
    """

    head: dict[str, Any]
    input_items: list[dict[str, Any]]
    pieces: list[Piece] = []
    has_begun: bool = False
    has_item: bool = False
    ending: Ending | None = None

    @property
    def response_id(self) -> str:
        response_id: str = self.head["id"]
        return response_id

    @property
    def is_background(self) -> bool:
        is_background: bool = self.head["background"]
        return is_background

    @property
    def status(self) -> str:
        if self.ending is not None:
            return self.ending.status
        return "in_progress" if self.has_begun else "queued"

    def add(self, piece: Piece) -> None:
        """Take what a step brought; the first makes it be in progress."""
        self.has_begun = self.has_item = True
        if piece.text or piece.logprobs:
            self.pieces.append(piece)

    def ended(self, ending: Ending) -> Self:
        """The same with its end."""
        is_whole = ending.status in ("completed", "incomplete")
        return msgspec.structs.replace(
            self,
            ending=ending,
            has_begun=self.has_begun or is_whole,
            has_item=self.has_item or is_whole,
        )

    def document(self) -> dict[str, Any]:
        """The response as it is retrieved."""
        ending = self.ending
        is_incomplete = ending is not None and ending.incomplete_reason is not None
        return {
            **self.head,
            "status": self.status,
            "completed_at": ending.at
            if ending is not None and ending.status == "completed"
            else None,
            "error": ending and ending.error,
            "incomplete_details": {"reason": ending.incomplete_reason}
            if ending is not None and is_incomplete
            else None,
            "output": self.output(),
            "usage": ending and ending.usage,
        }

    def first_document(self) -> dict[str, Any]:
        """The response as it was when it was made."""
        return self._document_at(is_queued=self.is_background)

    def output(self) -> list[dict[str, Any]]:
        """What was said so far, as items."""
        return [self._item([self._part()])] if self.has_item else []

    def event(self, number: int) -> dict[str, Any] | None:
        """The event of that number, from 0; None if there is none yet, or none at all."""
        names = self._names_before()
        if number < len(names):
            event = self._opening(names[number])
        elif number < len(names) + len(self.pieces):
            piece = self.pieces[number - len(names)]
            event = self._place("response.output_text.delta") | {
                "delta": piece.text,
                "logprobs": piece.logprobs,
            }
        else:
            rest = self._names_after()
            place = number - len(names) - len(self.pieces)
            if place >= len(rest):
                return None
            event = self._closing(rest[place])
        return event | {"sequence_number": number}

    def cut_event(self, number: int) -> dict[str, Any] | None:
        """The end for who has heard more events than are known; None where nothing was lost."""
        if self.ending is None or not self.ending.is_cut:
            return None
        return self._closing("response.failed") | {"sequence_number": number}

    def _names_before(self) -> tuple[str, ...]:
        """Of the events before the text; grows at its end only, and before the first piece."""
        return (
            "response.created",
            *(("response.queued",) if self.is_background else ()),
            *(("response.in_progress",) if self.has_begun else ()),
            *(
                ("response.output_item.added", "response.content_part.added")
                if self.has_item
                else ()
            ),
        )

    def _names_after(self) -> tuple[str, ...]:
        if self.ending is None or self.ending.status == "cancelled":
            return ()
        if self.ending.status == "failed":
            return ("response.failed",)
        return (
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            f"response.{self.ending.status}",
        )

    def _opening(self, name: str) -> dict[str, Any]:
        if name == "response.output_item.added":
            item = self._item([]) | {"status": "in_progress"}
            return {"type": name, "output_index": 0, "item": item}
        if name == "response.content_part.added":
            return self._place(name) | {"part": _part("", [])}
        is_queued = self.is_background and name != "response.in_progress"
        return {"type": name, "response": self._document_at(is_queued=is_queued)}

    def _document_at(self, *, is_queued: bool) -> dict[str, Any]:
        """The response before there was anything of it."""
        then = msgspec.structs.replace(
            self, pieces=[], has_begun=not is_queued, has_item=False, ending=None
        )
        return then.document()

    def _closing(self, name: str) -> dict[str, Any]:
        if name == "response.output_text.done":
            part = self._part()
            return self._place(name) | {"text": part["text"], "logprobs": part["logprobs"]}
        if name == "response.content_part.done":
            return self._place(name) | {"part": self._part()}
        if name == "response.output_item.done":
            return {"type": name, "output_index": 0, "item": self._item([self._part()])}
        return {"type": name, "response": self.document()}

    def _place(self, name: str) -> dict[str, Any]:
        return {"type": name, "item_id": self._item_id, "output_index": 0, "content_index": 0}

    @property
    def _item_id(self) -> str:
        return self.response_id.replace("resp_", "msg_", 1)

    def _item(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        statuses = {"queued": "in_progress", "in_progress": "in_progress", "completed": "completed"}
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": statuses.get(self.status, "incomplete"),
            "content": content,
        }

    def _part(self) -> dict[str, Any]:
        return _part(
            "".join(piece.text for piece in self.pieces),
            [entry for piece in self.pieces for entry in piece.logprobs],
        )


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
