"""The CRD of SessionTemplates, which is made from the CRD of TrainingSessions.

A template has the fields and rules of a session's spec, except `suspend` and `templateRef`. The other parts are in
`sessiontemplates.head.yaml`. `chart_reference` calls this module.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

HEAD = Path(__file__).parent / "sessiontemplates.head.yaml"
NOT_IN_TEMPLATES = ("suspend", "templateRef")
# A template may always be changed, because sessions run by a copy.
EFFECT = re.compile(r" (Immutable|A change) [^.]*\.")
TITLE = "# Written by `make docs` from the CRD of TrainingSessions and dev/scripts/sessiontemplates.head.yaml.\n"

Schema = dict[str, Any]


class PlainDumper(yaml.SafeDumper):
    """A dumper without anchors, so that the file shows each field."""

    @override
    def ignore_aliases(self, data: Any) -> bool:
        return True


def template_crd(session_crd: Path) -> str:
    """Return the text of the CRD."""
    head = yaml.safe_load(HEAD.read_text())
    session, template = _properties(yaml.safe_load(session_crd.read_text())), _properties(head)
    spec, source = template["spec"], session["spec"]
    spec["x-kubernetes-validations"] += [
        each for each in source["x-kubernetes-validations"] if "templateRef" not in each["rule"]
    ]
    own = {name: each for name, each in source["properties"].items() if name not in NOT_IN_TEMPLATES}
    spec["properties"] |= _without_effects(own)
    template["status"]["properties"]["conditions"] = session["status"]["properties"]["conditions"]
    return TITLE + yaml.dump(head, Dumper=PlainDumper, sort_keys=False, width=110, allow_unicode=True)


def _properties(crd: Schema) -> Schema:
    (version,) = crd["spec"]["versions"]
    properties: Schema = version["schema"]["openAPIV3Schema"]["properties"]
    return properties


def _without_effects(schema: Any) -> Any:
    """Return the schema. Its descriptions do not say what a change of the field does to a session."""
    if isinstance(schema, list):
        return [_without_effects(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {name: _without_effects(each) for name, each in schema.items()}
    if isinstance(schema.get("description"), str):
        changed["description"] = EFFECT.sub("", schema["description"])
    return changed
