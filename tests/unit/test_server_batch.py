"""Several prompts of one request whose reader is behind when they end."""

import asyncio

import pytest

from disconnect_watch.engine import SamplingParams
from disconnect_watch.server import Frontend
from disconnect_watch.server.access import RequestRecord
from disconnect_watch.server.errors import CancelledByPeer
from disconnect_watch.server.generation import Generation
from disconnect_watch.server.openai.batch import Batch
from disconnect_watch.token import CancelToken, Reason
from tests.support.engine import make_engine
from tests.support.stepped import SteppedBackend


def test_the_end_of_one_prompt_does_not_hide_what_another_had_said() -> None:
    async def main() -> None:
        backend = SteppedBackend(make_engine(max_num_seqs=1))
        frontend, record = Frontend(backend), RequestRecord(CancelToken())
        params = SamplingParams(max_tokens=50, ignore_eos=True)
        generation = Generation([1, 2], params, others=([3, 4],))
        with await Batch.submit(frontend, backend, generation, record) as batch:
            for _ in range(4):
                backend.step()
            record.token.cancel(Reason.FIN)
            backend.step()
            # Of the second, which waited, the outcome is all that there is to read.
            with pytest.raises(CancelledByPeer):
                async for _ in batch.outputs():
                    pass
        assert {outcome.phase for outcome in backend.outcomes.values()} == {"waiting", "decode"}
        assert record.outcome is not None
        assert (record.outcome.kind, record.outcome.phase) == ("cancelled", "decode")
        assert record.outcome.num_generated_tokens >= 3
        assert not record.works
        await frontend.responses.close()

    asyncio.run(main())
