"""A process that serves a model and says so: ``python -m tests.support.model_server DIR``.

It prints the pids of its workers, begins one request and waits to be killed.
"""

import asyncio
import sys
from pathlib import Path

from tests.support.models import ModelHost, responses_of, text_request


async def serve(host: ModelHost) -> None:
    model = host.model("busy")
    task = asyncio.ensure_future(responses_of(model, text_request("x")))
    print(*model.pids, flush=True)
    await task


if __name__ == "__main__":
    with ModelHost(Path(sys.argv[1])) as host:
        host.run(serve(host))
