# Everything a user needs: make run, make test. Both set up what is missing and build first.
#   JOBS=4 make build                    how many compilers at once (default: the cores)
#   FUZZ_RUNS=1000000 make fuzz          inputs of each fuzz target (default: ten million)
#   MOESH_TORCH_DIR=/path/to/torch ...   an installed torch (2.11 or later) instead of the one in .venv

JOBS ?= $(shell nproc)
TORCH = $(if $(MOESH_TORCH_DIR),-DMOESH_TORCH_DIR=$(MOESH_TORCH_DIR))
CTEST = ctest --output-on-failure --no-tests=error

.PHONY: all setup build run test asan tsan sanitize fuzz verify bench-comm bench-moe bench-checkpoint format lint clean

all: build

setup:
	@scripts/setup.sh

build: setup
	@cmake --preset release $(TORCH) > /dev/null
	@cmake --build build -j $(JOBS)

# Train a small DeepSeek-V3 on eight ranks of one process, then verify that very mesh.
run: build
	@build/bin/moesh demo

test: build
	$(CTEST) --test-dir build

# The comm and spmd tests under AddressSanitizer + UBSan, and under ThreadSanitizer.
asan: setup
	@cmake --preset dev $(TORCH) > /dev/null
	cmake --build build-asan -j $(JOBS)
	ASAN_OPTIONS=detect_leaks=0 $(CTEST) --test-dir build-asan -L 'unit|dist'

tsan: setup
	@cmake --preset tsan $(TORCH) > /dev/null
	cmake --build build-tsan -j $(JOBS)
	TSAN_OPTIONS="suppressions=$(CURDIR)/cmake/tsan.supp" $(CTEST) --test-dir build-tsan -L 'unit|dist'

sanitize: asan tsan

# Every parser of files that others wrote, from its seeds. make test runs a hundred thousand of each.
FUZZ_RUNS ?= 10000000
fuzz: build
	for target in safetensors index config manifest; do tests/fuzz/run.sh build/bin/$${target}_fuzz $(FUZZ_RUNS) || exit 1; done

# The MoE layer on every mesh of up to 8 ranks, every combination of options, against one rank.
verify: build
	build/bin/moe_sweep --all
	build/bin/moe_sweep --all --dtype float32

bench-comm: build
	scripts/bench_comm.sh

bench-moe: build
	build/bin/bench_moe_layer
	build/bin/bench_dispatchers

bench-checkpoint: build
	build/bin/bench_checkpoint build

format:
	git ls-files '*.h' '*.cpp' | xargs clang-format-19 -i

lint: build
	git ls-files 'moesh/*.cpp' | xargs clang-tidy-19 -p build --quiet

clean:
	rm -rf build build-asan build-tsan
