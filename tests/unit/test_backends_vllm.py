"""The looks within vLLM's steps, without vLLM: which flags fired, and when a step is given up."""

import logging

import pytest

from disconnect_watch import CancelToken
from disconnect_watch.backends.hooks.vllm._look import Look, flags_of
from disconnect_watch.backends.hooks.vllm._runner import GivenUp, Step
from disconnect_watch.remote import FLAG_KEY, FlagName, RemoteFlag, RemoteTables, name_of
from disconnect_watch.token import flag_table


class Params:
    """Sampling parameters, as far as they are looked at."""

    def __init__(self, name: object) -> None:
        self.extra_args = {FLAG_KEY: name}


def flags_by_id(tokens: dict[str, CancelToken]) -> dict[str, list[RemoteFlag]]:
    tables = RemoteTables()
    return {name: [tables.find(name_of(token))] for name, token in tokens.items()}


def test_those_that_fired_are_told_by_id() -> None:
    tokens = {name: CancelToken() for name in "abcd"}
    look = Look(flags_by_id(tokens))
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
    (flag,) = flags_by_id({"a": token})["a"]
    other = RemoteFlag(flag.table, flag.words, flag.slot, (token.generation + 1) << 8)
    look = Look({"a": [other]})
    token.cancel()
    assert not look.has_fired()


def test_flags_of_several_tables_are_looked_at_together() -> None:
    token = CancelToken()
    other = memoryview(bytearray(b"\1\1\0\0")).cast("I")  # generation 1, reason 1
    look = Look({**flags_by_id({"a": token}), "b": [RemoteFlag(flag_table(), other, 0, 1 << 8)]})
    assert look.fired() == ["b"]
    token.cancel()
    assert look.fired() == ["a", "b"]


def test_parameters_name_a_flag() -> None:
    token = CancelToken()
    (flag,) = flags_of(Params([list(name_of(token))]))
    token.cancel()
    assert flag.cancelled
    assert flags_of(None) == []
    assert flags_of(object()) == []


@pytest.mark.parametrize("name", ["text", [1, 2], [-1, -1, -1, -1], {}, 7, None])
def test_what_names_none_is_passed_over(name: object) -> None:
    token = CancelToken()
    assert flags_of(Params(name)) == []
    assert len(flags_of(Params([name, list(name_of(token))]))) == 1


def test_one_of_two_flags_is_enough_and_is_told_once() -> None:
    client, own = CancelToken(), CancelToken()
    tables = RemoteTables()
    look = Look({"a": [tables.find(name_of(client)), tables.find(name_of(own))]})
    own.cancel()
    assert look.fired() == ["a"]
    client.cancel()
    assert look.fired() == ["a"]


def test_a_process_whose_flags_cannot_be_read_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nobody = FlagName(1 << 22, 3, 0, 1)  # beyond the greatest id of a process
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert flags_of(Params([list(nobody)])) == []
    (record,) = caplog.records
    assert "cannot look at the flags of process 4194304" in record.getMessage()


def step_of(tokens: dict[str, CancelToken], num_tokens: dict[str, int]) -> Step:
    return Step(Look(flags_by_id(tokens)), num_tokens, num_layers=10)


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
