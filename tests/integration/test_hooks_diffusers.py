"""A pipeline of diffusers that ends with the step in which its client left."""

import warnings
from typing import Any

import pytest
import torch

from disconnect_watch import CancelToken, ClientDisconnected, Reason
from disconnect_watch.backends.hooks.torch import cancel_between
from tests.support.hooks import fires_at

with warnings.catch_warnings():
    # On import it warns of what is deprecated in libraries that are neither its nor ours.
    warnings.simplefilter("ignore")
    import diffusers

    from disconnect_watch.backends.hooks.diffusers import on_step_end

NUM_STEPS = 5


@pytest.fixture(scope="module")
def pipeline() -> Any:
    """Stable Diffusion with a random UNet and decoder of a few channels, and no text encoder."""
    # Its functions have no types.
    library: Any = diffusers
    unet = library.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(4, 8),
        norm_num_groups=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=2,
    )
    vae = library.AutoencoderKL(
        block_out_channels=(4, 8),
        norm_num_groups=2,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    pipeline = library.StableDiffusionPipeline(
        unet=unet,
        vae=vae,
        scheduler=library.DDIMScheduler(steps_offset=1, clip_sample=False),
        text_encoder=None,
        tokenizer=None,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class Passes:
    """Counts the passes of a pipeline's UNet and decoder; one of the UNet cancels the token."""

    def __init__(self, pipeline: Any, token: CancelToken, leaves_in: int) -> None:
        self.num_steps = self.num_decoded = 0
        self._hooks = [
            pipeline.unet.register_forward_pre_hook(self._count_step),
            pipeline.unet.register_forward_pre_hook(fires_at(token, leaves_in)),
            pipeline.vae.decoder.register_forward_pre_hook(self._count_decoded),
        ]

    def _count_step(self, module: Any, args: Any) -> None:
        self.num_steps += 1

    def _count_decoded(self, module: Any, args: Any) -> None:
        self.num_decoded += 1

    def __enter__(self) -> "Passes":
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()


def draw(pipeline: Any, callback: Any) -> Any:
    return pipeline(
        prompt_embeds=torch.zeros(1, 3, 8),
        generator=torch.Generator().manual_seed(1),
        guidance_scale=1.0,
        num_inference_steps=NUM_STEPS,
        height=16,
        width=16,
        output_type="np",
        callback_on_step_end=callback,
    ).images


def test_a_pipeline_ends_with_the_step_at_hand_and_decodes_nothing(pipeline: Any) -> None:
    token = CancelToken()
    with (
        Passes(pipeline, token, leaves_in=2) as passes,
        pytest.raises(ClientDisconnected) as raised,
    ):
        draw(pipeline, on_step_end(token))
    assert raised.value.reason is Reason.ABORTED
    assert (passes.num_steps, passes.num_decoded) == (2, 0)


def test_the_next_picture_is_whole_and_the_same(pipeline: Any) -> None:
    before = draw(pipeline, None)
    token = CancelToken()
    with Passes(pipeline, token, leaves_in=2), pytest.raises(ClientDisconnected):
        draw(pipeline, on_step_end(token))
    with Passes(pipeline, token, leaves_in=0) as passes:
        after = draw(pipeline, on_step_end(CancelToken()))
    assert (after == before).all()
    assert (passes.num_steps, passes.num_decoded) == (NUM_STEPS, 1)


def test_models_that_are_offloaded_are_so_again(pipeline: Any, monkeypatch: Any) -> None:
    freed = []
    monkeypatch.setattr(pipeline, "maybe_free_model_hooks", lambda: freed.append("all"))
    token = CancelToken()
    token.cancel()
    with pytest.raises(ClientDisconnected):
        draw(pipeline, on_step_end(token))
    assert freed == ["all"]


def test_another_callback_is_called_for_who_stays(pipeline: Any) -> None:
    steps = []

    def note(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        steps.append(step)
        return tensors

    draw(pipeline, on_step_end(CancelToken(), note))
    assert steps == list(range(NUM_STEPS))


def test_a_step_ends_between_two_blocks_of_the_unet(pipeline: Any) -> None:
    token = CancelToken()
    blocks = [*pipeline.unet.down_blocks, *pipeline.unet.up_blocks]
    passed: list[Any] = []
    hooks = [
        block.register_forward_hook(lambda module, *rest: passed.append(module)) for block in blocks
    ]
    try:
        with (
            Passes(pipeline, token, leaves_in=1),
            pytest.raises(ClientDisconnected),
            cancel_between(blocks[1:], token),
        ):
            draw(pipeline, on_step_end(token))
    finally:
        for hook in hooks:
            hook.remove()
    assert passed == blocks[:1]
