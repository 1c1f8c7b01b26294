"""The CRDs and the typed models say the same, and the CRDs say it well. What they refuse is tested on an API server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from support.kubernetes.crds import (
    CRD_FILE,
    POOL_CRD_FILE,
    TEMPLATE_CRD_FILE,
    Schema,
    fill_defaults,
    load_crd,
    root_schema,
    walk,
)
from support.operator.resources import ON_CLAIM
from tinsmith_operator.api import names
from tinsmith_operator.api.conditions import LONGEST_MESSAGE
from tinsmith_operator.api.sampler_pool import SamplerPoolSpec
from tinsmith_operator.api.serving_spec import ServingSpec
from tinsmith_operator.api.session_template import SessionTemplateSpec
from tinsmith_operator.api.status import (
    ReconciledStatus,
    SamplerPoolStatus,
    SessionTemplateStatus,
    TrainingProgress,
    TrainingSessionStatus,
)
from tinsmith_operator.api.training_session import TrainingSessionSpec
from tinsmith_operator.policy import CLAIM_PATTERN, SECRET_PATTERN


@dataclass(frozen=True)
class Crd:
    """filled: fields of the spec that have a default. claims: those that name a claim."""

    file: Path
    kind: str
    plural: str
    spec: type[ServingSpec] | type[SessionTemplateSpec]
    status: type[ReconciledStatus]
    filled: frozenset[str]
    claims: frozenset[str]

    @property
    def fields(self) -> list[tuple[str, Schema]]:
        return [(place, field) for place, field in walk(root_schema(self.file)) if place != "metadata"]


SESSION = Crd(
    CRD_FILE,
    names.SESSION_KIND,
    names.SESSION_PLURAL,
    TrainingSessionSpec,
    TrainingSessionStatus,
    frozenset({"suspend"}),
    frozenset({"model.source.persistentVolumeClaim.claimName", "modelCache.claimName", "storage.existingClaim"}),
)
POOL = Crd(
    POOL_CRD_FILE,
    names.POOL_KIND,
    names.POOL_PLURAL,
    SamplerPoolSpec,
    SamplerPoolStatus,
    frozenset({"engine", "replicas", "adapters", "pod"}),
    frozenset({"model.source.persistentVolumeClaim.claimName"}),
)
TEMPLATE = Crd(
    TEMPLATE_CRD_FILE,
    names.TEMPLATE_KIND,
    names.TEMPLATE_PLURAL,
    SessionTemplateSpec,
    SessionTemplateStatus,
    frozenset({"maxSessions", "warm"}),
    SESSION.claims,
)
READ_SECRETS = ("model.source.hub.tokenSecretRef", "pod.env[].valueFrom.secretKeyRef")
CRDS = pytest.mark.parametrize("crd", [SESSION, POOL], ids=lambda crd: crd.kind)
ALL_FIELDS = [
    pytest.param(place, field, id=f"{crd.kind}.{place}")
    for crd in (SESSION, POOL, TEMPLATE)
    for place, field in crd.fields
]
ALL_RULES = [
    rule
    for crd in (SESSION, POOL, TEMPLATE)
    for _, field in [("", root_schema(crd.file)), *crd.fields]
    for rule in field.get("x-kubernetes-validations", ())
]


@CRDS
def test_the_crds_refuse_the_reserved_names_that_need_no_settings(crd: Crd) -> None:
    rules = [rule["rule"] for _, field in crd.fields for rule in field.get("x-kubernetes-validations", ())]
    secrets, claims = (f"r'^({pattern.pattern})$'" for pattern in (SECRET_PATTERN, CLAIM_PATTERN))
    assert len([rule for rule in rules if secrets in rule]) == len(READ_SECRETS)
    assert len([rule for rule in rules if claims in rule]) == len(crd.claims)


def fields_of(model: type[BaseModel], path: str) -> set[str]:
    """Paths in the CRD's words of a model and the models in it."""
    found = set()
    for field in model.model_fields.values():
        place = f"{path}.{field.alias}"
        found.add(place)
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                found |= fields_of(inner, place + ("[]" if get_args(field.annotation)[-1:] == (...,) else ""))
    return found


# Parts of a pod that go into it as they are, without our looking into them.
PASSED_ON = (
    "spec.pod.tolerations",
    "spec.pod.affinity",
    "spec.pod.topologySpreadConstraints",
    "spec.pod.imagePullSecrets",
    "spec.pod.env",
)


def crd_fields(crd: Crd) -> set[str]:
    places = {place for place, _ in crd.fields if place.partition(".")[0] in {"spec", "status"}}
    named = {place for place in places if not place.endswith(("[]", ".*")) and place not in {"spec", "status"}}
    return {place for place in named if not any(place.startswith((f"{part}.", f"{part}[")) for part in PASSED_ON)}


@CRDS
def test_the_model_knows_every_field_of_the_crd_and_no_other(crd: Crd) -> None:
    """The API server writes `status.wantedTime`. The operator writes the rest, and a session's progress apart."""
    known = fields_of(crd.spec, "spec") | fields_of(crd.status, "status") | {"status.wantedTime"}
    if crd is SESSION:
        known |= fields_of(TrainingProgress, "status.progress") | {"status.progress"}
    of_the_template = {"spec.templateRef", "spec.templateRef.name"} if crd is SESSION else set()
    assert known | of_the_template == crd_fields(crd)


def test_the_model_knows_every_field_that_only_templates_have() -> None:
    spec, status = (
        {place for place in crd_fields(TEMPLATE) if place.startswith(part)} for part in ("spec.", "status.")
    )
    assert status == fields_of(SessionTemplateStatus, "status")
    assert spec - crd_fields(SESSION) == fields_of(SessionTemplateSpec, "spec")


def test_a_template_has_the_fields_and_rules_of_a_session() -> None:
    session, template = (root_schema(file)["properties"]["spec"] for file in (CRD_FILE, TEMPLATE_CRD_FILE))
    for name in ("suspend", "templateRef"):
        session["properties"].pop(name)
    for name in ("maxSessions", "warm"):
        template["properties"].pop(name)
    assert in_words_of_neither(template["properties"]) == in_words_of_neither(session["properties"])
    rules = [each for each in session["x-kubernetes-validations"] if "templateRef" not in each["rule"]]
    assert template["x-kubernetes-validations"][-len(rules) :] == rules


def test_a_session_from_a_template_may_set_no_other_field_but_suspend() -> None:
    session = root_schema(CRD_FILE)["properties"]["spec"]
    (rule,) = (each["rule"] for each in session["x-kubernetes-validations"] if "has(self.idle) ||" in each["rule"])
    assert set(re.findall(r"has\(self\.(\w+)\)", rule)) == {
        "templateRef",
        *(session["properties"].keys() - {"model", "suspend"}),
    }


@CRDS
def test_the_defaults_of_model_and_crd_are_the_same_but_for_the_highest_rank(crd: Crd) -> None:
    """An operator that leaves out another rank than the first one did hashes every stored resource otherwise."""
    given = {"model": {"name": "m", "source": ON_CLAIM}}
    filled = fill_defaults(given, root_schema(crd.file)["properties"]["spec"])
    assert crd.spec.model_validate(given).adapters.max_rank == (128 if crd is SESSION else 64)
    assert filled.keys() == {"model", *crd.filled}
    empty = fill_defaults({**given, "adapters": {}}, root_schema(crd.file)["properties"]["spec"])
    assert empty["adapters"]["maxRank"] == 128
    empty["adapters"] = {**empty["adapters"], "maxRank": 64}
    assert crd.spec.model_validate({**given, "adapters": {}}) == crd.spec.model_validate(empty)


@CRDS
def test_the_names_of_the_code_are_those_of_the_crd(crd: Crd) -> None:
    spec = load_crd(crd.file)["spec"]
    assert (spec["group"], spec["names"]["kind"], spec["names"]["plural"]) == (names.GROUP, crd.kind, crd.plural)
    assert [version["name"] for version in spec["versions"]] == [names.VERSION]


def in_words_of_neither(field: Any) -> Any:
    """Return the schema without descriptions and without the pool's own default."""
    if isinstance(field, dict):
        spoken = {"description", "message"}
        return {name: in_words_of_neither(each) for name, each in field.items() if name not in spoken}
    return [in_words_of_neither(each) for each in field] if isinstance(field, list) else field


@pytest.mark.parametrize("part", ["model", "resources", "maxSequenceLength", "pod", "idle", "activeDeadlineSeconds"])
def test_common_fields_of_sessions_and_pools_have_one_form(part: str) -> None:
    session, pool = (
        in_words_of_neither(root_schema(crd.file)["properties"]["spec"]["properties"][part]) for crd in (SESSION, POOL)
    )
    if part == "pod":
        assert pool.pop("default") == {}
        assert pool["properties"].pop("topologySpreadConstraints")
        assert pool["properties"]["terminationGracePeriodSeconds"].pop("default") == 600
    assert session == pool


@pytest.mark.parametrize(("place", "field"), ALL_FIELDS)
def test_every_field_is_described_in_a_sentence(place: str, field: Schema) -> None:
    assert field["description"][0].isupper() or field["description"].startswith("`")
    assert field["description"].endswith(".")


@pytest.mark.parametrize(("place", "field"), ALL_FIELDS)
def test_every_field_is_bounded(place: str, field: Schema) -> None:
    match field.get("type"):
        case "string":
            assert "maxLength" in field or "enum" in field or "format" in field or place in {"apiVersion", "kind"}
        case "array":
            assert "maxItems" in field
        case "integer" if place.startswith("spec.") and not place.endswith("tolerationSeconds"):
            assert {"minimum", "maximum"} <= field.keys()
        case "object":
            assert "properties" in field or "maxProperties" in field
        case None:
            assert field["x-kubernetes-int-or-string"]
            assert "maxLength" in field


@pytest.mark.parametrize(("place", "field"), ALL_FIELDS)
def test_no_field_accepts_values_that_the_schema_does_not_name(place: str, field: Schema) -> None:
    """An object that nests deeper than a parser can read would break every list of its kind."""
    assert {"x-kubernetes-preserve-unknown-fields", "x-kubernetes-embedded-resource"}.isdisjoint(field)
    match field.get("type"):
        case "object":
            assert bool(field.get("properties")) != isinstance(field.get("additionalProperties"), dict)
        case "array":
            assert isinstance(field["items"], dict)
        case type_:
            assert type_ is not None or field["x-kubernetes-int-or-string"]


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule["rule"][:60])
def test_every_rule_says_what_to_change(rule: dict[str, str]) -> None:
    assert len(rule["message"]) > 25


@CRDS
def test_the_operators_longest_message_fits_into_a_condition(crd: Crd) -> None:
    conditions = root_schema(crd.file)["properties"]["status"]["properties"]["conditions"]["items"]["properties"]
    assert conditions["message"]["maxLength"] >= LONGEST_MESSAGE
