"""The looks within vLLM's steps, without vLLM: which flags fired, and when a step is given up."""

import logging

import pytest

from disconnect_watch import CancelToken
from disconnect_watch.backends.hooks.vllm._look import Look, flag_of
from disconnect_watch.backends.hooks.vllm._runner import GivenUp, Step
from disconnect_watch.remote import FLAG_KEY, FlagName, RemoteFlag, RemoteTables, name_of
from disconnect_watch.token import flag_table


class Params:
    """Sampling parameters, as far as they are looked at."""

    def __init__(self, name: object) -> None:
        self.extra_args = {FLAG_KEY: name}


def flags_of(tokens: dict[str, CancelToken]) -> dict[str, RemoteFlag]:
    tables = RemoteTables()
    return {name: tables.find(name_of(token)) for name, token in tokens.items()}


def test_those_that_fired_are_told_by_id() -> None:
    tokens = {name: CancelToken() for name in "abcd"}
    look = Look(flags_of(tokens))
    assert not look.has_fired()
    tokens["b"].cancel()
    tokens["d"].cancel()
    assert look.has_fired()
    assert look.fired() == ["b", "d"]


def test_nothing_to_look_at_has_not_fired() -> None:
    look = Look({})
    assert not look.has_fired()
    assert look.fired() == []


def test_a_slot_with_another_tenant_has_not_fired() -> None:
    token = CancelToken()
    flag = flags_of({"a": token})["a"]
    look = Look({"a": RemoteFlag(flag.table, flag.words, flag.slot, (token.generation + 1) << 8)})
    token.cancel()
    assert not look.has_fired()


def test_flags_of_several_tables_are_looked_at_together() -> None:
    token = CancelToken()
    other = memoryview(bytearray(b"\1\1\0\0")).cast("I")  # generation 1, reason 1
    look = Look({**flags_of({"a": token}), "b": RemoteFlag(flag_table(), other, 0, 1 << 8)})
    assert look.fired() == ["b"]
    token.cancel()
    assert look.fired() == ["a", "b"]


def test_parameters_name_a_flag() -> None:
    token = CancelToken()
    flag = flag_of(Params(list(name_of(token))))
    assert flag is not None
    token.cancel()
    assert flag.cancelled
    assert flag_of(None) is None
    assert flag_of(object()) is None


@pytest.mark.parametrize("name", ["text", [1, 2], [-1, -1, -1, -1], {}, 7])
def test_what_names_none_is_passed_over(name: object) -> None:
    assert flag_of(Params(name)) is None


def test_a_process_whose_flags_cannot_be_read_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nobody = FlagName(1 << 22, 3, 0, 1)  # beyond the greatest id of a process
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert flag_of(Params(list(nobody))) is None
    (record,) = caplog.records
    assert "cannot look at the flags of process 4194304" in record.getMessage()


def step_of(tokens: dict[str, CancelToken], num_tokens: dict[str, int]) -> Step:
    return Step(Look(flags_of(tokens)), num_tokens, num_layers=10)


def test_a_step_that_nobody_waits_for_is_given_up_at_its_last_layer_too() -> None:
    tokens = {name: CancelToken() for name in "ab"}
    step = step_of(tokens, {"a": 100, "b": 1})
    for _ in range(9):
        step.before_layer()
    for token in tokens.values():
        token.cancel()
    with pytest.raises(GivenUp) as caught:
        step.before_layer()
    assert caught.value.dead == ["a", "b"]


@pytest.mark.parametrize(("num_live", "is_worth_it"), [(99, True), (101, False)])
def test_a_step_is_given_up_where_that_is_less_work(num_live: int, is_worth_it: bool) -> None:
    # With five of ten layers left, who stays begins anew with ten.
    tokens = {"leaves": CancelToken()}
    step = step_of(tokens, {"leaves": 100, "stays, and has no flag": num_live})
    for _ in range(5):
        step.before_layer()
    tokens["leaves"].cancel()
    if is_worth_it:
        with pytest.raises(GivenUp) as caught:
            step.before_layer()
        assert caught.value.dead == ["leaves"]
    else:
        step.before_layer()
