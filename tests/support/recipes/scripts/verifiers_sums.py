"""An environment of `verifiers` 0.4 and its evaluation by `vf-eval`: verifiers_sums.py MODEL URL FOLDER."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.cli.eval.main import main

QUESTIONS, ROLLOUTS, MOST_TOKENS = 6, 4, 32


class SumsData(vf.TaskData):
    answer: str = ""


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=1.0)
    async def boxed(self, trace: vf.Trace) -> float:
        """Return 1 for the right number in a box."""
        return float(rf"\boxed{{{self.data.answer}}}" in (trace.last_reply or ""))


class SumsTaskset(vf.Taskset[SumsTask, vf.TasksetConfig]):
    def load(self) -> list[SumsTask]:
        sums = range(1, 1 + QUESTIONS)
        rows = (SumsData(prompt=f"How much is {number} + 1?", answer=str(number + 1)) for number in sums)
        return [SumsTask(row, self.config.task) for row in rows]


class SumsHarness(vf.Harness[vf.HarnessConfig]):
    """An agent that asks once. The agents of the package install themselves from the package index."""

    APPENDS_SYSTEM_PROMPT, NEEDS_CONTAINER = True, False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            asked = {"role": "user", "content": data.prompt}
            await client.chat.completions.create(model=ctx.model, messages=[asked], max_tokens=MOST_TOKENS)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["SumsHarness", "SumsTaskset"]


def _evaluate(model: str, url: str, folder: str) -> None:
    server = ["--client.base-url", f"{url}/oai/api/v1", "--client.api-key-var", "TINKER_API_KEY"]
    amount = ["-n", str(QUESTIONS), "-r", str(ROLLOUTS), "--no-push", "--no-rich", "-o", folder, "--run.name", "sums"]
    here = ["--env.agent.runtime.type", "subprocess"]
    name = Path(__file__).stem
    sys.argv = ["vf-eval", name, "--env.agent.harness.id", name, "-m", model, *here, *server, *amount]
    main()
    [path] = Path(folder).rglob("traces.jsonl")
    episodes = [json.loads(line) for line in path.read_text().splitlines()]
    said = [trace["nodes"][-1]["message"]["content"] for episode in episodes for trace in episode["traces"]]
    print(json.dumps({"rollouts": sum(episode["ok"] for episode in episodes)}))
    print(json.dumps({"in a box": sum(r"\boxed{" in text for text in said)}))


if __name__ == "__main__":
    _evaluate(*sys.argv[1:])
