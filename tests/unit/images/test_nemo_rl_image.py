"""The requirements of the NeMo RL image on its base; test_rank_images.py has what it shares with Miles."""

from __future__ import annotations

from support.base_images import OnABase

NEMO_RL = OnABase("nemo-rl")
PREBUILT = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"


def test_its_base_is_an_argument_of_the_build_and_must_be_the_commit_that_was_read() -> None:
    commit = NEMO_RL.versions["commit"]
    assert NEMO_RL.lines("ARG") == ["BASE", f"NEMO_RL_COMMIT={commit}"]
    assert NEMO_RL.lines("FROM") == ["${BASE}"]
    assert 'rev-parse HEAD)" = "$NEMO_RL_COMMIT"' in NEMO_RL.lines("RUN")[0]


def test_a_base_without_the_ranks_python_is_refused_while_building() -> None:
    assert f"test -x /opt/ray_venvs/{PREBUILT}/bin/python" in NEMO_RL.lines("RUN")[0]
