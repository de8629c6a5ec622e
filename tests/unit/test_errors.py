"""The error family: who can be caught as what, and what a message says."""

import inspect
import pickle

import pytest

from disconnect_watch import ClientDisconnected, Reason, attach, errors, is_gone

PARENTS = {
    "DisconnectWatchError": Exception,
    "ClosedError": errors.DisconnectWatchError,
    "StaleWatchError": LookupError,
    "UnsupportedSocketError": ValueError,
    "ForkedError": errors.DisconnectWatchError,
    "ClientDisconnected": ConnectionError,
}


def test_family_is_whole_and_has_the_parents_it_promises() -> None:
    assert set(errors.__all__) == set(PARENTS)
    for name, parent in PARENTS.items():
        error = getattr(errors, name)
        assert issubclass(error, parent)
        assert issubclass(error, errors.DisconnectWatchError)
        assert inspect.getdoc(error)


@pytest.mark.parametrize("reason", Reason)
def test_client_disconnected_carries_reason_and_time(reason: Reason) -> None:
    error = ClientDisconnected(reason, 12.5)
    assert error.reason is reason
    assert error.detected_at == 12.5
    assert str(error) == f"client disconnected: {reason.value}"


def test_client_disconnected_passes_between_processes() -> None:
    error = pickle.loads(pickle.dumps(ClientDisconnected(Reason.RESET, 12.5)))
    assert (error.reason, error.detected_at) == (Reason.RESET, 12.5)


@pytest.mark.parametrize("call", [attach, is_gone])
def test_messages_name_the_value_and_what_was_tried(call: object) -> None:
    assert callable(call)
    with pytest.raises(OSError, match="987654") as caught:
        call(987654)
    text = str(caught.value)
    assert not text.endswith(".")
    assert "fd" in text


def test_a_value_is_shown_as_json_and_no_longer_than_a_message_needs() -> None:
    assert [errors.shown(value) for value in (None, True, "é", [1, 0.5])] == [
        "null",
        "true",
        '"é"',
        "[1, 0.5]",
    ]
    assert errors.shown("x" * 78) == f'"{"x" * 78}"'
    assert errors.shown("x" * 79) == f'"{"x" * 76}...'
    assert errors.shown(object()) == "<object>"
    assert errors.shown(10**5000) == "<int>"  # Python writes no number of so many digits
