"""Conversions between prompts, tokens and texts: with a renderer, with a chat template, or raw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from tinker import types
from typing_extensions import override

from tinsmith.training.errors import EvaluationError
from tinsmith.training.evaluation.examples import Prompt

if TYPE_CHECKING:
    from tinker_cookbook.renderers import Renderer

RAW = "raw"


class Rendering(Protocol):
    @property
    def stop(self) -> list[str] | list[int] | None:
        """Return the stop sequences. Return None if the server decides where an answer ends."""
        ...

    def prompt(self, prompt: Prompt) -> types.ModelInput:
        """Return the tokens of the prompt. Raises EvaluationError for a prompt that cannot be rendered."""
        ...

    def continued(self, prompt: Prompt, text: str) -> tuple[types.ModelInput, int]:
        """Return the tokens of the prompt and of `text` as the answer, and the number of tokens in the answer."""
        ...

    def text(self, tokens: Sequence[int]) -> str: ...


def rendering_by(renderer: Renderer | str | None, tokenizer: Any) -> Rendering:
    """Return the rendering that the arguments describe.

    `renderer` is a cookbook renderer or its name, "raw", or None. None stands for the model's chat template, or for
    "raw" if the model has no chat template. `tokenizer` is False if prompts are tokens and the graders need no text.
    """
    if tokenizer is False:
        return TokensAlone()
    if renderer == RAW:
        return RawTexts(tokenizer)
    if renderer is not None:
        return ByRenderer(_renderer(renderer, tokenizer), tokenizer)
    if getattr(tokenizer, "chat_template", None):
        return ByChatTemplate(tokenizer)
    return RawTexts(tokenizer)


def is_tokens(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt)


class TokensAlone:
    stop: list[int] | None = None

    def prompt(self, prompt: Prompt) -> types.ModelInput:
        if not is_tokens(prompt):
            raise EvaluationError("a text prompt needs a tokenizer, but this task has tokenizer=False")
        return types.ModelInput.from_ints(list(cast(Sequence[int], prompt)))

    def continued(self, prompt: Prompt, text: str) -> tuple[types.ModelInput, int]:
        raise EvaluationError("choices need a tokenizer, but this task has tokenizer=False")

    def text(self, tokens: Sequence[int]) -> str:
        return ""


class RawTexts:
    """A rendering that continues a text without any format."""

    stop: list[str] | list[int] | None = None

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt(self, prompt: Prompt) -> types.ModelInput:
        return types.ModelInput.from_ints(self._tokens(prompt))

    def continued(self, prompt: Prompt, text: str) -> tuple[types.ModelInput, int]:
        """Return the tokens of the prompt and of `text` as the answer, and the number of tokens in the answer.

        A token that contains the end of the prompt and the beginning of the answer counts as part of the answer, as in
        lm-evaluation-harness.
        """
        context = self._tokens(prompt)
        whole = self._tokens(prompt + text) if isinstance(prompt, str) else context + self._encoded(text)
        return types.ModelInput.from_ints(whole), max(1, len(whole) - len(context))

    def text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            begin = getattr(self._tokenizer, "bos_token", None)
            if begin is not None and prompt.startswith(begin):  # the tokenizer would add a second one
                return self._encoded(prompt)
            return [int(token) for token in self._tokenizer.encode(prompt)]
        if is_tokens(prompt):
            return list(cast(Sequence[int], prompt))
        raise EvaluationError("a conversation needs a renderer, because this model has no chat template")

    def _encoded(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]


class ByChatTemplate(RawTexts):
    """A rendering by the model's chat template. A prompt that is a text becomes a user message."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        end = tokenizer.eos_token_id
        self.stop = None if end is None else [int(end)]

    @override
    def continued(self, prompt: Prompt, text: str) -> tuple[types.ModelInput, int]:
        answer = self._encoded(text)
        return types.ModelInput.from_ints(self._tokens(prompt) + answer), len(answer)

    @override
    def _tokens(self, prompt: Prompt) -> list[int]:
        if is_tokens(prompt):
            return list(cast(Sequence[int], prompt))
        messages = [dict(message) for message in _messages(prompt)]
        rendered = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self._encoded(rendered)


class ByRenderer:
    """A rendering by a cookbook renderer.

    A prompt that is a text becomes a user message. The text of an answer does not include the model's thoughts.
    """

    def __init__(self, renderer: Renderer, tokenizer: Any) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self.stop = renderer.get_stop_sequences()

    def prompt(self, prompt: Prompt) -> types.ModelInput:
        if is_tokens(prompt):
            return types.ModelInput.from_ints(list(cast(Sequence[int], prompt)))
        return self._renderer.build_generation_prompt(cast(Any, [dict(message) for message in _messages(prompt)]))

    def continued(self, prompt: Prompt, text: str) -> tuple[types.ModelInput, int]:
        answer = [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]
        chunks = [*self.prompt(prompt).chunks, types.EncodedTextChunk(tokens=answer)]
        return types.ModelInput(chunks=chunks), len(answer)

    def text(self, tokens: Sequence[int]) -> str:
        from tinker_cookbook.renderers import get_text_content

        message, _ = self._renderer.parse_response(list(tokens))
        return get_text_content(message)


def _messages(prompt: Prompt) -> Sequence[Mapping[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return cast(Sequence[Mapping[str, Any]], prompt)


def _renderer(renderer: Renderer | str, tokenizer: Any) -> Renderer:
    if not isinstance(renderer, str):
        return renderer
    from tinker_cookbook import renderers

    try:
        return renderers.get_renderer(renderer, tokenizer)
    except Exception as error:
        raise EvaluationError(f"tinker-cookbook has no renderer {renderer} for this model: {error}") from error
