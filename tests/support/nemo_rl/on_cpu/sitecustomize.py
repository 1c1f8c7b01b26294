"""Python runs this at its start where this folder is on PYTHONPATH: in tests, ranks, and what converts models.

NeMo RL's workers use more of Megatron than is changed for all: context ranks, mixtures, Megatron-Bridge's own start.
"""

import gpu_code_on_cpu


def _attention() -> None:
    from gpu_code_on_cpu import context

    context.attend_over_context_ranks()


def _experts() -> None:
    from gpu_code_on_cpu import experts

    experts.group_experts()


def _initialize() -> None:
    from gpu_code_on_cpu import bridge

    bridge.initialize_without_gpu()


gpu_code_on_cpu.install(
    after={
        "megatron.core.transformer.dot_product_attention": _attention,
        "megatron.core.models.backends": _experts,
        "megatron.bridge.training.initialize": _initialize,
    },
    around={},
)
