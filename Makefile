# Two commands matter to a newcomer: `make demo` and `make test`. Both prepare .venv themselves.
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# For two cores: most tests wait for a process or a disk.
WORKERS ?= 4

# The parts of `make test PART=…`. What no other part names is in core, so no file is in none.
PART_process := $(wildcard tests/contract/test_isolation_*.py $(addprefix tests/integration/test_,keeper_*.py process_*.py probes.py))
PART_work := $(wildcard tests/contract/test_workdirs.py $(addprefix tests/integration/test_,agents_command.py crews*.py drivers_*.py loop*.py night.py tasks_*.py workdirs_*.py))
PART_program := $(wildcard tests/acceptance/test_*.py)
PART_core := $(filter-out $(PART_process) $(PART_work) $(PART_program),$(wildcard tests/test_*.py tests/*/test_*.py))
TESTS := $(if $(PART),$(or $(PART_$(PART)),$(error no part of the tests is called "$(PART)"; there are core, process, work, program)))

.PHONY: demo test check agents picture bench torture cgroup2 fmt clean lock help
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z0-9]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): constraints.txt scripts/bootstrap
	@sh scripts/bootstrap $(VENV)

demo: $(READY)  ## the product's story in a terminal, in under 30 seconds
	@PYTHONDONTWRITEBYTECODE=1 $(PY) examples/demo.py

# Each worker would rewrite and compile every module of the tests again.
test torture: export PYTHONDONTWRITEBYTECODE =

test: $(READY)  ## every test but the long runs, about 8 minutes; PART=core|process|work|program for a part of it
	@$(PY) -m pytest -n $(WORKERS) --dist worksteal -m "not torture" $(TESTS) $(ARGS)

check: $(READY)  ## the gates: ruff, mypy --strict, import direction
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-cache

picture: $(READY)  ## draw docs/terminal.svg from what the demo prints
	@$(PY) scripts/picture

agents:  ## install the pinned coding agents that some tests run (about 1 GB, into a cache)
	@sh scripts/agents

bench: $(READY)  ## measure against the floors, in one run
	@$(PY) benchmarks/run.py $(ARGS)

torture: $(READY)  ## the long runs: every kill point, many seeds
	@$(PY) -m pytest -n $(WORKERS) --dist worksteal -m torture --timeout 3600 $(ARGS)

cgroup2: $(READY)  ## boxes and limits on an emulated machine that has only cgroup v2
	@sh scripts/cgroup2 $(ARGS)

fmt: $(READY)  ## format and apply safe fixes
	@$(VENV)/bin/ruff check --fix --exit-zero -q .
	@$(VENV)/bin/ruff format .

lock: $(READY)  ## renew constraints.txt (hashes, no registry addresses)
	@sh scripts/lock $(VENV)

clean:  ## remove everything that was built or cached here
	@rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
