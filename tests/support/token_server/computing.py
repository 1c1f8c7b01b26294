"""The mathematics of the stand-ins: plain transformers, with adapters that PEFT itself has read and merged."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from tinsmith_trainer.sampling.constraints.grammars import Grammars
from tinsmith_trainer.sampling.model_language import ModelLanguage
from tinsmith_trainer.sampling.token_text import INCOMPLETE
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

CACHE_BLOCK = 16


class NotAllowed(Exception):
    """A refusal in the server's words."""


class NameTaken(NotAllowed):
    """The refusal of a name that a loaded adapter has."""


class FolderMissing(NotAllowed):
    """The refusal of a folder without an adapter."""


@dataclass(frozen=True)
class Rules:
    """The changes of a request's logits.

    With `all_in_logprobs`, logprobs are those after all of it, else after the grammar alone.
    """

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    grammar: str = ""
    all_in_logprobs: bool = False

    @classmethod
    def of(cls, body: Mapping[str, Any], grammar: str, *, all_in_logprobs: bool) -> Rules:
        bias = body.get("logit_bias", {})
        return cls(body["frequency_penalty"], body["presence_penalty"], bias, grammar, all_in_logprobs)

    def added(self, drawn: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(torch.tensor(drawn, dtype=torch.long), minlength=len(logits))
        changed = logits - self.frequency_penalty * counts - self.presence_penalty * (counts > 0)
        for token, bias in self.logit_bias.items():
            changed[int(token)] += bias
        return changed


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence, as a request of either kind asks for it. `stop_ids` end it whatever they are.

    `taken_for_drawn`: tokens of the prompt in whose text stop strings are sought, too, once a character is whole.
    """

    prompt: list[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    generator_of: Callable[[int], torch.Generator | None]  # by the position of the token
    taken_for_drawn: tuple[int, ...] = ()
    cache_salt: str | None = None
    rules: Rules = Rules()


@dataclass
class Computed:
    """`matched` is the id or the string that ended it, or None. `temperature_logprobs` are those after temperature.

    `rows` are all logprobs at each token, `prompt_rows` at each token of the prompt but the first.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    temperature_logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)  # of all tokens but the first
    rows: list[torch.Tensor] = field(default_factory=list)
    prompt_rows: list[torch.Tensor] = field(default_factory=list)
    matched: int | str | None = None
    cached_tokens: int = 0


class Computer:
    """A base model and the adapters that were loaded. Nothing is computed while `may_go_on` is not set.

    Where it does not `score_heads`, prompts are scored without what an adapter adds to the unembedding.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, *, scores_heads: bool = True) -> None:
        self._scores_heads = scores_heads
        self.with_head: set[str] = set()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self._base: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        self.context: int = self._base.config.max_position_embeddings
        self.eos_ids: frozenset[int] = _as_set(self._base.generation_config.eos_token_id)
        self._merged: dict[str | None, Any] = {None: self._base}
        self._prefixes: set[tuple[tuple[str | None, str | None], tuple[int, ...]]] = set()
        language = ModelLanguage(self.tokenizer, tuple(self.eos_ids), directory, self.context)
        self._grammars = Grammars(language, self._base.config.vocab_size)
        self.steps = 0
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    @property
    def adapters(self) -> list[str]:
        return [name for name in self._merged if name is not None]

    async def load(self, name: str, folder: Path, max_rank: int) -> None:
        await self.may_go_on.wait()
        if name in self._merged:
            raise NameTaken(f"The lora adapter '{name}' has already been loaded.")
        if not (folder / "adapter_config.json").is_file():
            raise FolderMissing(f"Loading lora {name} failed: No adapter found for {folder}")
        loaded = PeftModel.from_pretrained(copy.deepcopy(self._base), str(folder))
        rank = loaded.peft_config["default"].r
        if rank > max_rank:
            raise NotAllowed(f"LoRA rank {rank} is greater than max_lora_rank {max_rank}.")
        if "lm_head" in loaded.targeted_module_names:
            self.with_head.add(name)
        self._merged[name] = loaded.merge_and_unload().eval()

    def unload(self, name: str) -> None:
        if self._merged.pop(name, None) is None:
            raise NotAllowed(f"The lora adapter '{name}' cannot be found.")

    async def compute(self, adapter: str | None, request: SequenceRequest) -> Computed:
        """Compute the job. It yields after each token, so that other requests run, and this one can be cancelled."""
        computed = Computed(cached_tokens=self._cached_tokens(adapter, request))
        for _ in self._steps(self._merged[adapter], request, computed):
            await self.may_go_on.wait()
            self.steps += 1
            await asyncio.sleep(0)
        return computed

    @torch.inference_mode()
    def _steps(self, model: Any, request: SequenceRequest, computed: Computed) -> Iterator[None]:
        cache = DynamicCache()
        grammar = request.rules.grammar
        state = self._grammars.matcher(grammar) if grammar else None
        fed = torch.tensor([request.prompt])
        text = ""
        yield
        while len(computed.tokens) < request.max_tokens:
            output = model(input_ids=fed, past_key_values=cache, use_cache=True, output_hidden_states=True)
            logits = output.logits[0].float()
            if not computed.tokens:
                head = model.lm_head if self._scores_heads else self._base.lm_head
                rows = torch.log_softmax(head(output.hidden_states[-1][0, :-1]).float(), -1)
                computed.prompt_rows = list(rows)
                computed.prompt_logprobs = rows.gather(-1, fed[0, 1:, None])[:, 0].tolist()
            self._draw(logits[-1] if state is None else _masked(logits[-1], state), request, computed)
            token = computed.tokens[-1]
            if state is not None and token not in self.eos_ids:
                assert state.consume_token(token), state.get_error()
            fed = torch.tensor([[token]])
            if token in request.stop_ids:
                computed.matched = token
                return
            if request.stop_strings:
                read = [*request.taken_for_drawn, *computed.tokens]
                text = self.tokenizer.decode(read, clean_up_tokenization_spaces=False)
                is_whole = not request.taken_for_drawn or not text.endswith(INCOMPLETE)
                computed.matched = next((stop for stop in request.stop_strings if is_whole and stop in text), None)
                if computed.matched is not None:
                    return
            yield

    def _draw(self, logits: torch.Tensor, request: SequenceRequest, computed: Computed) -> None:
        changed = request.rules.added(computed.tokens, logits)
        logits = changed if request.rules.all_in_logprobs else logits
        scaled = changed / (request.temperature or 1.0)
        token = int(changed.argmax())
        if request.temperature > 0:
            probabilities = _filtered(torch.softmax(scaled, -1), request.top_k, request.top_p)
            generator = request.generator_of(len(request.prompt) + len(computed.tokens))
            token = int(torch.multinomial(probabilities, 1, generator=generator))
        computed.tokens.append(token)
        computed.rows.append(torch.log_softmax(logits, -1))
        computed.logprobs.append(float(computed.rows[-1][token]))
        computed.temperature_logprobs.append(float(torch.log_softmax(scaled, -1)[token]))

    def _cached_tokens(self, adapter: str | None, request: SequenceRequest) -> int:
        """Whole blocks of a prompt that an earlier one of the same salt began with, never all of it."""
        prompt, owner = request.prompt, (adapter, request.cache_salt)
        blocks = [tuple(prompt[:end]) for end in range(CACHE_BLOCK, len(prompt), CACHE_BLOCK)]
        hits = [block for block in blocks if (owner, block) in self._prefixes]
        self._prefixes.update((owner, block) for block in blocks)
        return max((len(block) for block in hits), default=0)


def top_of(row: torch.Tensor, k: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens of a position with their logprobs."""
    values, ids = row.topk(k)
    return list(zip(ids.tolist(), values.tolist(), strict=True))


def _masked(logits: torch.Tensor, state: Any) -> torch.Tensor:
    bits = np.unpackbits(np.frombuffer(state.compute_bitmask(), np.uint8), bitorder="little")[: len(logits)]
    return logits.masked_fill(torch.from_numpy(bits == 0), float("-inf"))


def _filtered(probabilities: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    ordered, ids = probabilities.sort(descending=True)
    if top_k > 0:
        ordered[top_k:] = 0
    ordered[(ordered.cumsum(-1) - ordered) >= top_p * ordered.sum()] = 0
    return torch.zeros_like(probabilities).scatter(0, ids, ordered)


def _as_set(ids: int | list[int] | None) -> frozenset[int]:
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])
