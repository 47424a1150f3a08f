# Everything lives in .venv, and for make test-hosts in .venv-hosts: nothing is installed outside them.
#   make test PYTHON=python3.12                       another interpreter, no older than pyproject.toml says
#   make setup PIP_ARGS="--extra-index-url <index>"   another package index, such as one with CPU builds of torch
#   make test PYTEST_ARGS="-k convert"                some tests only
#   make test-all PYTEST_ARGS="-k convert"            some tests only, slow ones among them
#   make test SLOW=1                                  the slow ones, too, in one session
#   make test WORKERS=8                               on a machine of sixteen cores; a test takes up to four of them
#   make test WORKERS=0                               one test after another, such as for a debugger

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 3
SLOW ?=

# Trainers and transformers 5 do not fit beside the pinned requirements; and the oldest torch that is allowed, and the
# newest there is, have environments of their own.
VENV := .venv
HOSTS_VENV := .venv-hosts
TORCH_VERSIONS := 2.13.0 newest

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed
HOSTS_STAMP := $(HOSTS_VENV)/.installed
VERSIONS_STAMPS := $(TORCH_VERSIONS:%=.venv-torch-%/.installed)
PACKAGE := pyproject.toml setup.py
# The oldest Python.
FLOOR := $(shell sed -n 's/^requires-python = ">=\(.*\)"/\1/p' pyproject.toml)

# $(call pytest,folder): with the Python of a virtual environment. Where bytecode is not kept, every worker and every
# process that a test starts compiles all modules again.
pytest = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(1)/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal
# Of what is installed a small part is ever imported: compiling all of it takes as long as installing it.
pip_install = $(1)/bin/python -m pip install -qq --disable-pip-version-check --no-compile $(PIP_ARGS)

# $(call make_environment,folder,what pip installs torch by,what it installs everything else by)
define make_environment
	@$(PYTHON) -c 'import sys; sys.exit("Python $(FLOOR) or newer is needed: make PYTHON=..." if sys.version_info < tuple(map(int, "$(FLOOR)".split("."))) else 0)'
	@echo "[1/4] Virtual environment in $(1)"
	@$(PYTHON) -m venv $(1)
	@echo "[2/4] Installing torch (the largest download)"
	@$(call pip_install,$(1)) $(2)
	@echo "[3/4] Installing pinned requirements"
	@$(call pip_install,$(1)) $(3)
	@echo "[4/4] Installing zeroresize, editable"
	@$(call pip_install,$(1)) --no-deps --no-build-isolation --editable .
endef

.DEFAULT_GOAL := help
.PHONY: help setup test test-slow test-all test-hosts test-versions demo docs lint wheel-check release-check format clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1@\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F@ '{ printf "%-15s %s\n", $$1, $$2 }'

setup: $(STAMP)  ## create .venv and install everything, pinned (again only when the requirements change)

$(STAMP): requirements/torch.txt requirements/versions.txt requirements/base.txt requirements/colossalai.txt requirements/triton.txt $(PACKAGE)
	$(call make_environment,$(VENV),-r requirements/torch.txt,-r requirements/base.txt)
	@echo "Installing Colossal-AI"
	@$(call pip_install,$(VENV)) --no-deps -r requirements/colossalai.txt
	@$(BIN)/python -c "import triton" 2>/dev/null || $(call pip_install,$(VENV)) -r requirements/triton.txt
	@touch $@
	@echo "Ready: $(VENV)"

test: setup  ## run the tests, but for slow ones that rarely fail
	@echo "Running the tests, $(if $(SLOW),also the,without) slow ones"
	@$(call pytest,$(VENV)) -m "$(if $(SLOW),,not slow and )not exhaustive and not hosts" $(PYTEST_ARGS)

test-slow: setup  ## run the slow tests
	@echo "Running the slow tests"
	@$(call pytest,$(VENV)) -m "slow and not exhaustive and not hosts" $(PYTEST_ARGS)

test-all: setup  ## run all tests, also further cases of those that run otherwise
	@echo "Running all tests"
	@HYPOTHESIS_PROFILE=exploring $(call pytest,$(VENV)) -m "not hosts" $(PYTEST_ARGS)

test-hosts: $(HOSTS_STAMP)  ## run the tests of trainers and of transformers 5, in .venv-hosts
	@echo "Running the tests of hosts"
	@HF_HUB_OFFLINE=1 $(call pytest,$(HOSTS_VENV)) -m "hosts or transformers" tests/integrations tests/checks tests/scripts/test_bench_hosts.py $(PYTEST_ARGS)

$(HOSTS_STAMP): requirements/torch.txt requirements/hosts.txt $(PACKAGE)
	$(call make_environment,$(HOSTS_VENV),-r requirements/torch.txt,-r requirements/hosts.txt)
	@touch $@

test-versions: $(VERSIONS_STAMPS)  ## run a small suite with the oldest and the newest torch, in .venv-torch-...
	@for version in $(TORCH_VERSIONS); do \
		echo "Running a small suite with torch $$version"; \
		$(call pytest,.venv-torch-$$version) -m "versions and not slow and not exhaustive" $(PYTEST_ARGS) || exit 1; \
	done

.venv-torch-%/.installed: requirements/versions.txt $(PACKAGE)
	$(call make_environment,.venv-torch-$*,--upgrade torch$(if $(filter newest,$*),,==$*),-r requirements/versions.txt)
	@touch $@

demo: setup  ## train a small ViT with one slow rank, with and without balancing
	@$(BIN)/python -m vit_examples.demo

docs: $(DOCS_STAMP)  ## build the site under docs/_build/html; a warning is an error
	@echo "Building the site"
	@PYTHONPATH=. $(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "Ready: docs/_build/html/index.html"

$(DOCS_STAMP): $(STAMP) requirements/docs.txt
	@echo "Installing Sphinx"
	@$(call pip_install,$(VENV)) -r requirements/docs.txt
	@touch $@

lint: setup  ## ruff, ruff format, mypy, the import rules and the limits of size
	@echo "Linting"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/size.py

wheel-check: setup  ## build a wheel and an sdist, and run the wheel's commands away from the checkout
	@echo "Building a wheel and an sdist, and trying them"
	@$(BIN)/python scripts/check_wheel.py

release-check: lint docs test-all test-hosts test-versions demo  ## all there is, by hand before a tag; takes an hour or more
	@echo "Building a wheel and an sdist, and trying them in fresh environments"
	@$(BIN)/python scripts/check_wheel.py --release

format: setup  ## let ruff repair and format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## remove .venv, caches and build outputs (not runs/)
	rm -rf $(VENV) $(HOSTS_VENV) $(TORCH_VERSIONS:%=.venv-torch-%) docs/_build build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
