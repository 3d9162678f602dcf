# Everything a user needs: make run, make check, make test. They install and build what they need.
#   JOBS=4 make build                      how many compilers at once (default: the cores)
#   FUZZ_RUNS=1000000 make fuzz            inputs of each fuzz target (default: ten million)
#   MOESH_TORCH_DIR=/path/to/torch ...     an installed torch (2.11 or later), not the one in .venv
#   MOESH_THIRD_PARTY=/path/to/prefix ...  where include/ has libraries that have no package here

JOBS ?= $(shell nproc)
OPTIONS = $(if $(MOESH_TORCH_DIR),-DMOESH_TORCH_DIR=$(MOESH_TORCH_DIR)) \
  $(if $(MOESH_THIRD_PARTY),-DMOESH_THIRD_PARTY=$(MOESH_THIRD_PARTY))
# With it the command does not start itself again to set it (apps/moesh.cpp).
CTEST = OMP_WAIT_POLICY=passive ctest --output-on-failure --no-tests=error

.PHONY: all setup program build run check test long gpu asan tsan sanitize fuzz fuzz-cli mutate \
  soak verify test-settings wheel test-tokenizer bench-tokenizer benchmarks bench-comm bench-moe \
  bench-gpu bench-checkpoint format lint clean

all: build

setup:
	@scripts/setup.sh tests

# Only the command moesh: needs neither the tests nor what they need. A build that is already
# configured keeps its settings.
program:
	@scripts/setup.sh program
	@if [ -e build/build.ninja ]; then cmake $(OPTIONS) build > /dev/null; \
	  else cmake --preset release -DMOESH_TESTS=none $(OPTIONS) > /dev/null; fi
	@cmake --build build -j $(JOBS) --target moesh

build: setup
	@cmake --preset release $(OPTIONS) > /dev/null
	@cmake --build build -j $(JOBS)

# dist/moesh-*.whl for the torch of .venv, out of the build tree: only the Python module is built,
# and of that only what is missing.
wheel: setup
	@if [ -e build/build.ninja ]; then cmake $(OPTIONS) build > /dev/null; \
	  else cmake --preset release -DMOESH_TESTS=none $(OPTIONS) > /dev/null; fi
	@cmake --build build -j $(JOBS) --target moesh_python
	.venv/bin/pip wheel --disable-pip-version-check --no-build-isolation --no-deps -w dist .
	@ls dist/moesh-*.whl

# Train a small DeepSeek-V3 on eight ranks of one process, then verify that very mesh.
run: program
	@build/bin/moesh demo

# Tests in tiers; CONTRIBUTING.md says what each promises.
check: setup
	@echo "make check: C++ tests, code that must not compile, one verify of each model:"
	@echo "  made for 5 minutes on two cores after a change of one file."
	@cmake --preset release $(OPTIONS) > /dev/null
	@cmake --build build -j $(JOBS) --target check_programs
	$(CTEST) -j $(JOBS) --test-dir build -L '^check$$'

test:
	@echo "make test: installs what tests need, builds every program and runs every kind of test:"
	@echo "  13 minutes of tests on two cores, after the build (docs/install.md)."
	@echo "  Less: make check. More: make long, verify, fuzz, mutate, soak, sanitize."
	@$(MAKE) --no-print-directory build
	$(CTEST) -j $(JOBS) --test-dir build -LE '^long$$'

# What make test samples, whole, and the programs that measure.
long: benchmarks
	$(CTEST) -j $(JOBS) --test-dir build -L '^long$$'

# The command, the GPU tests and the GPU benchmarks, against an installed CUDA build of torch.
FIND_TORCH = import importlib.util as u; print(*u.find_spec("torch").submodule_search_locations)
gpu: MOESH_TORCH_DIR ?= $(shell python3 -c '$(FIND_TORCH)' 2> /dev/null)
gpu:
	@[ -e "$(MOESH_TORCH_DIR)/lib/libtorch_cuda.so" ] || { echo "make gpu: '$(MOESH_TORCH_DIR)' is" \
	  "not the folder of a CUDA build of torch; pass MOESH_TORCH_DIR=/path/to/torch" >&2; exit 1; }
	@cmake --preset cuda $(OPTIONS) > /dev/null
	@cmake --build build-cuda -j $(JOBS) --target gpu
	@echo "programs: build-cuda/bin; tests: ctest --test-dir build-cuda -L gpu"

# Everything that has threads, raw memory or files, on a selection of meshes and under MPI, with
# AddressSanitizer, UBSan and leaks, and with ThreadSanitizer. What LibTorch and MPI do inside is
# left out: cmake/*.supp. One thread for each rank, since the barriers of OpenMP are not seen. g++ 13
# puts wide vectors at addresses that they do not allow where it looks for uses after a return
# (GCC bug 110027).
SANITIZED = unit|dist|mpi
asan: setup
	@cmake --preset dev $(OPTIONS) > /dev/null
	cmake --build build-asan -j $(JOBS)
	OMP_NUM_THREADS=1 LSAN_OPTIONS="suppressions=$(CURDIR)/cmake/lsan.supp:print_suppressions=0" \
	  ASAN_OPTIONS=detect_stack_use_after_return=0 $(CTEST) --test-dir build-asan -L '$(SANITIZED)'

tsan: setup
	@cmake --preset tsan $(OPTIONS) > /dev/null
	cmake --build build-tsan -j $(JOBS)
	OMP_NUM_THREADS=1 \
	  TSAN_OPTIONS="suppressions=$(CURDIR)/cmake/tsan.supp:ignore_noninstrumented_modules=1" \
	  $(CTEST) --test-dir build-tsan -L '$(SANITIZED)'

sanitize: asan tsan

# Every parser of files that others wrote, from its seeds. make test gives each some thousand
# inputs.
FUZZ_RUNS ?= 10000000
fuzz: build
	for target in safetensors index config manifest jsonl toml rename metrics tokenizer token_file; do \
	  tests/fuzz/run.sh build/bin/$${target}_fuzz $(FUZZ_RUNS) || exit 1; done

# Random command lines: documented exit codes, no backtrace.
CLI_RUNS ?= 2600
fuzz-cli: build
	tests/fuzz/cli_fuzz.py build/bin/moesh_served $(CLI_RUNS) 1 $(JOBS)

# Tokenizers against the Python package, id for id: the settings of five families, 100 MB of text in
# ten scripts, a million random strings, every code point by itself. About 30 minutes on two cores.
PEER = .venv/bin/python tests/tokenizer/tokenizer_peer.py build/bin/tokenizer_peer
test-tokenizer: build
	$(PEER) all

# MB/s of both on one thread.
bench-tokenizer: build
	$(PEER) speed

# Runs that are killed, stopped, damaged, doubled and put on full, lying and failing disks, in
# random order for so many minutes: nothing may be lost.
SOAK_MINUTES ?= 20
soak: build
	tests/soak/soak.py build/bin/moesh build/bin/moesh_with_faults $(SOAK_MINUTES)

# The MoE layer on every mesh of up to 8 ranks, every combination of options, and every model on
# every mesh, pipelines too, against one rank; then 5,000 random runs with random options.
MODELS = deepseek_v3 qwen3_moe mixtral llama4 gpt_oss qwen2_moe olmoe glm4_moe glm4_moe_lite minimax_m2 granitemoe qwen3_next
verify: build
	build/bin/moe_sweep --all
	build/bin/moe_sweep --all --dtype float32
	for m in $(MODELS); do for dtype in float64 float32 bfloat16; do \
	  build/bin/moesh verify --model $$m:tiny --sweep 8 --dtype $$dtype || exit 1; done; done
	OMP_NUM_THREADS=1 build/bin/verify_random --count 5000
	$(MAKE) test-settings

# Settings of runs against PyTorch, number by number: models of transformers, torch.optim, its
# schedulers; five of the models, five sets of settings, three meshes. `make test` takes a tenth of it.
test-settings: build
	.venv/bin/python tests/train/torch_test.py build/bin/moesh --all

# Some 7,000 small mistakes in what can change a number, and what finds them; in build-mutate.
# MUTATE="--files 'moesh/nn/*'": some of them (tests/mutants/machine/mutate.py --help).
mutate: setup
	python3 tests/mutants/machine/mutate.py --jobs $(JOBS) $(MUTATE)

benchmarks: build
	@cmake --build build -j $(JOBS) --target benchmarks

bench-comm: benchmarks
	scripts/bench_comm.sh

bench-moe: benchmarks
	build/bin/bench_moe_layer
	build/bin/bench_dispatchers

# One table of the MoE layer on this GPU, then its kernels one by one.
bench-gpu: gpu
	build-cuda/bin/bench_moe_gpu
	build-cuda/bin/bench_moe_layer_gpu
	build-cuda/bin/bench_delta_rule_gpu

bench-checkpoint: benchmarks
	build/bin/bench_checkpoint build

format:
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs clang-format-19 -i

lint: setup
	@cmake --preset release -B build-lint -DMOESH_BATCHES=OFF $(OPTIONS) > /dev/null
	git ls-files 'moesh/*.cpp' | xargs clang-tidy-19 -p build-lint --quiet

clean:
	rm -rf build build-asan build-tsan build-cuda build-lint
