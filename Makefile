# Every target makes the environment it needs (tools/environment.py) and then does its work.
# PYTHON: the Python to start from. WORKERS: how many tests run at a time. RECORD: where a benchmark's record goes.
# BENCH: further options of the benchmark. SOAK: of the soak. FUZZ: of the fuzzer. ARCHS: of `make gate`.
PYTHON ?= python3
WORKERS ?= auto
BENCH ?=
SOAK ?=
FUZZ ?=
ARCHS ?= 80,89,90,100,120
RUN := .venv/bin/python
# Tests start hundreds of processes that import the packages, and pytest rewrites what it imports: bytecode is kept.
unexport PYTHONDONTWRITEBYTECODE

KERNEL_TESTS := $(addprefix tests/ops/,matmul/test_forward.py activation/test_forward.py reduction/test_reduce.py \
	norm/test_norm.py moe/test_forward.py router/test_forward.py routing/test_topk.py routing/test_layout.py \
	routing/test_route_and_layout.py moe/test_fuse.py routing/test_bitmatrix.py activation/test_backward.py \
	routing/test_backward.py matmul/test_weight_gradient.py matmul/test_backward.py moe/test_backward.py \
	matmul/quantized/test_matmul.py quantize/test_rows.py lora/test_lora.py exchange/test_send_tables.py \
	exchange/test_receive_tables.py exchange/test_places.py exchange/test_take.py exchange/test_exchange.py exchange/test_direct.py)
GATE_TESTS := tests/runtime/test_compile_gate.py tests/ops/moe/test_pdl.py::test_faults_of_the_order_are_found
HOPPER_TESTS := tests/ops/matmul/sm90 tests/ops/matmul/sm90_packed
LAYER_TESTS := $(addprefix tests/torch/training/,test_moe.py test_quantized.py test_capacity.py) tests/modular/test_kernel.py \
	tests/modular/test_quantized.py tests/modular/test_deep_gemm.py \
	tests/jax/test_training.py::test_one_call_forward_and_one_backward

# Beside the suite: what starts processes for ranks.
RANK_TESTS := tests/torch/parallel tests/parity/test_ranks.py tests/parity/test_against.py tests/parallel/test_stages.py \
	tests/monitor/test_ranks.py tests/layers/test_combinations_on_ranks.py \
	$(addprefix tests/modular/,test_expert_parallel.py test_jax_expert_parallel.py test_deep_ep.py)

# Beside the suite: features of layers times each other, and fields times the ways that a layer goes.
PAIR_TESTS := $(addprefix tests/layers/,test_combinations.py test_routes.py)

# Beside the suite: libraries around the layers. .ci/run has them in an environment without the others.
RECIPE_TESTS := tests/recipes tests/checkpoint/convert/test_loaders.py

# Beside the suite: the project's programs around the packages.
PROGRAM_TESTS := tests/tools tests/benchmarks tests/mutate

.PHONY: environment parity test beside ranks pairs recipes programs pages faults gate gate-all lint format bench bench-check bench-training memcheck soak upstream \
	engines maxtext mutate fuzz docs docs-environment docs-version notebooks figures release-check clean

environment:
	@$(PYTHON) tools/environment.py

# Without the libraries of the tests, so that a newcomer waits for less.
parity:
	@$(PYTHON) tools/environment.py --extras torch,jax,checkpoint
	.venv/bin/moe-parity --engines torch,jax

test: environment
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal $(addprefix --ignore ,tests/faults tests/docs tests/jax/parallel $(RANK_TESTS) $(PAIR_TESTS) $(RECIPE_TESTS) $(PROGRAM_TESTS))

# Expert parallelism, on processes that are ranks and on devices of the host.
ranks: environment
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal $(RANK_TESTS)
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal tests/jax/parallel

# `ranks`, `pairs`, `programs`, `faults` and `gate` as one run: a process that compiles fills the time that ranks wait
# for each other, and none waits for the last test of each. Devices of JAX slow down beside ranks.
beside: environment
	MOEBIUS_GATE=cover MOEBIUS_ARCHS=$(ARCHS) $(RUN) -m pytest -n $(WORKERS) --dist worksteal $(GATE_TESTS) $(RANK_TESTS) \
		$(PAIR_TESTS) $(PROGRAM_TESTS) tests/faults
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal tests/jax/parallel

# Covering arrays: each pair of features and each field on each route once.
pairs: environment
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal $(PAIR_TESTS)

# Layers inside of PEFT, qwix, accelerate and transformers.
recipes: environment
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal $(RECIPE_TESTS)

# Fuzzing, doctor and documentation site, benchmarks with their records, and the mutations.
programs: environment
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal $(PROGRAM_TESTS)

# Every block of every page and every example, and what pages say of the project.
pages: environment
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal tests/docs

# Copies of kernels with planted faults: every fault must turn a comparison red.
faults: environment
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal tests/faults

# Compiles for every architecture each kernel with every type and constant at least once, sizes by the powers of two that
# divide them, and copies with planted faults as far as TTGIR.
gate: environment
	MOEBIUS_GATE=cover MOEBIUS_ARCHS=$(ARCHS) $(RUN) -m pytest -n $(WORKERS) --dist worksteal $(GATE_TESTS)

# Compiles every plan of every group for every architecture, and the copies as far as PTX: several times as long.
gate-all: environment
	MOEBIUS_GATE=all $(RUN) -m pytest -n $(WORKERS) --dist worksteal $(GATE_TESTS)

lint: environment
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright
	$(RUN) -m tools.prose

format: environment
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# Every figure of the documents, from records.
figures: environment
	$(RUN) -m benchmarks.figures

bench: RECORD ?= build/forward.json
bench: environment
	$(RUN) -m benchmarks.forward --output $(RECORD) $(BENCH)
	$(RUN) -m benchmarks.figures plot $(RECORD) --output build/figures

# Without RECORD against the newest record of benchmarks/results.
bench-check: environment
	$(RUN) -m benchmarks.check $(RECORD) $(BENCH)

bench-training: RECORD ?= build/training.json
bench-training: environment
	$(RUN) -m benchmarks.training --output $(RECORD) $(BENCH)

# Kernels on small cases under NVIDIA's checkers: of memory accesses, of races in shared memory, and of reads of memory
# that nothing wrote. The second knows barriers of threads, not those that TMA completes, so the hopper families are left
# out of it (docs/developer/testing.md says what stands in for it). The third sees the frameworks' own memory, taken
# anew for every tensor. Planted faults are left out of all: a kernel that orders its steps wrongly may wait forever
# when a checker slows it down. Each of CHECKERS workers has a checker of its own, because one that follows them all
# may crash. Each writes its findings to a file: a file with findings or without a summary fails, and so does none.
# XLA runs without CUDA graphs, whose copies the third does not see, and without its autotuner, which compares buffers
# that nothing wrote.
CHECKERS ?= $(shell nproc)
SANITIZE = MOEBIUS_EXAMPLES=3 PYTORCH_NO_CUDA_MEMORY_CACHING=1 XLA_PYTHON_CLIENT_ALLOCATOR=platform \
	XLA_FLAGS="--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0" \
	$(RUN) -m pytest -q --dist worksteal --timeout 900 -k "not fault" \
	--tx "$(CHECKERS)*popen//python=compute-sanitizer --log-file build/sanitizer/$(1)-%p --tool $(1) $(RUN)" $(2)
CLEAN = [ -n "$$(ls build/sanitizer)" ] && ! grep -rL "SUMMARY: 0 " build/sanitizer | grep .
memcheck: environment
	rm -rf build/sanitizer && mkdir -p build/sanitizer
	$(call SANITIZE,memcheck,$(KERNEL_TESTS) $(HOPPER_TESTS) $(LAYER_TESTS))
	$(call SANITIZE,racecheck,$(KERNEL_TESTS))
	$(call SANITIZE,initcheck,$(LAYER_TESTS))
	$(CLEAN)

# Minutes of calls from many threads: equal bits from the first to the last, flat memory. Repeat it to go on.
soak: environment
	$(RUN) -m tools.soak $(SOAK)

# Other people's code on ours: files of vLLM, SGLang, transformers, torchtitan and Megatron out of their wheels, and TensorRT-LLM's
# files and triton_kernels' own tests where they are there.
upstream: environment
	$(RUN) -m tools.upstream engines
	$(RUN) -m tools.upstream torchtitan
	$(RUN) -m tools.upstream megatron
	$(RUN) -m tools.upstream triton-tests || [ $$? = 69 ]
	$(RUN) -m tools.upstream triton-tests --generation 3.8 || [ $$? = 69 ]

# Engines' files alone, on the reference engine.
engines: environment
	$(RUN) -m tools.upstream engines --engine reference

# MaxText's configs, out of its wheel, on the Flax layers, and its sparse layer on ragged_dot.
maxtext: environment
	$(RUN) -m tools.upstream maxtext

# Random cases of every op and layer against an oracle in float64, in both front-ends: CASES of them, or SECONDS long, on
# each engine of the process, in JOBS processes. A failure prints the line that repeats it; see docs/developer/testing.md.
fuzz: environment
	$(RUN) -m tools.fuzz --seed $(SEED) --jobs $(JOBS) $(if $(CASES),--cases $(CASES)) $(if $(SECONDS),--seconds $(SECONDS)) $(FUZZ)

# Changes the sources in COUNT places, one at a time and in copies, and runs the tests that call the changed function.
# SEED: the draw. FOLDERS: only these, such as "layers ops/exchange". PATHS: only files that begin so. JOBS: how many at a time. What survives is printed; see
# docs/developer/testing.md. A run that was cut short goes on where it stopped. LEAST: the share that must be killed.
COUNT ?= 500
SEED ?= 0
JOBS ?= $(shell nproc)
LEAST ?= 0.97
mutate: environment
	$(RUN) -m tools.mutate --count $(COUNT) --seed $(SEED) --jobs $(JOBS) --least $(LEAST) $(if $(PATHS),--paths $(PATHS)) \
		$(if $(FOLDERS),--folders $(FOLDERS)) $(if $(AGAIN),--again)

# The documentation site, in build/site, from an environment of its own beside the first. A broken link fails, and so
# does a notebook that prints something else than what it is stored with. `make docs SERVE=1` shows the site and follows
# changes; `make notebooks` stores what the notebooks print. (mkdocs build --quiet would count no warnings, and pass.)
DOCS_SETTINGS = PYTHONPATH=. JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES= NO_MKDOCS_2_WARNING=1
DOCS = $(DOCS_SETTINGS) .venv-docs/bin/python
docs-environment: environment
	@$(PYTHON) tools/environment.py --directory .venv-docs --extras docs --beside .venv

docs: docs-environment
	$(if $(SERVE),,$(DOCS) -m tools.site.notebooks)
	$(DOCS) -m mkdocs $(if $(SERVE),serve,build)

# Commits the site as VERSION to the branch gh-pages, beside the versions that are there. ALIAS: a further name, such as
# `latest`, which the first page then leads to. PUSH: `--push` publishes the branch.
MIKE = PATH="$(CURDIR)/.venv-docs/bin:$$PATH" $(DOCS_SETTINGS) mike
docs-version: docs-environment
	$(MIKE) deploy $(PUSH) --update-aliases $(VERSION) $(ALIAS)
	$(MIKE) list latest >/dev/null 2>&1 || $(MIKE) set-default $(PUSH) $(VERSION)
	$(if $(ALIAS),$(MIKE) set-default $(PUSH) $(ALIAS))

notebooks: docs-environment
	$(DOCS) -m tools.site.notebooks --write

# Builds what would be published into build/release, and tries it in an empty environment outside of the checkout.
release-check:
	@$(PYTHON) tools/environment.py --directory .venv-release --extras release
	.venv-release/bin/python tools/release_check.py

clean:
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
