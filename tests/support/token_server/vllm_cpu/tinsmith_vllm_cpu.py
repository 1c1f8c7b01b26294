"""A plugin of vLLM that repairs its build for CPUs, where its build for GPUs is right.

vLLM loads it in each of its processes, for the entry point in vllm.dist-info. It uses nothing of Tinsmith. Each of
these faults ended the server or gave wrong numbers in 0.32.0; try without them when the version goes up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def mend() -> None:
    """Once a process. What a later version has elsewhere fails here, and so at the start."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    _leave_the_base_model_alone(lora_ops, punica_cpu)
    _add_to_as_many_logits_as_there_are_requests(punica_cpu.PunicaWrapperCPU)
    _rewind_generators_of_unfinished_prompts(CPUModelRunner)
    _compute_experts_without_triton(TritonExperts)


def _leave_the_base_model_alone(lora_ops: Any, punica_cpu: Any) -> None:
    """Ignore tokens without an adapter, whose index is -1.

    Kernels for GPUs skip them. In PyTorch -1 is the last slot: as soon as all slots are taken, the base model has the
    adapter of that one.
    """
    shrink = lora_ops.bgmv_shrink

    def mended(
        inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, slots: torch.Tensor, scaling: float = 1.0
    ) -> None:
        shrink(inputs, weights, output, slots, scaling)
        output[slots < 0] = 0

    # The second has it by its own name; what calls it within the first finds it there.
    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = mended


def _add_to_as_many_logits_as_there_are_requests(wrapper: Any) -> None:
    """Add to as many logits as there are requests.

    A step knows one adapter for each request's next token. Logits of a prompt have other numbers of rows: on GPUs the
    rows beyond stay as they are, here the shapes do not fit, and the engine dies.
    """
    add = wrapper.add_lora_logits

    def mended(self: Any, y: torch.Tensor, x: torch.Tensor, *weights: Any, **others: Any) -> None:
        known = self.indices_len[1]
        rows = min(known, y.view(-1, y.shape[-1]).shape[0])
        self.indices_len[1] = rows
        try:
            add(self, y.view(-1, y.shape[-1])[:rows], x.view(-1, x.shape[-1])[:rows], *weights, **others)
        finally:
            self.indices_len[1] = known

    wrapper.add_lora_logits = mended


def _rewind_generators_of_unfinished_prompts(runner: Any) -> None:
    """Rewind generators of unfinished prompts.

    A step that ends within a prompt draws, too, and rewinds the generator by its offset. Those of a CPU have none: the
    engine dies of the first long prompt with a seed. Here their state is restored.
    """
    sample, keep_books = runner._sample, runner._bookkeeping_sync

    def unfinished(self: Any) -> dict[int, torch.Generator]:
        places = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        generators = self.input_batch.generators
        return {int(place): generators[int(place)] for place in places if int(place) in generators}

    def sampled(self: Any, *arguments: Any, **others: Any) -> Any:
        before = [(generator, generator.get_state()) for generator in unfinished(self).values()]
        drawn = sample(self, *arguments, **others)
        for generator, state in before:
            generator.set_state(state)
        return drawn

    def kept(self: Any, *arguments: Any, **others: Any) -> Any:
        away = unfinished(self)
        for place in away:
            del self.input_batch.generators[place]
        try:
            return keep_books(self, *arguments, **others)
        finally:
            self.input_batch.generators.update(away)

    runner._sample, runner._bookkeeping_sync = sampled, kept


def _compute_experts_without_triton(experts: Any) -> None:
    """Compute experts without Triton.

    With LoRA a mixture's experts are computed by Triton's kernels alone, which a CPU has none of: the first request
    ends the engine. Loading, stacking and choosing adapters stay vLLM's; here are the products, expert by expert. They
    cover what the tests serve: gated experts with SiLU, whole weights, one process.
    """

    def mended(self: Any, *, output: torch.Tensor, hidden_states: torch.Tensor, **call: Any) -> None:
        assert call["activation"].value == "silu"
        assert call["expert_map"] is None
        chosen: torch.Tensor = call["topk_ids"]
        slots = _slots_of(self._lora_context, len(hidden_states))
        output.zero_()
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            weights = call["w1"][expert], call["w2"][expert]
            expert_output = _expert_output(expert, hidden_states[rows], slots[rows], weights, self._lora_context)
            output.index_add_(0, rows, expert_output * call["topk_weights"][rows, places, None].to(expert_output.dtype))

    experts.apply = mended


def _expert_output(
    expert: int, x: torch.Tensor, slots: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], adapters: Any
) -> torch.Tensor:
    gate, up = torch.nn.functional.linear(x, weights[0]).chunk(2, -1)
    for output, a, b in _stacks(adapters, "w13", gate, up):
        _add_products(output, x, slots, a[:, expert], b[:, expert])
    inner = torch.nn.functional.silu(gate) * up
    down = torch.nn.functional.linear(inner, weights[1])
    for output, a, b in _stacks(adapters, "w2", down):
        _add_products(output, inner, slots, a[:, expert], b[:, expert])
    return down


def _slots_of(adapters: Any, tokens: int) -> torch.Tensor:
    """Return for each token the slot of its adapter, or -1. There are no adapters before the first mapping."""
    slots = torch.full((tokens,), -1, dtype=torch.long)
    if adapters is not None:
        known = adapters.punica_wrapper.token_lora_indices[:tokens]
        slots[: len(known)] = known
    return slots


def _stacks(adapters: Any, name: str, *outputs: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    if adapters is None:
        return []
    stacked = getattr(adapters, f"{name}_lora_a_stacked"), getattr(adapters, f"{name}_lora_b_stacked")
    return list(zip(outputs, *stacked, strict=True))


def _add_products(output: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add the product of each token's adapter. vLLM has its scaling in B."""
    for slot in slots.unique().tolist():
        if slot >= 0:
            output[slots == slot] += x[slots == slot] @ a[slot].T @ b[slot].T
