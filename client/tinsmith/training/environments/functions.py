"""Environments made from functions: from a reward function, or from a generator function that plays a game."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import tinker
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.types import Action, ActionExtra, Env, EnvGroupBuilder, Observation, StepResult
from typing_extensions import override

PromptContent: TypeAlias = str | Sequence[Message] | Sequence[int]
"""The content of a prompt.

With a renderer, the content is a string (a user message) or a list of messages; without a renderer, tokens.
"""


class Conversation(Protocol):
    """A conversation between one environment and the model."""

    def add_prompt(self, content: Any) -> None:
        """Append a prompt from the environment. Raises TypeError for content of the wrong type."""

    def observation(self) -> tuple[tinker.ModelInput, StopCondition]:
        """Return the conversation so far, and the stop condition for the next answer."""

    def add_answer(self, tokens: list[int]) -> Any:
        """Append an answer from the model, and return the decoded answer."""


def conversation(renderer: Renderer | None) -> Conversation:
    """Return a new conversation."""
    return TokenConversation() if renderer is None else ChatConversation(renderer)


class TokenConversation:
    """A conversation of tokens. An answer ends only when it reaches its token limit."""

    def __init__(self) -> None:
        self._tokens: list[int] = []

    def add_prompt(self, content: Any) -> None:
        if isinstance(content, str) or not all(type(token) is int for token in content):
            raise TypeError(f"without a renderer a prompt must be a list of tokens, not {content!r:.80}")
        self._tokens += content

    def observation(self) -> tuple[tinker.ModelInput, StopCondition]:
        return tinker.ModelInput.from_ints(list(self._tokens)), []

    def add_answer(self, tokens: list[int]) -> list[int]:
        self._tokens += tokens
        return tokens


class ChatConversation:
    """A conversation of messages that the renderer encodes.

    A truncated answer is decoded as far as possible.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._messages: list[Message] = []

    def add_prompt(self, content: Any) -> None:
        if isinstance(content, str):
            content = [Message(role="user", content=content)]
        if not all(isinstance(message, dict) for message in content):
            raise TypeError(f"with a renderer a prompt must be a string or messages, not {content!r:.80}")
        self._messages += content

    def observation(self) -> tuple[tinker.ModelInput, StopCondition]:
        return self._renderer.build_generation_prompt(self._messages), self._renderer.get_stop_sequences()

    def add_answer(self, tokens: list[int]) -> str:
        message, _ = self._renderer.parse_response(tokens)
        self._messages.append(message)
        return get_text_content(message)


Example = TypeVar("Example")
Answer: TypeAlias = Any
"""The content of an answer. With a renderer, an answer is a string; without a renderer, a list of tokens."""
Outcome: TypeAlias = float | tuple[float, Mapping[str, float]]
"""A reward, or a reward and metrics. The metrics are logged as `env/all/<name>`."""
Play: TypeAlias = Callable[[Example], Generator[PromptContent, Answer, Outcome | Awaitable[Outcome]]]
"""A generator function that yields prompts, receives the model's answers, and returns the outcome."""


def from_functions(
    examples: Sequence[Example],
    prompt: Callable[[Example], PromptContent],
    reward: Callable[[Example, Answer], Outcome | Awaitable[Outcome]],
    *,
    group_size: int,
    renderer: Renderer | None = None,
    tags: Sequence[str] = (),
) -> list[EnvGroupBuilder]:
    """Return a list with one group for each example.

    A group has `group_size` answers. `reward` may be a coroutine function.

    With a renderer, a prompt is a string or a list of messages, and an answer is the text of the model's message.
    Without a renderer, prompts and answers are lists of tokens.
    """
    return from_games(examples, OneAnswer(prompt, reward), group_size=group_size, renderer=renderer, tags=tags)


def from_games(
    examples: Sequence[Example],
    play: Play[Example],
    *,
    group_size: int,
    renderer: Renderer | None = None,
    tags: Sequence[str] = (),
) -> list[EnvGroupBuilder]:
    """Return a list with one group for each example, like `from_functions`. The game may have several turns.

    `play` is a generator function. `answer = yield prompt` is a turn, and `return reward` ends the game.
    """
    if group_size < 2:
        raise ValueError(
            f"group_size is {group_size}: it must be 2 or more, because the answers of a group are compared"
        )
    return [PlayGroupBuilder(play, example, group_size, renderer, tuple(tags)) for example in examples]


@dataclass(frozen=True, slots=True)
class OneAnswer(Generic[Example]):
    """A game with one turn."""

    prompt: Callable[[Example], PromptContent]
    reward: Callable[[Example, Answer], Outcome | Awaitable[Outcome]]

    def __call__(self, example: Example) -> Generator[PromptContent, Answer, Outcome | Awaitable[Outcome]]:
        answer = yield self.prompt(example)
        return self.reward(example, answer)


@dataclass(frozen=True, slots=True)
class PlayGroupBuilder(EnvGroupBuilder, Generic[Example]):
    """A group in which `group_size` environments play the same example."""

    play: Play[Example]
    example: Example
    group_size: int
    renderer: Renderer | None
    tags: tuple[str, ...]

    @override
    async def make_envs(self) -> Sequence[Env]:
        return [PlayEnv(self.play(self.example), conversation(self.renderer)) for _ in range(self.group_size)]

    @override
    def logging_tags(self) -> list[str]:
        return list(self.tags)


class PlayEnv(Env):
    """An environment that runs the generator once."""

    def __init__(
        self, play: Generator[PromptContent, Answer, Outcome | Awaitable[Outcome]], conversation: Conversation
    ) -> None:
        self._play = play
        self._conversation = conversation

    @override
    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        self._conversation.add_prompt(next(self._play))
        return self._conversation.observation()

    @override
    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        try:
            content = self._play.send(self._conversation.add_answer(action))
        except StopIteration as end:
            return _end_of_episode(*await _outcome(end.value))
        self._conversation.add_prompt(content)
        observation, stop = self._conversation.observation()
        return StepResult(reward=0.0, episode_done=False, next_observation=observation, next_stop_condition=stop)


async def _outcome(returned: Outcome | Awaitable[Outcome]) -> tuple[float, Mapping[str, float]]:
    outcome = await returned if inspect.isawaitable(returned) else returned
    reward, metrics = outcome if isinstance(outcome, tuple) else (outcome, {})
    return float(reward), metrics


def _end_of_episode(reward: float, metrics: Mapping[str, float]) -> StepResult:
    return StepResult(
        reward=reward,
        episode_done=True,
        next_observation=tinker.ModelInput.empty(),
        next_stop_condition=[],
        metrics=dict(metrics),
    )
