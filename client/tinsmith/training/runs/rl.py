"""Reinforcement learning with `RLTrainer`, on-policy and with seeds.

Because of the seeds, a resumed run has the same result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tinker
from tinker_cookbook import renderers
from tinker_cookbook.rl.metric_util import compute_trajectory_metrics
from tinker_cookbook.rl.types import EnvGroupBuilder
from tinker_cookbook.utils import ml_log
from typing_extensions import override

from tinsmith.training.rl.data_order import GroupPosition
from tinsmith.training.rl.rollouts import AllOrNone, GroupPolicy, roll_out
from tinsmith.training.rl.trainer import RLTrainer
from tinsmith.training.run_logs.metrics import MetricsHistory
from tinsmith.training.run_logs.run_log import RunLog
from tinsmith.training.runs.config import RlConfig
from tinsmith.training.runs.groups import make_groups, read_prompts
from tinsmith.training.runs.json_lines import digest_of_files
from tinsmith.training.runs.loop import Stopped, StopRequest, adam_at, is_every, logged
from tinsmith.training.runs.objective import HELD_OUT, OnStart, Panel, RunStart
from tinsmith.training.runs.opening import OpenRun, opened
from tinsmith.training.runs.outcome import Outcome, finish
from tinsmith.training.runs.rendering import choose_cookbook_renderer
from tinsmith.training.streams import MinibatchPlan, StepReport

NO_RENDERER = "none"
REWARD = "env/all/reward/total"
PANELS = (
    Panel("reward of an episode", (REWARD, f"{HELD_OUT}/reward")),
    Panel("groups without a gradient", ("progress/groups_with_equal_rewards",)),
)


def run_rl(config: RlConfig, on_start: OnStart) -> Outcome:
    """Start or resume the training, and train to the end.

    Raises RunError, Stopped, SaveFailed, and the errors of the trainer.
    """
    prompts = read_prompts(config)
    with opened(config, digest_of_files([config.data, config.eval_data])) as open_run:
        renderer = _renderer(config, open_run.tokenizer)
        train, held_out = make_groups(config, prompts, renderer)
        counted = {"groups": len(train), "held_out": len(held_out), "renderer": config.renderer}
        on_start(RunStart(config.steps, open_run.step, counted))
        with logged(config, config.steps, open_run.client) as log, StopRequest.listening() as stop:
            run = _Run(config, open_run, held_out, log, stop)
            steps = asyncio.run(run.go_on_until_interrupted(train))
        return finish(config, open_run.manager, open_run.client, steps, counted, run.last, PANELS)


class _Run:
    """A run that is in progress. `last` is the evaluation after the last step."""

    def __init__(
        self,
        config: RlConfig,
        open_run: OpenRun,
        held_out: Sequence[EnvGroupBuilder],
        log: RunLog,
        stop: StopRequest,
    ) -> None:
        self._config = config
        self._open_run = open_run
        self._held_out = held_out
        self._log = log
        self._stop = stop
        self._record = MetricsHistory(config.out)
        self._evaluated_at: int | None = None
        self.last: Mapping[str, float] = {}

    async def go_on_until_interrupted(self, groups: Sequence[EnvGroupBuilder]) -> int:
        """Run the training.

        After an interrupt, abandon the save in progress, because the event loop would wait for the thread of the save.
        """
        try:
            return await self.go_on(groups)
        except asyncio.CancelledError:
            self._open_run.manager.abandon()
            raise

    async def go_on(self, groups: Sequence[EnvGroupBuilder]) -> int:
        """Train, and return the number of steps. The number is smaller than configured if nothing is left to learn.

        Raises Stopped.
        """
        config, manager, client = self._config, self._open_run.manager, self._open_run.client
        manager.is_due = lambda step: step == config.steps or self._stop.requested
        begins_at = self._open_run.step
        self._log.begin_at(begins_at + 1 if begins_at else 0)
        if begins_at in (0, config.steps) or self._lacks_evaluation(begins_at):
            await self._evaluate_at(begins_at, await client.save_weights_and_get_sampling_client())
        trainer = RLTrainer(
            client,
            groups,
            MinibatchPlan(groups_per_step=config.groups_per_step, groups_per_minibatch=config.groups_per_step),
            partial(adam_at, config, config.steps),
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            loss_fn=config.loss,
            seed=config.seed,
            # Other environments generate their groups from the seed.
            shuffle_seed=config.seed if config.environment == "jsonl" else None,
            checkpoints=manager,
            resumed=self._open_run.resumed,
            on_step=[self._after],
            logger=_StepsDone(self._log),
        )
        steps = await trainer.run(config.steps)
        await asyncio.to_thread(manager.wait)
        if steps < config.steps:
            await self._evaluate_at(steps, await client.save_weights_and_get_sampling_client())
        return steps

    async def _after(self, report: StepReport, sampling_client: tinker.SamplingClient) -> None:
        step = report.step + 1
        if step == self._config.steps or is_every(self._config.eval_every, step):
            await self._evaluate_at(step, sampling_client)
        if self._stop.requested and step < self._config.steps and self._open_run.manager.saved_step == step:
            await asyncio.to_thread(self._open_run.manager.wait)
            raise Stopped(step, self._config.steps)

    def _lacks_evaluation(self, step: int) -> bool:
        """Return whether the evaluation of the step is missing.

        An evaluation can be missing after a kill, because the trainer saves before it evaluates.
        """
        return is_every(self._config.eval_every, step) and not self._record.has_line_of(step, "eval/")

    async def _evaluate_at(self, step: int, sampling_client: tinker.SamplingClient) -> None:
        """Evaluate once, and log the result unless an earlier process has logged it."""
        if self._evaluated_at == step:
            return
        self._evaluated_at, self.last = step, await self._evaluate(sampling_client)
        if not self._record.has_line_of(step, "eval/"):
            self._log.log_metrics(dict(self.last), step)

    async def _evaluate(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        """Evaluate with fixed seeds, so that the result depends only on the weights."""
        if not self._held_out:
            return {}
        rolled_out = await asyncio.gather(
            *(self._roll_out(number, builder, sampling_client) for number, builder in enumerate(self._held_out))
        )
        groups = [group.trajectories for group in rolled_out if group.trajectories.trajectories_G]
        metrics = compute_trajectory_metrics(groups, [[] for _ in groups])
        return {f"{HELD_OUT}/reward": float(metrics[REWARD])} if REWARD in metrics else {}

    async def _roll_out(self, number: int, builder: EnvGroupBuilder, sampling_client: tinker.SamplingClient) -> Any:
        config = self._config
        policy = GroupPolicy(sampling_client, config.max_tokens, config.temperature, seeds=(~config.seed, number))
        return await roll_out(builder, GroupPosition(number), policy, 0, AllOrNone())


@dataclass(frozen=True, slots=True)
class _StepsDone(ml_log.Logger):
    """A logger that counts completed steps, like the checkpoints. The trainer counts steps from 0."""

    log: ml_log.Logger

    @override
    def log_hparams(self, config: Any) -> None:
        self.log.log_hparams(config)

    @override
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.log.log_metrics(metrics, None if step is None else step + 1)


def _renderer(config: RlConfig, tokenizer: Any) -> renderers.Renderer | None:
    if config.renderer == NO_RENDERER:
        return None
    return choose_cookbook_renderer(config.renderer, tokenizer, config.model)
