"""The cause of vLLM's refusal of an adapter: its status is 500 for every exception of its engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tinsmith_trainer.errors import ServerError, TrainerError, UserError
from tinsmith_trainer.sampling.token_server.vllm import VllmServer

RAISED = "Call to add_lora method failed: "


@pytest.mark.parametrize(
    ("status", "message", "fault"),
    [
        (500, RAISED + "LoRA rank 65 is greater than max_lora_rank 64.", UserError),
        (500, RAISED + "While loading /a, expected target modules in {'o_proj'} but received ['gate'].", UserError),
        (500, RAISED + "model.layers.0.gate.lora_C is unsupported LoRA weight", UserError),
        (500, RAISED + "CUDA out of memory. Tried to allocate 2.00 GiB.", ServerError),
        (500, "EngineCore encountered an issue. See stack trace (above) for the root cause.", ServerError),
        (404, "Loading lora a failed: No adapter found for /a", ServerError),
    ],
)
async def test_a_refusal_is_the_users_and_a_failure_is_the_servers(
    status: int, message: str, fault: type[TrainerError]
) -> None:
    async def load(_request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": message}}, status=status)

    app = web.Application()
    app.add_routes([web.post("/v1/load_lora_adapter", load)])
    async with TestServer(app) as running:
        server = VllmServer(str(running.make_url("/")))
        try:
            with pytest.raises(fault) as failure:
                await server.load_adapter("a", Path("/a"))
        finally:
            await server.close()
    assert type(failure.value) is fault
    assert message in str(failure.value)
