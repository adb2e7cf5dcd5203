# Every target sets up what it needs: a virtual environment from the lock file, then the embedded servers' jars.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILED := $(VENV)/.compiled

SCHEDULES ?= 100000

# Hundreds of processes share what one has compiled, also where the environment tells Python to keep nothing.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test test-short test-embedded test-beside test-servers test-all test-starved test-unit test-integration test-containers faults fuzz compare soak soak-core lint audit bench simulate docs wheels lock clean

run: $(STAMP)
	$(BIN)/python -m framework.run

PROCESSES ?= 4
# Processes side by side (tests/kit/targets.py says what shares one): these tests wait more than they compute.
# Polars has one thread in each: its threads look for work while they have none.
PYTEST := POLARS_MAX_THREADS=1 $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadgroup --durations=30 --durations-min=10

# What CI runs: every promise, each in its shortest form. docs/promises.md says which are held by test-all only.
test: $(STAMP)
	$(MAKE) --no-print-directory --jobs 2 test-embedded test-beside

test-short: test-embedded test-servers

test-embedded: $(COMPILED)
	$(PYTEST) --deselect tests/servers

# The linters use one core, and containers are waited for: beside the other tests they cost little time.
test-beside: lint
	$(MAKE) --no-print-directory test-servers PROCESSES=2

test-servers: $(STAMP)
	$(PYTEST) --servers=containers $(IN_CONTAINERS)

# Nights and releases: the slow tests too, everything that can run in containers, long simulations.
test-all: $(STAMP) lint
	$(PYTEST) --all
	$(MAKE) --no-print-directory test-containers
	$(MAKE) --no-print-directory simulate
	$(MAKE) --no-print-directory audit AUDIT=--allow-unchecked

# The short tests TIMES times, with the processor taken away and processes stopped at random. Hours.
TIMES ?= 10
test-starved: $(STAMP)
	$(BIN)/python -m tests.kit.starving --times $(TIMES) --seed $(SEED) -- \
		--numprocesses $(PROCESSES) --dist loadgroup --ignore tests/servers

test-unit: $(STAMP)
	$(PYTEST) -m "not integration"

test-integration: $(STAMP)
	$(PYTEST) -m integration

# In containers: the servers' own tests, and one test for each kind of server and each contract of a backend.
IN_CONTAINERS := tests/servers \
	tests/coordination/test_stores.py::TestZooKeeperStore::test_changes_are_applied_and_read_by_others \
	tests/sinks/backends/test_backends.py::TestPostgresBackend::test_replay_of_another_batch_of_an_opaque_spout \
	tests/sinks/backends/test_backends.py::TestRedisBackend::test_replay_of_another_batch_of_an_opaque_spout \
	tests/state/test_providers.py::TestRedis::test_what_was_put_is_got_and_what_was_deleted_is_not \
	tests/spouts/kafka/test_reading.py::TestReading::test_a_range_is_read_in_order_and_a_replay_reads_the_same \
	tests/spouts/codecs/test_avro.py::TestRegistry::test_writers_of_several_schemas_are_resolved_to_the_latest

# The integration tests, their servers in containers; without those that are about Spark, or kill processes for minutes.
test-containers: $(STAMP)
	$(PYTEST) --all -m "integration and not spark and not kills" --servers=containers

# Every row of the fault table, slow ones too; each test REPEAT times. Minutes to an hour; the report is for docs/faults.md.
REPEAT ?= 1
REPORT ?= fault-report.md
faults: $(STAMP)
	$(PYTEST) -m fault --all --fault-repeat=$(REPEAT) --fault-report=$(REPORT)

# One topology for MINUTES, and a plot of what its processes hold: docs/soak.svg.
MINUTES ?= 10
soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES)

# A chain of states and windows on a cluster while KILLS things are killed: docs/soak-core.svg. A minute for six kills, or so.
KILLS ?= 50
SEED ?= 1
soak-core: $(STAMP)
	$(BIN)/python -m tests.kit.kafka_counts --kills $(KILLS) --seed $(SEED) --plot docs/soak-core.svg

# Each fuzzer for FUZZ_MINUTES, one after the other: values of Avro and JSON, answers of a registry, documents, requests, batches, headers.
FUZZ_MINUTES ?= 60
fuzz: $(STAMP)
	for each in avro json znode http batch headers; do \
		$(BIN)/python -m tests.kit.$${each}_fuzz --minutes $(FUZZ_MINUTES) --seed $(SEED) || exit 1; \
	done

# Each codec against the library of its format: so many random values, without a difference.
VALUES ?= 10000000
compare: $(STAMP)
	for each in avro protobuf json messagepack csv; do \
		$(BIN)/python -m tests.kit.$${each}_reference --values $(VALUES) --seed $(SEED) || exit 1; \
	done

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# A line per locked dependency with a known vulnerability, or that cannot be checked; both fail.
# AUDIT="--rustsec FOLDER": a clone of RustSec's database, where it cannot be fetched.
TOOLS := .tools
audit: $(STAMP) $(TOOLS)/bin/cargo-audit
	PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH" $(BIN)/python deploy/audit.py $(AUDIT)

$(TOOLS)/bin/cargo-audit:
	@command -v cargo >/dev/null || { echo "the audit of the native reader needs Rust: install it, and put cargo on the PATH" >&2; exit 1; }
	cargo install --quiet --locked --root $(TOOLS) --version 0.22.2 cargo-audit

# Prints a JSON line per workload, and draws docs/benchmarks.svg.
bench: $(STAMP)
	$(BIN)/python -m benchmarks --plot docs/benchmarks.svg

# The documentation as a site, in site/. It warns of nothing, or fails.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

simulate: $(STAMP)
	$(BIN)/python -m tests.simulation --schedules $(SCHEDULES)

# The files of a release, in dist/: an sdist, a wheel with the native reader for Linux, one for all other machines.
WHEELS_VENV := .venv-wheels
wheels: $(WHEELS_VENV)/.installed
	$(WHEELS_VENV)/bin/python deploy/wheels.py

$(WHEELS_VENV)/.installed: requirements-wheels.lock
	@command -v cargo >/dev/null || { echo "the native reader needs Rust: install it, and put cargo on the PATH" >&2; exit 1; }
	test -x $(WHEELS_VENV)/bin/python || $(PYTHON) -m venv $(WHEELS_VENV)
	$(WHEELS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-wheels.lock
	touch $@

$(STAMP): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "Ratchet needs Python 3.11: install it, or name it with make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $(STAMP)

# Once in a clone: otherwise each process of a test run compiles all modules itself, at the same time as the others.
$(COMPILED): $(STAMP)
	$(BIN)/python -m pytest --collect-only --quiet > $@.log
	mv $@.log $@

# Resolves pyproject.toml again and writes every version with its hashes.
lock:
	uv pip compile pyproject.toml --extra demo --extra registry --extra protobuf --extra msk --extra mysql --extra postgres --extra redis --extra delta --extra lmdb --extra containers --extra sketches --extra plot --extra otel --extra ui --extra read --extra dev --python-version 3.11 --generate-hashes --no-header -o requirements.lock
	uv pip compile pyproject.toml --extra demo --extra registry --extra protobuf --extra msk --extra mysql --extra postgres --extra redis --extra delta --extra lmdb --extra otel --extra ui --python-version 3.11 --generate-hashes --no-header -o deploy/image/requirements.lock
	uv pip compile --group wheels --python-version 3.11 --generate-hashes --no-header -o requirements-wheels.lock

clean:
	rm -rf $(VENV) $(WHEELS_VENV) $(TOOLS) build dist .mypy_cache .pytest_cache .ruff_cache
