"""`make zoo`: asks every family, writes docs/reference/models.md, and fails where something is beyond its tolerance."""

from __future__ import annotations

import logging
import sys
import time

import structlog
from support.temporary_files import OwnPlace
from support.zoo.checks import Findings, examine, quiet
from support.zoo.families import FAMILIES
from support.zoo.table import PAGE, with_tables, written


def main() -> int:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    quiet()
    place = OwnPlace.take()
    findings = [_examined(model_type) for model_type in FAMILIES]
    place.give_up()
    PAGE.write_text(with_tables(PAGE.read_text(), written(findings)))
    wrong = [found.model_type for found in findings if found.failures()]
    print(f"{len(findings)} families, {PAGE.name} is written" + (f"; wrong: {', '.join(wrong)}" if wrong else ""))
    return 1 if wrong else 0


def _examined(model_type: str) -> Findings:
    started = time.process_time()
    found = examine(model_type)
    summary = "; ".join(found.failures()) or ("refused" if found.refused else "well")
    print(f"{model_type:20} {summary}  ({time.process_time() - started:.1f} s)", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
