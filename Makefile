# Every target makes the environment it needs (tools/environment.py) and then does its work.
# PYTHON: the Python to start from. WORKERS: how many tests run at a time. RECORD: where a benchmark's record goes.
# BENCH: further options of benchmarks.forward.
PYTHON ?= python3
WORKERS ?= auto
RECORD ?= build/forward.json
BENCH ?=
RUN := .venv/bin/python

KERNEL_TESTS := $(addprefix tests/test_,matmul_ogs.py activation.py reduction.py moe_plan.py router.py routing.py layout.py \
	route_and_layout.py bitmatrix.py activation_backward.py routing_backward.py weight_gradient.py moe_backward.py)

.PHONY: environment parity test gate lint format bench memcheck clean

environment:
	@$(PYTHON) tools/environment.py

parity: environment
	.venv/bin/moe-parity

test: environment
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal

# The compile gate with every model's training on every architecture, some of which the suite leaves out for its length.
gate: environment
	MOEBIUS_GATE=all $(RUN) -m pytest -n $(WORKERS) --dist worksteal tests/test_compile_gate.py

lint: environment
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright

format: environment
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: environment
	$(RUN) -m benchmarks.forward --output $(RECORD) $(BENCH)
	$(RUN) -m benchmarks.plot $(RECORD) --output build/figures

# Every kernel on small cases under NVIDIA's checkers of memory accesses and of races in shared memory. The latter knows
# barriers of threads, not those that TMA completes, so the hopper family is left out of it.
SANITIZE = MOEBIUS_EXAMPLES=5 compute-sanitizer --error-exitcode 9
memcheck: environment
	$(SANITIZE) --tool memcheck $(RUN) -m pytest -q --timeout 900 $(KERNEL_TESTS) tests/test_hopper.py
	$(SANITIZE) --tool racecheck $(RUN) -m pytest -q --timeout 900 $(KERNEL_TESTS)

clean:
	rm -rf .venv .venv-torch .venv-jax build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
