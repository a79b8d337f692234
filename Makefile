# Two commands do everything, each from a bare checkout: make test, make compare. The rest: make help.

PYTHON ?= python3
# One more than most cores: some tests wait for what other processes do.
WORKERS ?= 3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation

# An editable install is a farm of links under build/, laid for the files there are: another set of files, another farm.
ROOMS := fed aggregators clients server simulations
FILES := $(shell find $(ROOMS) -type f ! -name '*.pyc' ! -name '.*' | LC_ALL=C sort | cksum | cut -d ' ' -f 1)
LINKED := build/linked-$(FILES)

# Tests and commands start many processes, each of which would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help compare edge secure-edge gossip deployment strangers benchmark benchmark-gpu time gossip-benchmark compression secure private-steps results test test-all pretended flower lint format docs protocol clean

help:  ## list these goals
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

compare: $(LINKED)  ## compare the algorithms on handwritten digits; prints where the report is
	$(BIN)/fed compare examples/digits.yaml --output runs/compare --overwrite

edge: $(LINKED)  ## a server and three nodes on this machine beside a simulation: the same bits? leaves runs/edge
	$(BIN)/python examples/edge/run.py --output runs/edge

secure-edge: $(LINKED)  ## the same with seven nodes and secure aggregation; leaves runs/secure-edge
	$(BIN)/python examples/edge/run.py --experiment examples/edge/secure.yaml --output runs/secure-edge

gossip: $(LINKED)  ## eight peers without a coordinator beside a simulation: the same bits? leaves runs/gossip
	$(BIN)/python -m examples.gossip.run --output runs/gossip

deployment: $(LINKED)  ## rounds, transfers and 200 clients over gRPC; beside Flower where make benchmark has installed it
	$(BIN)/python benchmarks/deployment.py

strangers: $(LINKED)  ## rounds of nodes and peers while strangers without a certificate come; nine minutes
	$(BIN)/python benchmarks/strangers.py

benchmark: $(LINKED) benchmarks/.venv/installed  ## speed beside PyTorch, pfl-research, JAX, Flower and byzfl; a quarter of an hour
	$(BIN)/python benchmarks/simulation.py

benchmark-gpu: $(LINKED) benchmarks/.venv/installed  ## speed and memory on a GPU beside pfl-research and its limits
	$(BIN)/python benchmarks/gpu.py

time: $(LINKED)  ## events a second of the simulator's clock, with 1,000 to 1,000,000 clients; two minutes
	$(BIN)/python benchmarks/clock.py

gossip-benchmark: $(LINKED)  ## 1,000 simulated peers, and their mixing beside the memory's bandwidth; three minutes
	$(BIN)/python benchmarks/gossip.py

compression: $(LINKED)  ## speed, bytes and accuracy of codecs, and the bandwidth below which each pays; ten minutes
	$(BIN)/python benchmarks/compression.py

secure: $(LINKED)  ## secure aggregation of 10 to 1,000 clients, beside a cipher's speed and Flower; ten minutes
	$(BIN)/python benchmarks/secure.py

results: $(LINKED)  ## run the comparisons behind all tables of results and write them; seven minutes; TABLES="digits peers"
	$(BIN)/python benchmarks/results.py $(TABLES)

private-steps: $(LINKED) benchmarks/.venv/installed  ## a step of DP-SGD beside a plain one and Opacus; five minutes
	$(BIN)/python benchmarks/dp_sgd.py

test: lint  ## lint, types and tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

CHROMIUM := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)

test-all: lint .venv/all-installed  ## the same, with the tests that take longer
ifeq ($(CHROMIUM),)
	@echo "reports are not tried in a browser, for there is no Chromium here: sudo apt install chromium"
endif
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "$(if $(CHROMIUM),,not browser)"
	$(MAKE) pretended

pretended: $(LINKED)  ## tests that ask for a device, on one that is pretended; ten minutes
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --device pretended -k pretended \
	  $(shell grep -rl 'usefixtures("device")' tests)

FLOWER := 1.41 1.42

flower: $(FLOWER:%=.venv/flower-%/installed) $(LINKED)  ## tests that need Flower, with each of its versions; ten minutes
	for version in $(FLOWER); do \
	  .venv/flower-$$version/bin/python -W ignore::DeprecationWarning -m pytest -m "" -W ignore::DeprecationWarning \
	    tests/server/flower tests/clients/apps/test_flower_clients.py || exit 1; done

lint: $(LINKED)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(LINKED)  ## put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(LINKED)  ## generate docs/reference.md and the JSON schemas of examples/ from the code
	$(BIN)/fed schema --markdown > docs/reference.md
	for of in experiment comparison; do $(BIN)/fed schema $$of > examples/$$of.schema.json; done

protocol: $(LINKED)  ## generate the code of fed/protocol/protocol.proto
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. fed/protocol/protocol.proto

clean:  ## remove what was built and installed; runs stay
	rm -rf .venv benchmarks/.venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(ROOMS) tests -name __pycache__ -prune -exec rm -rf {} +

.venv/installed: pyproject.toml setup.cfg constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("fed needs Python >= 3.11: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(PIP) setuptools
	$(PIP) --editable '.[dev]'
	touch $@

.venv/all-installed: $(LINKED)
	$(PIP) --editable '.[all-tests]'
	touch $@

# Flower's pins differ from ours: its packages come first, and all others from the usual environment.
.venv/flower-%/installed: .venv/installed
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check 'flwr==$*.*'
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_fed.pth
	touch $@

benchmarks/.venv/installed: benchmarks/peers.txt
	$(PYTHON) -m venv benchmarks/.venv
	benchmarks/.venv/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

$(LINKED): .venv/installed
	rm -rf build
	$(PIP) --no-deps --editable .
	touch $@
