# Tinsmith's tasks. `make` alone lists them; .ci/run calls the same ones.

VENV := .venv
BIN := $(VENV)/bin
PYTHON_VERSIONS := 3.11 3.12 3.13
PACKAGES := api_server client rpc trainer_image
LOCK := requirements/dev.txt

# The other Pythons run the unit tests only.
OTHER_PYTHONS = $(filter-out $(shell $(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'), \
    $(foreach version,$(PYTHON_VERSIONS),$(if $(shell scripts/find-python $(version) 2>/dev/null),$(version))))

# Without bytecode each worker process would compile the sources anew.
export PYTHONDONTWRITEBYTECODE =
# Nothing here needs the model hub, and an unreachable one must not slow the tests down.
export HF_HUB_OFFLINE = 1

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-unit test-other-pythons check docs format proto lock bench debian-packages clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

venv: $(VENV)/.tinsmith ## make .venv: everything to run, test and change Tinsmith

$(VENV)/.tinsmith: pyproject.toml $(VENV)/.requirements
	scripts/install-tinsmith $(VENV)
	@touch $@

$(VENV)/.requirements: $(LOCK)
	scripts/make-venv $(VENV) "$$(scripts/find-python $(PYTHON_VERSIONS))"
	@touch $@

demo: venv ## train a tiny model through a server on this machine, and draw what happened
	$(BIN)/tinsmith demo --out demo-output

test: venv ## every test this machine can run; then the unit tests on other installed Pythons
	$(BIN)/pytest
	@$(MAKE) --no-print-directory test-other-pythons

test-unit: venv ## the tests that take seconds
	$(BIN)/pytest tests/unit

test-other-pythons: venv ## the unit tests on each other Python that is installed
	@for version in $(OTHER_PYTHONS); do \
	    $(MAKE) --no-print-directory .venv-$$version/.tinsmith && \
	    echo "unit tests on Python $$version" && \
	    .venv-$$version/bin/pytest tests/unit || exit 1; \
	done

.venv-%/.tinsmith: pyproject.toml $(LOCK)
	scripts/make-venv .venv-$* "$$(scripts/find-python $*)"
	scripts/install-tinsmith .venv-$*
	@touch $@

check: venv ## formatting, lint, types, import directions, reference tables
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/reference.py --check

docs: venv ## write the tables of docs/ that the code knows
	$(BIN)/python scripts/reference.py

format: venv ## format the code and mend what lint can mend
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

proto: venv ## regenerate the Python code of rpc/tinsmith_rpc/*.proto
	PYTHON=$(CURDIR)/$(BIN)/python scripts/generate-code

lock: ## resolve requirements/dev.txt anew (needs uv)
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	    --no-emit-find-links --no-header --override requirements/overrides.txt --extra dev pyproject.toml \
	    --output-file $(LOCK)

bench: venv ## the time of a training step as a multiple of a bare PEFT loop's
	$(BIN)/python benchmarks/step.py

debian-packages: ## install PostgreSQL for its tests (as root, on Debian)
	scripts/debian-packages

clean: ## remove the environments, caches and the demo's files
	rm -rf $(VENV) .venv-3.* demo-output .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +
