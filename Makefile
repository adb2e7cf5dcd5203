# Every target sets up what it needs: a virtual environment from the lock file, then the embedded servers' jars.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

SCHEDULES ?= 100000

.PHONY: run test test-unit test-integration test-containers faults soak lint bench simulate lock clean

run: $(STAMP)
	$(BIN)/python -m framework.run

# Two processes side by side, each with servers of its own: these tests wait more than they compute.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist worksteal --durations=30 --durations-min=20

test: $(STAMP) lint
	$(PYTEST)
	$(MAKE) --no-print-directory test-containers

test-unit: $(STAMP)
	$(PYTEST) -m "not integration"

test-integration: $(STAMP)
	$(PYTEST) -m integration

# The integration tests again, their servers in containers; without those that are about Spark, or kill processes for minutes.
test-containers: $(STAMP)
	$(PYTEST) -m "integration and not spark and not kills" --servers=containers

# Every row of the fault table, slow ones too; each test REPEAT times. Minutes to an hour; the report is for docs/faults.md.
REPEAT ?= 1
REPORT ?= fault-report.md
faults: $(STAMP)
	$(PYTEST) -m fault --all --fault-repeat=$(REPEAT) --fault-report=$(REPORT)

# One topology for MINUTES, and a plot of what its processes hold: docs/soak.svg.
MINUTES ?= 10
soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(STAMP)
	$(BIN)/python -m benchmarks

simulate: $(STAMP)
	$(BIN)/python -m tests.simulation --schedules $(SCHEDULES)

$(STAMP): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "Ratchet needs Python 3.11: install it, or name it with make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $(STAMP)

# Resolves pyproject.toml again and writes every version with its hashes.
lock:
	uv pip compile pyproject.toml --extra demo --extra registry --extra polars --extra postgres --extra redis --extra delta --extra lmdb --extra containers --extra sketches --extra dev --python-version 3.11 --generate-hashes --no-header -o requirements.lock

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
