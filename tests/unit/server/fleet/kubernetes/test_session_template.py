"""The sessions that a template allows, and the messages for waiting clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.server.operator_stand_in import spec_of
from tinsmith_server.fleet.kubernetes.api import KubernetesApi
from tinsmith_server.fleet.kubernetes.fleet import SessionProvisioner
from tinsmith_server.fleet.kubernetes.session_template import SessionTemplate, parse_template
from tinsmith_server.fleet.kubernetes.training_session import TrainingSession, parse_session
from tinsmith_server.fleet.kubernetes.waking import Waker


def template() -> SessionTemplate:
    return parse_template({"metadata": {"name": "tiny", "namespace": "team"}, "spec": spec_of(maxSessions=2)})


def sessions(*names: str, of: str | None = "tiny") -> dict[str, TrainingSession]:
    labels = {"tinsmith.dev/template": of} if of else {}
    metadata = [{"name": name, "namespace": "team", "labels": labels} for name in names]
    return {one["name"]: parse_session({"metadata": one, "spec": spec_of()}) for one in metadata}


@pytest.mark.parametrize(
    ("present", "name"),
    [
        ({}, "tiny-1"),
        (sessions("tiny-1"), "tiny-2"),
        (sessions("tiny-2"), "tiny-1"),
        (sessions("tiny-1", "tiny-2"), None),
        (sessions("tiny-1", of=None), "tiny-2"),
        ({**sessions("tiny-1", "tiny-2", of=None), **sessions("tiny-3")}, "tiny-4"),
        (sessions("other-1", "other-2", of="other"), "tiny-1"),
    ],
)
def test_the_next_name_follows_from_the_existing_names(present: dict[str, TrainingSession], name: str | None) -> None:
    assert template().next_name(present) == name


async def provided(existing: dict[str, TrainingSession], templates: Sequence[SessionTemplate], **need: Any) -> str:
    api = KubernetesApi()
    provisioner = SessionProvisioner(api, lambda: templates, lambda _made: None, Waker(api.want))
    asked = {"base_model": spec_of()["model"]["name"], "rank": 8, "sampling": False, **need}
    return await provisioner.provide({(one.namespace, one.name): one for one in existing.values()}, **asked)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (True, "no SamplerPool and no TrainingSession samples from org/absent at LoRA rank 8; ask an administrator"),
        (False, "no TrainingSession trains org/absent at LoRA rank 8; ask an administrator"),
    ],
)
async def test_a_model_that_no_resource_serves_is_named_with_its_rank_and_use(sampling: bool, message: str) -> None:
    assert (await provided({}, (), base_model="org/absent", sampling=sampling)).startswith(message)


async def test_a_stalled_session_is_explained_and_no_second_one_is_created() -> None:
    """A second session of the same spec would stall in the same way."""
    states = [("Ready", "False", "There is no such model."), ("Stalled", "True", "")]
    status = {"conditions": [{"type": type, "status": state, "message": text} for type, state, text in states]}
    metadata = {"name": "tiny-1", "namespace": "team", "labels": {"tinsmith.dev/template": "tiny"}}
    stalled = parse_session({"metadata": metadata, "spec": spec_of(), "status": status})
    text = await provided({"tiny-1": stalled}, [template()])
    assert text == "TrainingSession team/tiny-1 is not ready: There is no such model"
