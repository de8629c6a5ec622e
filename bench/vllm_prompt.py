"""A prompt of 12,000 tokens in one step of vLLM, whose client leaves half a second into it.

The model is the package's with its layers over and over, 24 in all. Needs the venv that
``.ci/vllm`` makes.
"""

import json
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file, save_file

from bench._engine_decode import vllm_python
from bench._harness import Report, run_command
from disconnect_watch.engine import DEFAULT_MODEL
from tests.support.venvs import ROOT, environment

__all__ = ["Config", "run"]

NUM_LAYERS = 24


@dataclass(frozen=True, slots=True)
class Config:
    """How much is measured.

    Attributes:
        num_leaving: prompts whose client leaves; one more is computed whole.
    """

    num_leaving: int


FULL = Config(20)
QUICK = Config(2)


def run(config: Config) -> Report:
    """Measure all of it."""
    python = vllm_python()
    if python is None:
        raise SystemExit("vLLM is not here: .ci/vllm makes a venv with it")
    report = Report("vllm_prompt", asdict(config))
    with TemporaryDirectory() as folder:
        model = _deep_model(Path(folder))
        done = subprocess.run(
            [python, "-m", "bench._vllm_prompt", model, str(config.num_leaving)],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    (_, whole, _), *left = json.loads(done.stdout.splitlines()[-1])
    report.add("a prompt of 12,000 tokens, whole", "s", [whole])
    report.add("after its client left", "s", [after for _, _, after in left])
    report.add("layers that were begun for it", "count", [layers for layers, _, _ in left])
    return report


def _deep_model(directory: Path) -> Path:
    for file in DEFAULT_MODEL.iterdir():
        shutil.copy(file, directory / file.name)
    config = json.loads((DEFAULT_MODEL / "config.json").read_text())
    own = config["num_hidden_layers"]
    config |= {"num_hidden_layers": NUM_LAYERS, "max_position_embeddings": 1 << 17}
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(DEFAULT_MODEL / "model.safetensors")
    deep = {name: weight for name, weight in weights.items() if ".layers." not in name}
    for number in range(NUM_LAYERS):
        source = f".layers.{number % own}."
        deep |= {
            name.replace(source, f".layers.{number}."): weight.clone()
            for name, weight in weights.items()
            if source in name
        }
    save_file(deep, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def main() -> None:
    run_command("vllm_prompt", lambda is_quick: run(QUICK if is_quick else FULL))


if __name__ == "__main__":
    main()
