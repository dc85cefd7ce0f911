# Needs Python 3.11 or newer, and nothing else: every target installs what it needs into .venv.
# Another Python: make PYTHON=python3.13 VENV=.venv-3.13 test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Servers in the demo: make demo N=12
N ?= 4
# What goes wrong, and whether the database guards: make demo-chaos FAULT=pause GUARD=off
FAULT ?= kill
GUARD ?= on
# Where the demo keeps its locks: make demo BACKEND=sentinel
BACKEND ?= redis
# Of the site: make demo-admin PORT=8080
PORT ?= 8000
# How long things are broken, and by which order: make jepsen SECONDS=300 SEED=1-10, make simulate SEED=7
SECONDS ?= 60
SEED ?= 1
# Test processes, and further arguments: make test JOBS=2 ARGS='-k fence'. ARGS choose among all
# tests. Most tests wait for a server. With more processes, they would wait for a processor instead,
# of which each process takes six seconds or more to collect the tests; and on busy processors, short
# leases would be lost. A process that has nothing left to do takes over tests from the one that has
# most.
JOBS ?= 10
ARGS ?=
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations 10 --durations-min 5
# These keep a processor busy. So they run by themselves, in fewer processes.
HEAVY = $(addprefix tests/,demo interleavings jepsen operations/browser samples upgrades \
	celery/test_naive.py celery/test_topologies.py operations/test_prometheus.py package/test_site.py)
# So do these, but no clock disturbs them: they may get what other commands leave of a processor.
COMPUTING = $(addprefix tests/,mutants simulation package/test_packaging.py \
	package/test_public_api.py)

# Whatever the environment says: the tests and the demo start many Pythons, each of which would
# compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo demo-without-lock demo-stale-holder demo-chaos demo-jobs demo-admin demo-stop test test-heavy test-computing test-quick neighbours matrix corners coverage mutants jepsen simulate interleavings bench docs lint types imports dist clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/demo ## Let four servers race for the lottery: one draws (BACKEND=sentinel|cluster|quorum: a server is killed)
	@exec $(BIN)/python example_project/manage.py demo --servers $(N) --backend '$(BACKEND)'

demo-without-lock: $(VENV)/demo ## The same with the lock off: see what goes wrong
	@exec $(BIN)/python example_project/manage.py demo --servers $(N) --without-lock

demo-stale-holder: $(VENV)/demo ## Stop a holder beyond its lease: see its update lost, and then refused
	@exec $(BIN)/python example_project/manage.py demo_stale_holder

demo-chaos: $(VENV)/demo ## Kill workers: 200 lotteries are drawn once (FAULT=kill|pause|flush, GUARD=off)
	@exec $(BIN)/python example_project/manage.py demo_chaos --fault '$(FAULT)' --guard '$(GUARD)'

demo-jobs: $(VENV)/demo ## Start a command, a script and a task on three servers: one runs each; kill a beat
	@exec $(BIN)/python example_project/manage.py demo_jobs

demo-admin: $(VENV)/demo ## Look at the page of held locks while much goes on, until Ctrl-C (BACKEND=...)
	@exec $(BIN)/python example_project/manage.py demo_admin --port $(PORT) --backend '$(BACKEND)'

demo-stop: $(VENV)/demo ## Stop the embedded server that the example project has started
	@exec $(BIN)/python -m example_project.embedded_server stop

test: $(VENV)/test ## Run the tests but the heavy ones (ARGS=--everywhere: all, in every place; ARGS=--permits: all, each lock one of two permits)
	@# Before there are compiled tests, each process would compile all of them.
	@test -e tests/__pycache__ || $(BIN)/python -m pytest --collect-only -qq >/dev/null || true
	@exec $(PYTEST) $(or $(ARGS),$(patsubst %,--ignore=%,$(HEAVY) $(COMPUTING) tests/neighbours))

test-heavy: JOBS = 4
test-heavy: $(VENV)/test ## Run the tests that keep a processor busy: demo, browsers, the site, two versions
	@exec $(PYTEST) $(HEAVY) $(ARGS)

test-computing: JOBS = 2
test-computing: $(VENV)/test ## Run the tests that compute: the simulation, mutants, types, packages
	@exec $(PYTEST) $(COMPUTING) $(ARGS)

neighbours: JOBS = 4
neighbours: $(VENV)/neighbours ## Run the package beside PgBouncer, other schedulers, tracers and web servers
	@exec $(PYTEST) tests/neighbours $(ARGS)

test-quick: JOBS = 6# To begin costs each of them as much as its tests.
test-quick: $(VENV)/test ## Run the tests that answer within a minute: rules, API, locks on one server
	@exec $(PYTEST) --quick -m 'not waits' tests/rules tests/contract tests/package $(ARGS)

matrix: $(VENV)/matrix ## Run the quick tests on each Python, with new and old libraries (ARGS='-- tests': all tests)
	@exec $(BIN)/nox $(ARGS)

corners: $(VENV)/matrix ## The ends of it: the oldest of all, the newest of all that is found, and the wheel
	@exec $(BIN)/nox --session corners $(ARGS)

# These interrupt the code after each line, which takes too long if each line is noted, too.
coverage: UNMEASURED = $(HEAVY) $(COMPUTING) $(addprefix tests/,effects/test_interrupts.py faults/test_process.py \
	faults/test_signal_handlers.py)
coverage: $(VENV)/test ## Run most tests: which lines and branches do they reach? Also in build/coverage (ARGS as for make test)
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -n $(JOBS) --dist worksteal $(or $(ARGS),$(UNMEASURED:%=--ignore=%)); tested=$$?; \
		$(BIN)/coverage combine --quiet && $(BIN)/coverage html --quiet && $(BIN)/coverage report && exit $$tested

mutants: $(VENV)/test ## Change the code in a thousand places: do tests notice? (ARGS='--sample 50 --seed 1')
	@exec nice -n 19 $(BIN)/python -m tests.mutants $(ARGS)

jepsen: $(VENV)/test ## Break servers and clients for a minute per backend: which updates are lost?
	@exec $(BIN)/python -m tests.jepsen --seconds $(SECONDS) --seeds $(SEED) $(ARGS)

interleavings: $(VENV)/test ## Lead threads through one another: does one forget or disturb another? (SECONDS for each search)
	@exec $(BIN)/frontrun $(BIN)/python -m tests.interleavings --seconds $(SECONDS) --seed $(SEED) $(ARGS)

simulate: $(VENV)/test ## Simulate hours of locks with faults in a minute (SECONDS=600 SEED=2): is a promise broken?
	@exec $(BIN)/python -m tests.simulation --seconds $(SECONDS) --seed $(SEED) $(ARGS)

bench: $(VENV)/bench ## Compare the speed with other lock libraries (ARGS=--quick, ARGS=--write)
	@exec $(BIN)/python -m benchmarks $(ARGS)

# Sphinx adds to the search index of the build before. If that was broken off, all pages are built.
docs: $(VENV)/docs ## Make the site of docs/ in build/docs; a warning is an error
	@test -e build/docs/searchindex.js || rm -rf build/doctrees
	@exec $(BIN)/python -m sphinx --builder html --doctree-dir build/doctrees \
		--fail-on-warning --keep-going --quiet docs build/docs $(ARGS)

lint: $(VENV)/lint ## Check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/test $(VENV)/lint ## Check the types
	$(BIN)/mypy --strict django_redislock

imports: $(VENV)/test $(VENV)/lint ## Check that imports respect the layers
	$(BIN)/lint-imports

dist: $(VENV)/dist ## Build the last commit twice, compare, check and install it: dist/ has what a release consists of
	@exec .ci/dist $(BIN)/python

clean: ## Remove the environment and what the tools have left
	rm -rf $(VENV) build dist *.egg-info .coverage .coverage.* htmlcov
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .nox
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The empty file $(VENV)/EXTRA says that the extra is installed as setup.cfg has it now.
$(VENV)/demo $(VENV)/test $(VENV)/bench $(VENV)/dist $(VENV)/docs $(VENV)/lint $(VENV)/matrix $(VENV)/neighbours: $(VENV)/%: setup.cfg pyproject.toml | $(BIN)/python
	@echo "Installing django_redislock[$*] into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/it ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
