"""Start a prefill node, a decode node and the proxy before them, until Ctrl-C: ``make pd``."""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tests.support.pd import cluster


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.disagg", description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="of the proxy")
    parser.add_argument("--prefills", type=int, default=1)
    parser.add_argument("--decodes", type=int, default=1)
    parser.add_argument("--transfer", choices=("shm", "tcp"), default="shm")
    parser.add_argument("--model", type=Path, help="Hugging Face directory; else the package's")
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        cluster(
            Path(directory),
            model=asked.model,
            num_prefills=asked.prefills,
            num_decodes=asked.decodes,
            transfer=asked.transfer,
            port=asked.port,
        ) as found,
    ):
        for role, nodes in (("prefill", found.prefills), ("decode", found.decodes)):
            for node in nodes:
                print(f"{role}: {node.url}, metrics on port {node.process.metrics_port}")
        url = f"http://127.0.0.1:{found.port}"
        body = '{"model": "tiny", "prompt": "The class", "max_tokens": 500, "stream": true}'
        print(f"proxy: {url}; try: curl -N {url}/v1/completions -d '{body}'", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return 0


if __name__ == "__main__":
    # From the start on, so that neither is lost while the processes come up.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    sys.exit(main())
