"""The part of the driver's environment that ranks may have, and the part that only the driver needs.

NeMo RL passes every variable of the driver to every rank (`init_ray` in `nemo_rl/distributed/virtual_cluster.py`,
`_create_workers_from_bundle_indices` in `nemo_rl/distributed/worker_groups.py`). Ray then shows the variables of ranks
to any client that may list actors. So secrets must not be in the environment while ranks are created.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

from tinsmith_trainer.errors import TrainerError

ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"

_SECRET = re.compile(r"TOKEN(?!IZER)|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH", re.IGNORECASE)
_LAUNCHERS = ("PMIX_", "PMI_", "MPI_", "OMPI_", "SLURM_")
"""The variables of other programs that start processes.

With these variables, a rank would behave as if it had been started by the other program.
"""
_RAY_OWN = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES")
"""Variables that describe one process, and that are wrong in another process."""
_RAY_KEY = "RAY_AUTH_"
"""The prefix of variables for authentication in a Ray cluster, which ranks need.

The token in these variables is valid only in this cluster.
"""
_OWN_SETTINGS = "TINSMITH_"
"""The prefix of the variables with this process's own settings. Ranks receive settings as arguments."""


class DriverEnvironmentInvalid(TrainerError):
    """An error for a missing variable of the driver. NeMo RL creates no ranks if a required variable is missing."""


def stays_with_driver(name: str) -> bool:
    """Return whether a variable must not reach a rank.

    The decision depends on the name of the variable, not on the value.
    """
    if name.startswith(_RAY_KEY):
        return False
    return name.startswith((*_LAUNCHERS, _OWN_SETTINGS)) or name in _RAY_OWN or _SECRET.search(name) is not None


def for_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the driver's environment that ranks receive."""
    return {name: value for name, value in environment.items() if not stays_with_driver(name)}


def check_driver(environment: Mapping[str, str]) -> None:
    """Raise DriverEnvironmentInvalid if the driver lacks a variable.

    `Policy.__init__` raises an error, too, but only after Ray has found all GPUs.
    """
    if not environment.get(ARCHITECTURES):
        raise DriverEnvironmentInvalid(
            f"{ARCHITECTURES} is not set, and NeMo RL creates no Megatron workers without it. NeMo RL's image sets it "
            f"to the GPU architectures that it was built for; run the worker in that image, or set it."
        )


@contextmanager
def shared_with_ranks(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Remove secrets from the environment while ranks are created, because NeMo RL copies the environment.

    Other threads must not run in this time, because the variables are missing for all threads.
    """
    withheld = {name: value for name, value in environment.items() if stays_with_driver(name)}
    for name in withheld:
        del environment[name]
    try:
        yield
    finally:
        environment.update(withheld)
