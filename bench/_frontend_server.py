"""Our frontend, and uvicorn with an application that answers ``{}``, in one process.

    python -m bench._frontend_server --repository DIR [--log FILE] [--marks]

``_http_server`` tells how to drive it. The models are the two of the process's own, and
those of the repository. ``--log`` has what ``serve`` writes to standard error go to a file.
"""

import argparse
import logging
import os
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from bench._frontend_models import local_models
from bench._http_server import serve
from bench._uvicorn_server import VARIANTS, factory
from disconnect_watch.backends.repository import ModelRepository
from disconnect_watch.server import Frontend, FrontendOptions, Metrics, ServeOptions
from disconnect_watch.server.collector import rare_collections
from disconnect_watch.server.logs import configure_logging
from disconnect_watch.server.run import make_server
from disconnect_watch.watcher import default_watcher

__all__: list[str] = []

MAX_BODY_BYTES = 1 << 26


async def main(repository: Path) -> None:
    """Serve until stdin ends."""
    async with AsyncExitStack() as stack:
        models = await stack.enter_async_context(ModelRepository(repository))
        for model in local_models():
            models.add(model)
        frontend = Frontend(models=models, options=FrontendOptions(max_body_bytes=MAX_BODY_BYTES))
        metrics = Metrics(
            engine=None,
            watcher=lambda: default_watcher().stats(),
            frontend=frontend.stats,
            models=models.statistics,
        )
        server = make_server(frontend, metrics, ServeOptions())
        config = server.config
        config.load()
        kind: Any = config.http_protocol_class
        protocol = partial(kind, config, server.server_state, {})
        stack.enter_context(rare_collections())
        await serve({"uvicorn": factory(*VARIANTS["httptools"]), "frontend": protocol})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--marks", action="store_true")
    options = parser.parse_args()
    if options.log is not None:
        with options.log.open("wb") as lines:
            os.dup2(lines.fileno(), sys.stderr.fileno())
        configure_logging("info")
    else:
        logging.getLogger().addHandler(logging.StreamHandler(sys.stderr))
    uvloop.run(main(options.repository))
