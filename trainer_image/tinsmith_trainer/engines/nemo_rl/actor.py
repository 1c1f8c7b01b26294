"""The Ray actor class that NeMo RL imports on every rank, by the dotted name `group.WORKER`.

A class cannot inherit from a Ray actor class. So NeMo RL keeps the code of a worker in an implementation class, and
decorates an empty subclass, `MegatronPolicyWorker`. Tinsmith's class is decorated in the same way.
"""

from __future__ import annotations

import ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

from tinsmith_trainer.engines.nemo_rl.worker import TinsmithMegatronWorkerMixin


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class TinsmithMegatronWorker(TinsmithMegatronWorkerMixin, MegatronPolicyWorkerImpl):  # type: ignore[misc]
    """A rank on one GPU."""
