from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.engines.nemo_rl.environment import (
    ARCHITECTURES,
    DriverEnvironmentInvalid,
    check_driver,
    for_ranks,
    shared_with_ranks,
)

SECRETS = [
    "HF_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "WANDB_API_KEY",
    "DATABASE_PASSWORD",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "HTTP_AUTHORIZATION",
]
NEEDED = [
    ARCHITECTURES,
    "CUDA_HOME",
    "LD_LIBRARY_PATH",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "HF_HOME",
    "PYTHONPATH",
    "RAY_AUTH_TOKEN",
    "TOKENIZERS_PARALLELISM",
]


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_do_not_reach_ranks(name: str) -> None:
    assert for_ranks({name: "secret", "HOME": "/root"}) == {"HOME": "/root"}


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "RAY_JOB_ID", "TINSMITH_JOURNAL"])
def test_variables_that_would_mislead_a_rank_stay_with_the_driver(name: str) -> None:
    assert for_ranks({name: "value"}) == {}


@given(st.dictionaries(st.sampled_from([*SECRETS, *NEEDED, "SLURM_JOB_ID"]), st.text(max_size=5)))
def test_the_driver_has_its_environment_back_when_ranks_are_made(environment: dict[str, str]) -> None:
    before = dict(environment)
    with shared_with_ranks(environment):
        assert environment == for_ranks(before)
    assert environment == before


def test_a_driver_outside_the_image_gets_the_name_of_the_missing_package() -> None:
    check_driver({ARCHITECTURES: "9.0 10.0"})
    with pytest.raises(DriverEnvironmentInvalid, match="TORCH_CUDA_ARCH_LIST is not set"):
        check_driver({})
