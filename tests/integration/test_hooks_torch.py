"""Forward passes of torch that end between two layers, and leave the model as it was."""

import asyncio
import threading

import pytest
import torch
from torch import nn

from disconnect_watch import CancelToken, ClientDisconnected, Reason
from disconnect_watch.backends.hooks.torch import LayerLook, cancel_between
from tests.support.net import PATIENCE


class Layer(nn.Module):
    """Counts its passes, and cancels a token in the pass that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_passes = 0
        self.cancels: CancelToken | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_passes += 1
        if self.cancels is not None:
            self.cancels.cancel(Reason.FIN)
        return x + 1


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(4)))


@pytest.fixture
def token() -> CancelToken:
    return CancelToken()


def passes_of(model: nn.Sequential) -> list[int]:
    return [layer.num_passes for layer in model if isinstance(layer, Layer)]


def run(model: nn.Sequential) -> float:
    return float(model(torch.zeros(())))


def test_a_pass_ends_before_the_next_layer_once_the_token_fires(
    model: nn.Sequential, token: CancelToken
) -> None:
    second = model[1]
    assert isinstance(second, Layer)
    second.cancels = token
    with pytest.raises(ClientDisconnected) as raised, cancel_between(model, token):
        run(model)
    assert raised.value.reason is Reason.FIN
    assert passes_of(model) == [1, 1, 0, 0]


def test_a_pass_whose_client_stays_is_what_it_was(model: nn.Sequential, token: CancelToken) -> None:
    with cancel_between(model, token):
        assert run(model) == 4


def test_nothing_is_left_on_the_model_whichever_way_the_block_ends(
    model: nn.Sequential, token: CancelToken
) -> None:
    with cancel_between(model, token):
        run(model)
    token.cancel()
    with pytest.raises(ClientDisconnected), cancel_between(model, token):
        run(model)
    assert not any(layer._forward_pre_hooks for layer in model)
    assert run(model) == 4


def test_a_batch_ends_with_the_last_of_its_clients(model: nn.Sequential) -> None:
    left, stays = CancelToken(), CancelToken()
    left.cancel()
    with cancel_between(model, left, stays):
        assert run(model) == 4
        stays.cancel()
        with pytest.raises(ClientDisconnected):
            run(model)


def test_a_pass_of_another_thread_does_not_end_with_ours(
    model: nn.Sequential, token: CancelToken
) -> None:
    results: list[float] = []
    token.cancel()
    with cancel_between(model, token):
        thread = threading.Thread(target=lambda: results.append(run(model)))
        thread.start()
        thread.join(PATIENCE)
    assert results == [4]


def test_tasks_of_a_loop_have_their_own_tokens(model: nn.Sequential, token: CancelToken) -> None:
    async def serve(look: LayerLook, cancel: CancelToken, others: asyncio.Barrier) -> float:
        with look.cancel_with(cancel):
            await others.wait()
            return run(model)

    async def main() -> list[float | BaseException]:
        others = asyncio.Barrier(2)
        with LayerLook(model) as look:
            passes = [serve(look, each, others) for each in (token, CancelToken())]
            return await asyncio.gather(*passes, return_exceptions=True)

    token.cancel()
    left, stayed = asyncio.run(main())
    assert isinstance(left, ClientDisconnected)
    assert stayed == 4
    assert not any(layer._forward_pre_hooks for layer in model)


def test_the_token_of_the_block_outside_still_counts(
    model: nn.Sequential, token: CancelToken
) -> None:
    with LayerLook(model) as look, look.cancel_with(token), look.cancel_with(CancelToken()):
        token.cancel()
        with pytest.raises(ClientDisconnected):
            run(model)


def test_a_block_without_a_token_is_refused(model: nn.Sequential) -> None:
    with pytest.raises(ValueError, match="give one"), cancel_between(model):
        pass
