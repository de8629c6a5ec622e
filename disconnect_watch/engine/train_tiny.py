"""Train the small model that ships with the package, on text that comes with CPython.

    python -m disconnect_watch.engine.train_tiny --out DIR

The model need not know anything. It must give a demonstration something readable to stream, for
as long as its context lasts. Three choices follow from that:

* The text is only ``pydoc_data.topics``, the language reference that ``help()`` prints. It is
  small enough to be learnt nearly by heart within the half hour that one CPU thread needs, and a
  model of this size that recites stays legible where one that generalises babbles.
* Short windows teach the text cheaply, but a model that has seen no others falls apart beyond
  them: after the first stage alone, the loss goes from 0.2 nats a token within the first 256
  positions to above 7 at the end of the context. The second stage trains on the whole context.
* Documents follow each other within a volume, and only a volume ends with the end-of-text token,
  so a generation seldom stops by itself before its ``max_tokens``.

The decoder is the engine's own, with dense attention; the directory is in Hugging Face's form.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional as F

from disconnect_watch.engine.attention import CausalAttention
from disconnect_watch.engine.checkpoint import load_model, to_hugging_face
from disconnect_watch.engine.model import LlamaModel
from disconnect_watch.engine.model_config import ModelConfig
from disconnect_watch.engine.rotary import Rotary

__all__ = ["CONFIG", "END_OF_TEXT", "STAGES", "Stage", "main", "read_documents", "run"]

END_OF_TEXT = "<|endoftext|>"
DOCUMENTS_PER_VOLUME = 8
INITIAL_STD = 0.02
STEPS_PER_REPORT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of the run, with an optimizer of its own.

    Args:
        window: tokens in one window of text.
        num_windows: windows in one step.
        steps: optimizer steps.
        peak_learning_rate: what the rate warms up to and is held at.
        warmup_steps: steps until then.
        fall_from: step at which the rate begins to fall in a straight line.
        zero_at: step at which that line would be at nothing; ``steps`` or later.
    """

    window: int
    num_windows: int
    steps: int
    peak_learning_rate: float
    warmup_steps: int
    fall_from: int
    zero_at: int

    def learning_rate(self, step: int) -> float:
        warm = (step + 1) / self.warmup_steps
        fall = (self.zero_at - step) / (self.zero_at - self.fall_from)
        return self.peak_learning_rate * min(warm, 1.0, fall)


STAGES = {
    "short": Stage(
        window=256,
        num_windows=4,
        steps=4500,
        peak_learning_rate=3e-3,
        warmup_steps=200,
        fall_from=2000,
        zero_at=5000,
    ),
    # A gentler rate does not get the model used to distances that are new to it: in 24 steps
    # 1.5e-4 brought the loss down to 5.1, this one to 2.7.
    "long": Stage(
        window=4096,
        num_windows=1,
        steps=200,
        peak_learning_rate=1e-3,
        warmup_steps=10,
        fall_from=20,
        zero_at=200,
    ),
}

# The shape, in Hugging Face's words. Few layers: each costs Python time for every decoded token.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def new_model(config: ModelConfig, *, seed: int) -> LlamaModel:
    """Returns a model that knows nothing yet."""
    torch.manual_seed(seed)
    model = LlamaModel(config)
    residual_std = INITIAL_STD / math.sqrt(2 * config.num_layers)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=residual_std if is_residual else INITIAL_STD)
    return model


def read_documents() -> list[str]:
    """Returns the help topics of the running CPython, in the order of their names."""
    return [topics.topics[name].strip() + "\n\n\n" for name in sorted(topics.topics)]


def train_tokenizer(documents: Sequence[str], *, vocab_size: int) -> Tokenizer:
    """Learns a byte-level BPE in which every UTF-8 text round-trips.

    An encoded prompt begins with ``END_OF_TEXT``, as a volume does in training.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))],
    )
    return tokenizer


class Text:
    """The encoded documents, dealt out without end as batches to train on."""

    def __init__(self, documents: Sequence[str], tokenizer: Tokenizer, *, seed: int) -> None:
        encodings = tokenizer.encode_batch(list(documents), add_special_tokens=False)
        self._documents = [torch.tensor(encoding.ids) for encoding in encodings]
        self._end = torch.tensor([tokenizer.token_to_id(END_OF_TEXT)])
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def num_tokens(self) -> int:
        return sum(len(document) for document in self._documents)

    def _epoch(self) -> Tensor:
        """Returns all documents in a new order, from a random place on and round."""
        pieces: list[Tensor] = []
        order = torch.randperm(len(self._documents), generator=self._generator)
        for i, index in enumerate(order.tolist()):
            if i % DOCUMENTS_PER_VOLUME == 0:
                pieces.append(self._end)
            pieces.append(self._documents[index])
        stream = torch.cat(pieces)
        offset = int(torch.randint(len(stream), (1,), generator=self._generator))
        return stream.roll(-offset)

    def batches(self, num_windows: int, length: int) -> Iterator[Tensor]:
        """Yields windows, each with the token after it: [num_windows, length + 1], int64.

        The windows tile the text; what an epoch leaves over begins the next batch.
        """
        num_tokens = num_windows * length
        starts = torch.arange(num_windows)[:, None] * length
        rest = torch.empty(0, dtype=torch.int64)
        while True:
            while len(rest) <= num_tokens:
                rest = torch.cat((rest, self._epoch()))
            yield rest[starts + torch.arange(length + 1)]
            rest = rest[num_tokens:]


def train(model: LlamaModel, text: Text, *, stage: Stage) -> Iterator[float]:
    """Trains in place, and yields the loss of each step, in nats a token, once it is applied."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    rotary = Rotary(model.config, length=stage.window, dtype=torch.float32)
    batches = text.batches(stage.num_windows, stage.window)
    for step in range(stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate(step)
        loss = batch_loss(model, rotary, batch=next(batches))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without annotations
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def batch_loss(model: LlamaModel, rotary: Rotary, *, batch: Tensor) -> Tensor:
    """Returns the mean cross-entropy, a scalar, over a batch of ``Text.batches``."""
    num_windows, length = batch.shape[0], batch.shape[1] - 1
    rope = rotary(torch.arange(length).repeat(num_windows))
    attention = CausalAttention(num_sequences=num_windows)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model(batch[:, :-1].flatten(), rope, attention)
        logits = model.logits(hidden)
    return F.cross_entropy(logits.float(), batch[:, 1:].flatten())


def save(model: LlamaModel, tokenizer: Tokenizer, *, out: Path, config: Mapping[str, Any]) -> None:
    """Writes a Hugging Face model directory, weights in bfloat16; older files are replaced."""
    out.mkdir(parents=True, exist_ok=True)
    ends = tokenizer.token_to_id(END_OF_TEXT)
    ids = {"bos_token_id": ends, "eos_token_id": ends}
    _write_json(out / "config.json", {**config, **ids})
    _write_json(out / "generation_config.json", ids)
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
        },
    )
    tokenizer.save(str(out / "tokenizer.json"))
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in to_hugging_face(model).items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def train_and_save(
    model: LlamaModel, text: Text, *, stage: Stage, save: Callable[[], None]
) -> bool:
    """Trains, with a line of progress and a ``save()`` now and then and at the end.

    A ``KeyboardInterrupt`` ends the training early, and what was learnt is saved all the same.

    Returns:
        Whether all steps were done.
    """
    started = time.monotonic()
    losses: list[float] = []
    try:
        for loss in train(model, text, stage=stage):
            losses.append(loss)
            done = len(losses)
            if done % STEPS_PER_REPORT == 0 or done == stage.steps:
                recent = losses[-STEPS_PER_REPORT:]
                mean = sum(recent) / len(recent)
                elapsed = time.monotonic() - started
                print(f"step {done}/{stage.steps}  loss {mean:.3f}  {elapsed:.0f} s", flush=True)
                save()
    except KeyboardInterrupt:
        save()
        print(f"interrupted after step {len(losses)}, which is saved", flush=True)
        return False
    return True


def run(
    documents: Sequence[str],
    out: Path,
    *,
    stages: Sequence[Stage],
    config: Mapping[str, Any],
    seed: int = 0,
    is_continued: bool = False,
) -> bool:
    """Runs stages one after the other; each starts from the files that the one before wrote.

    Handing over by files rounds the weights to bfloat16, and makes a stage that is run by itself
    the same as one that is run with the others.

    Args:
        documents: the texts to learn, each ending as its successor may follow.
        out: the directory to write, made if it is missing.
        stages: at least one.
        config: the model's, as ``CONFIG``; its ``vocab_size`` is also the tokenizer's.
        seed: of the weights and of the order of the text.
        is_continued: whether the first stage, too, starts from the files in ``out``.

    Returns:
        Whether all steps were done, rather than interrupted.
    """
    tokenizer = train_tokenizer(documents, vocab_size=config["vocab_size"])
    for stage in stages:
        text = Text(documents, tokenizer, seed=seed)
        if is_continued:
            shape = ModelConfig.from_pretrained(out)
            model = load_model(out, shape, dtype=torch.float32).requires_grad_(True)
        else:
            model = new_model(ModelConfig.from_dict(config), seed=seed)
        num_parameters = sum(p.numel() for p in model.parameters())
        print(
            f"{num_parameters:,} parameters, {text.num_tokens:,} tokens of text, "
            f"windows of {stage.window}",
            flush=True,
        )
        save_now = partial(save, model, tokenizer, out=out, config=config)
        if not train_and_save(model, text, stage=stage, save=save_now):
            return False
        is_continued = True
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 130 after an interrupt, as a shell would say."""
    parser = argparse.ArgumentParser(prog="train_tiny", description="train the packaged model")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument(
        "--stage",
        choices=[*STAGES, "all"],
        default="all",
        help="one stage only; long continues from what is in OUT (%(default)s)",
    )
    parser.add_argument("--steps", type=int, help="end each stage after so many steps")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    args = parser.parse_args(argv)
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps is {args.steps}; give at least 1")
    stages = list(STAGES.values()) if args.stage == "all" else [STAGES[args.stage]]
    if args.steps is not None:
        stages = [replace(stage, steps=min(stage.steps, args.steps)) for stage in stages]
    # One thread, so that sums are taken in the same order on every machine.
    torch.set_num_threads(1)
    is_done = run(
        read_documents(),
        args.out,
        stages=stages,
        config=CONFIG,
        seed=args.seed,
        is_continued=args.stage == "long",
    )
    return 0 if is_done else 130


if __name__ == "__main__":
    sys.exit(main())
