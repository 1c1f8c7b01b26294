"""What of the driver's environment its ranks may have, and what the driver must have itself.

NeMo RL hands every variable of the driver's to every rank (`init_ray` in `nemo_rl/distributed/virtual_cluster.py`,
`_create_workers_from_bundle_indices` in `nemo_rl/distributed/worker_groups.py`), where Ray shows them to whoever may
ask it for an actor. So what must stay secret is taken out while ranks are made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

from tinsmith_trainer.errors import TrainerError

ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"

_SECRET = re.compile(r"TOKEN(?!IZER)|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH", re.IGNORECASE)
_LAUNCHERS = ("PMIX_", "PMI_", "MPI_", "OMPI_", "SLURM_")
"""A rank that finds these believes that one of those programs started it."""
_RAY_OWN = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES")
"""Of the process that reads them: another's mislead it."""
_RAY_KEY = "RAY_AUTH_"
"""By which every process of a cluster knows the others, ranks too. It opens nothing else."""
_OURS = "TINSMITH_"
"""This process's own settings. Ranks get theirs as arguments."""


class DriverEnvironmentInvalid(TrainerError):
    """The driver lacks a variable without which NeMo RL refuses to make ranks."""


def stays_with_driver(name: str) -> bool:
    """Whether a variable of that name must not reach a rank. Names tell: values are never looked at."""
    if name.startswith(_RAY_KEY):
        return False
    return name.startswith((*_LAUNCHERS, _OURS)) or name in _RAY_OWN or _SECRET.search(name) is not None


def for_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """What ranks are given of the driver's environment."""
    return {name: value for name, value in environment.items() if not stays_with_driver(name)}


def check_driver(environment: Mapping[str, str]) -> None:
    """Raises DriverEnvironmentInvalid. `Policy.__init__` raises too, but only after Ray has found all GPUs."""
    if not environment.get(ARCHITECTURES):
        raise DriverEnvironmentInvalid(
            f"{ARCHITECTURES} is not set, and NeMo RL makes no Megatron workers without it. The image that it comes "
            f"in sets it to the GPU architectures that it was built for; run the worker in that image, or set it."
        )


@contextmanager
def shared_with_ranks(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Ranks made inside get what they may have, since NeMo RL copies the process's environment. Restored at the end.

    For a process that does nothing else meanwhile: others would miss the variables too.
    """
    withheld = {name: value for name, value in environment.items() if stays_with_driver(name)}
    for name in withheld:
        del environment[name]
    try:
        yield
    finally:
        environment.update(withheld)
