# Every target makes the environment it needs (tools/environment.py) and then does its work.
# PYTHON: the Python to start from. WORKERS: how many tests run at a time.
PYTHON ?= python3
WORKERS ?= auto
RUN := .venv/bin/python

KERNEL_TESTS := $(addprefix tests/test_,matmul_ogs.py activation.py reduction.py moe_plan.py router.py routing.py layout.py bitmatrix.py)

.PHONY: environment parity test lint format bench memcheck clean

environment:
	@$(PYTHON) tools/environment.py

parity: environment
	.venv/bin/moe-parity

test: environment
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal

lint: environment
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright

format: environment
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: environment
	$(RUN) -m benchmarks.forward

# Every kernel on small cases under NVIDIA's checkers of memory accesses and of races in shared memory.
memcheck: environment
	for tool in memcheck racecheck; do MOEBIUS_EXAMPLES=5 compute-sanitizer --tool $$tool --error-exitcode 9 \
		$(RUN) -m pytest -q --timeout 900 $(KERNEL_TESTS) || exit; done

clean:
	rm -rf .venv .venv-torch .venv-jax build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
