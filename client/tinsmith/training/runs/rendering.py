"""Conversions of examples to tokens, with a mark for each token that is learned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tinker_cookbook import renderers
from tinker_cookbook.exceptions import ConfigurationError, RendererError
from tinker_cookbook.model_info import get_recommended_renderer_name
from typing_extensions import override

from tinsmith.training.errors import BadConfig
from tinsmith.training.runs.json_lines import BadExample, Completion, Conversation, Message, Text

TrainOn: TypeAlias = Literal["all_assistant", "last_assistant"]
PLAIN, CHAT_TEMPLATE, AUTO = "plain", "chat_template", "auto"
ROLE_COLON = "role_colon"
OF_COOKBOOK = {
    "all_assistant": renderers.TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    "last_assistant": renderers.TrainOnWhat.LAST_ASSISTANT_MESSAGE,
}


@dataclass(frozen=True, slots=True)
class Tokens:
    """A sequence of tokens. `learned` contains a Boolean for each token: true if the token is learned."""

    tokens: list[int]
    learned: list[bool]


class Rendering(ABC):
    """A way to convert examples to tokens. Raises BadExample for an example that cannot be rendered."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name = name
        self._tokenizer = tokenizer

    def render(self, example: Conversation | Completion | Text) -> Tokens:
        """Render an example. In a conversation, only the last answer is learned."""
        [tokens] = self.sequences(example, "last_assistant")
        return tokens

    def sequences(self, example: Conversation | Completion | Text, train_on: TrainOn) -> tuple[Tokens, ...]:
        """Render an example as one sequence.

        If the format renders earlier answers differently, return one sequence for each answer.
        """
        if isinstance(example, Text):
            return (self._with_end([], self._encoded(example.text)),)
        if isinstance(example, Completion):
            return (self.completion(example),)
        return self.conversation(example.messages, train_on)

    @abstractmethod
    def conversation(self, messages: Sequence[Message], train_on: TrainOn) -> tuple[Tokens, ...]: ...

    def completion(self, example: Completion) -> Tokens:
        """Render the prompt and the completion as a question and an answer."""
        question = {"role": "user", "content": example.prompt}
        return self.render(Conversation([question, {"role": "assistant", "content": example.completion}]))

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _with_end(self, prompt: list[int], learned: list[int]) -> Tokens:
        """Append the token for the end of the text. The token for the end of the text is learned, too."""
        end = [] if self._tokenizer.eos_token_id is None else [int(self._tokenizer.eos_token_id)]
        tokens = [*prompt, *learned, *end]
        return Tokens(tokens, [False] * len(prompt) + [True] * (len(tokens) - len(prompt)))


class OfCookbook(Rendering):
    """A rendering by a renderer of tinker-cookbook.

    Some renderers, such as Qwen3's, leave out the thoughts of earlier answers. With a renderer that leaves out
    thoughts, the cookbook makes one sequence for each answer. The prompt in the sequence of an answer is the same as
    the prompt when the answer is sampled.
    """

    def __init__(self, name: str, tokenizer: Any, renderer: renderers.Renderer) -> None:
        super().__init__(name, tokenizer)
        self.renderer = renderer

    @override
    def conversation(self, messages: Sequence[Message], train_on: TrainOn) -> tuple[Tokens, ...]:
        copied: list[Any] = [dict(message) for message in messages]
        try:
            if train_on == "all_assistant":
                made = self.renderer.build_supervised_examples(copied, OF_COOKBOOK[train_on])
            else:
                made = [self.renderer.build_supervised_example(copied, OF_COOKBOOK[train_on])]
        except RendererError as error:
            raise BadExample(f"the renderer {self.name} refuses it: {error}") from error
        return tuple(
            Tokens(list(rendered.to_ints()), [float(weight) > 0 for weight in weights]) for rendered, weights in made
        )


class Plain(OfCookbook):
    """A rendering that uses no chat format. Each message of a conversation begins with the role."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(PLAIN, tokenizer, renderers.get_renderer(ROLE_COLON, tokenizer))

    @override
    def completion(self, example: Completion) -> Tokens:
        return self._with_end(self._encoded(example.prompt), self._encoded(example.completion))


class ChatTemplate(Rendering):
    """A rendering by the chat template of the tokenizer. The template is applied to the messages before each answer.

    The text before an answer is encoded separately, as at sampling time.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(CHAT_TEMPLATE, tokenizer)

    @override
    def conversation(self, messages: Sequence[Message], train_on: TrainOn) -> tuple[Tokens, ...]:
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        text = self._text(messages, is_whole=True)
        tokens: list[int] = []
        learned: list[bool] = []
        copied = 0
        for number in answers if train_on == "all_assistant" else answers[-1:]:
            before = self._text(messages[:number], is_whole=False)
            after = self._text(messages[: number + 1], is_whole=True)
            if not (text.startswith(after) and after.startswith(before)):
                raise BadExample(
                    f"the chat template renders the answer in message {number} otherwise when it is asked for or more "
                    "follows: use train_on: last_assistant, or a renderer of the cookbook"
                )
            for piece, is_learned in ((text[copied : len(before)], False), (text[len(before) : len(after)], True)):
                encoded = self._encoded(piece)
                tokens += encoded
                learned += [is_learned] * len(encoded)
            copied = len(after)
        rest = self._encoded(text[copied:])
        return (Tokens(tokens + rest, learned + [False] * len(rest)),)

    def _text(self, messages: Sequence[Message], *, is_whole: bool) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=not is_whole)
            )
        except Exception as error:  # Jinja's errors, or any error that a template raises
            raise BadExample(f"the chat template refuses it: {error}") from error


def choose_rendering(requested: str, tokenizer: Any, model: str) -> Rendering:
    """Return the rendering with this name.

    Raises BadConfig for a renderer that is unknown or does not suit the model.
    """
    name = _known_to_cookbook(model) if requested == AUTO else requested
    if name is None:
        name = CHAT_TEMPLATE if getattr(tokenizer, "chat_template", None) else PLAIN
    if name == PLAIN:
        return Plain(tokenizer)
    if name == CHAT_TEMPLATE:
        if not getattr(tokenizer, "chat_template", None):
            raise BadConfig(f"renderer is chat_template, and the tokenizer of {model} has none: use plain")
        return ChatTemplate(tokenizer)
    return OfCookbook(name, tokenizer, _of_cookbook(name, tokenizer, model))


def choose_cookbook_renderer(requested: str, tokenizer: Any, model: str) -> renderers.Renderer:
    """Return a renderer of the cookbook for environments.

    Environments need a renderer of the cookbook, because they also decode answers. Raises BadConfig.
    """
    name = (_known_to_cookbook(model) or ROLE_COLON) if requested == AUTO else requested
    return _of_cookbook(name, tokenizer, model)


def _of_cookbook(name: str, tokenizer: Any, model: str) -> renderers.Renderer:
    try:
        return renderers.get_renderer(name, tokenizer)
    except Exception as error:  # many kinds of errors if the tokenizer lacks the renderer's tokens
        raise BadConfig(f"renderer {name} does not fit the tokenizer of {model}: {error}") from error


def _known_to_cookbook(model: str) -> str | None:
    try:
        return get_recommended_renderer_name(model)
    except (ConfigurationError, KeyError, ValueError):
        return None
