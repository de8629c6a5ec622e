"""The packaged model, and the script that makes it."""

import re
import signal
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from disconnect_watch.engine import train_tiny
from disconnect_watch.engine.attention import CausalAttention
from disconnect_watch.engine.checkpoint import load_model
from disconnect_watch.engine.model import LlamaModel
from disconnect_watch.engine.model_config import ModelConfig
from disconnect_watch.engine.rotary import Rotary

TINY = Path(train_tiny.__file__).with_name("tiny")
PROMPTS = ["The with statement", "When a client leaves,", "Hello, how are you?"]
SMALL = train_tiny.CONFIG | {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return train_tiny.read_documents()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    loaded = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    assert isinstance(loaded, LlamaForCausalLM)
    return loaded


def stage(*, steps: int, window: int = 64) -> train_tiny.Stage:
    return train_tiny.Stage(
        window=window,
        num_windows=4,
        steps=steps,
        peak_learning_rate=3e-3,
        warmup_steps=2,
        fall_from=steps,
        zero_at=steps + 1,
    )


def words(text: str) -> list[str]:
    """What lies between spaces, punctuation taken off, if it is letters and three or more."""
    matches = (re.fullmatch(r"\W*([^\W\d_]{3,})\W*", piece) for piece in text.split())
    return [match[1] for match in matches if match]


def share_known(text: str, documents: list[str]) -> float:
    found = words(text)
    known = {word for document in documents for word in words(document)}
    return sum(word in known for word in found) / len(found)


def continuation(
    model: LlamaForCausalLM, prompt: list[int], *, num_tokens: int, temperature: float
) -> list[int]:
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
    torch.manual_seed(0)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        pad_token_id=0,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        **(sampling if temperature else {"do_sample": False}),
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def test_all_files_together_stay_under_six_megabytes() -> None:
    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 6_000_000


def test_the_readme_names_the_source_text_and_its_licence() -> None:
    readme = (TINY / "README.md").read_text(encoding="utf-8")
    assert "pydoc_data" in readme
    assert "PSF License" in readme


@given(text=st.text())
def test_any_text_comes_back_from_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_an_encoded_prompt_begins_with_the_token_that_ends_a_text(tokenizer: Tokenizer) -> None:
    config = ModelConfig.from_pretrained(TINY)
    assert tokenizer.encode("").ids == list(config.eos_token_ids)
    assert tokenizer.encode("if x:").ids[0] in config.eos_token_ids


def test_transformers_reads_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(TINY)
    assert theirs(PROMPTS[0])["input_ids"] == tokenizer.encode(PROMPTS[0]).ids
    assert theirs.eos_token == theirs.bos_token == train_tiny.END_OF_TEXT


def test_the_shipped_shape_is_the_one_that_the_script_trains() -> None:
    trained = ModelConfig.from_dict(train_tiny.CONFIG | {"eos_token_id": 0})
    assert ModelConfig.from_pretrained(TINY) == trained


def test_the_engine_and_transformers_score_the_shipped_weights_alike(
    model: LlamaForCausalLM, tokenizer: Tokenizer
) -> None:
    config = ModelConfig.from_pretrained(TINY)
    ours = load_model(TINY, config, dtype=torch.float32)
    tokens = torch.tensor(tokenizer.encode(PROMPTS[0]).ids)
    rope = Rotary(config, length=len(tokens), dtype=torch.float32)(torch.arange(len(tokens)))
    with torch.inference_mode():
        scores = ours.logits(ours(tokens, rope, CausalAttention(num_sequences=1)))
        expected = model(tokens[None]).logits[0]
    torch.testing.assert_close(scores, expected, atol=1e-3, rtol=1e-4)


def test_the_shipped_weights_know_the_text_that_the_script_deals_out(
    tokenizer: Tokenizer, documents: list[str]
) -> None:
    config = ModelConfig.from_pretrained(TINY)
    model = load_model(TINY, config, dtype=torch.float32)
    batch = next(train_tiny.Text(documents, tokenizer, seed=1).batches(1, 4096))
    rotary = Rotary(config, length=4096, dtype=torch.float32)
    # Knowing nothing costs ln(2048) = 7.6 nats a token.
    assert train_tiny.batch_loss(model, rotary, batch=batch) < 2.5


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_continuation_is_words_of_the_training_text(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    documents: list[str],
    prompt: str,
    temperature: float,
) -> None:
    ids = tokenizer.encode(prompt).ids
    tokens = continuation(model, ids, num_tokens=150, temperature=temperature)
    text = tokenizer.decode(tokens)
    assert len(words(text)) >= 20, text
    assert len(set(words(text))) >= 10, text
    assert share_known(text, documents) >= 0.8, text
    # Lines of stars or dashes under a title are tokens of many stars, hence a low limit.
    assert max(len(list(run)) for _, run in groupby(tokens)) <= 8, text


def test_text_stays_legible_at_the_end_of_the_context(
    model: LlamaForCausalLM, tokenizer: Tokenizer, documents: list[str]
) -> None:
    ids = tokenizer.encode("".join(documents)).ids[:3800]
    text = tokenizer.decode(continuation(model, ids, num_tokens=150, temperature=0.8))
    assert len(words(text)) >= 20, text
    assert share_known(text, documents) >= 0.8, text


def test_the_script_writes_a_model_that_loads(tmp_path: Path, documents: list[str]) -> None:
    assert train_tiny.run(documents[:3], tmp_path, stages=[stage(steps=2)], config=SMALL)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    config = ModelConfig.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("naïve 🙂")["input_ids"]
    assert ids[0] in config.eos_token_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "naïve 🙂"
    assert model(torch.tensor([ids])).logits.isfinite().all()
    assert isinstance(load_model(tmp_path, config, dtype=torch.float32), LlamaModel)


def test_training_lowers_the_loss(documents: list[str]) -> None:
    tokenizer = train_tiny.train_tokenizer(documents[:3], vocab_size=SMALL["vocab_size"])
    text = train_tiny.Text(documents[:3], tokenizer, seed=0)
    model = train_tiny.new_model(ModelConfig.from_dict(SMALL), seed=0)
    losses = list(train_tiny.train(model, text, stage=stage(steps=30)))
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_the_same_seed_gives_the_same_files(tmp_path: Path, documents: list[str]) -> None:
    for name, seed in [("first", 1), ("again", 1), ("other", 2)]:
        train_tiny.run(
            documents[:3], tmp_path / name, stages=[stage(steps=2)], config=SMALL, seed=seed
        )
    assert contents(tmp_path / "first") == contents(tmp_path / "again")
    assert contents(tmp_path / "first") != contents(tmp_path / "other")


def test_stages_run_apart_give_the_same_files_as_together(
    tmp_path: Path, documents: list[str]
) -> None:
    stages = [stage(steps=2), stage(steps=1, window=256)]
    train_tiny.run(documents[:3], tmp_path / "together", stages=stages, config=SMALL)
    train_tiny.run(documents[:3], tmp_path / "apart", stages=stages[:1], config=SMALL)
    train_tiny.run(
        documents[:3], tmp_path / "apart", stages=stages[1:], config=SMALL, is_continued=True
    )
    train_tiny.run(documents[:3], tmp_path / "second alone", stages=stages[1:], config=SMALL)
    assert contents(tmp_path / "apart") == contents(tmp_path / "together")
    assert contents(tmp_path / "apart") != contents(tmp_path / "second alone")


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_the_last_stage_trains_on_the_whole_context_of_the_model() -> None:
    last = list(train_tiny.STAGES.values())[-1]
    assert last.window == train_tiny.CONFIG["max_position_embeddings"]


def test_the_learning_rate_warms_up_is_held_and_falls() -> None:
    rates = [stage(steps=4).learning_rate(step) for step in range(5)]
    assert rates == pytest.approx([1.5e-3, 3e-3, 3e-3, 3e-3, 3e-3])
    long = train_tiny.STAGES["long"]
    assert long.learning_rate(19) == long.peak_learning_rate
    assert long.learning_rate(110) == pytest.approx(long.peak_learning_rate / 2)
    assert 0 < long.learning_rate(long.steps - 1) < long.learning_rate(110)


def test_the_command_ends_each_stage_after_the_steps_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_tiny, "CONFIG", SMALL)
    stages = {"short": stage(steps=9), "long": stage(steps=1, window=256)}
    monkeypatch.setattr(train_tiny, "STAGES", stages)
    assert train_tiny.main(["--out", str(tmp_path), "--steps", "2"]) == 0
    printed = capsys.readouterr().out
    assert "step 2/2" in printed
    assert "step 1/1" in printed
    assert train_tiny.main(["--out", str(tmp_path), "--steps", "2", "--stage", "long"]) == 0
    assert "step 2/2" not in capsys.readouterr().out


def test_windows_tile_the_text_and_carry_the_next_token(documents: list[str]) -> None:
    tokenizer = train_tiny.train_tokenizer(documents[:3], vocab_size=300)
    text = train_tiny.Text(documents[:3], tokenizer, seed=0)
    batches = text.batches(3, 50)
    rows = torch.cat([next(batches) for _ in range(4)])
    assert torch.equal(rows[:-1, -1], rows[1:, 0])


def test_an_interrupt_writes_what_was_learnt(
    tmp_path: Path, documents: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    hook = register_optimizer_step_post_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        is_done = train_tiny.run(
            documents[:3], tmp_path, stages=[stage(steps=9), stage(steps=9)], config=SMALL
        )
    finally:
        hook.remove()
    assert not is_done
    assert "interrupted after step 0" in capsys.readouterr().out
    load_model(tmp_path, ModelConfig.from_pretrained(tmp_path), dtype=torch.float32)


def test_no_steps_at_all_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        train_tiny.main(["--out", str(tmp_path / "none"), "--steps", "0"])
    assert "--steps is 0" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
