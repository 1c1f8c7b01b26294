"""Changes that Python makes at its start where this folder is on PYTHONPATH: in tests and ranks.

In addition to what Megatron needs, Miles imports two modules that need a GPU's libraries, for what no rank of Tinsmith
does: memory that is lent to a sampler, and weights that are sent to one by RDMA. Miles' own tests replace the same two.
"""

import sys
from types import ModuleType

import gpu_code_on_cpu

NOT_INSTALLED = {
    "torch_memory_saver": "torch_memory_saver",
    "miles.backends.megatron_utils.update_weight.update_weight_from_distributed.p2p": "UpdateWeightP2P",
}
"""Modules, and the one name that Miles' actor takes of each."""


def _put_away() -> None:
    for module, name in NOT_INSTALLED.items():
        sys.modules[module] = ModuleType(module)
        setattr(sys.modules[module], name, type(name, (), {}))


_put_away()
gpu_code_on_cpu.install(
    after={},
    # Its module imports TransformerEngine at this commit, for an adapter's shape on layers that nothing here has.
    around={"megatron.bridge.peft.lora": gpu_code_on_cpu.transformer_engine},
)
