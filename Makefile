# Commands for people. CMake builds the program; see CONTRIBUTING.md.
#   make train   set up, build the program, prepare the corpus, train configs/debugmodel.toml
#   make install build the program and install it under PREFIX (make package: as a Debian package)
#   make test    set up, build, run every test
#   make faults  inject faults into runs in a cluster in a box, print how each recovers (CAMPAIGN=50: that many random
#                faults in one run; NOISE=3600: then a health daemon among noisy sensors for so many seconds)
#   make fuzz    set up, build, fuzz the readers of files for SECONDS each; make test does so for 5 s each
#   make image   build a container image without CUDA in build/image, and try the program in it
#   make lint    check the formatting (make format mends it), and every .cc with clang-tidy
#   make bench   set up, build, run the benchmarks (installs PyTorch into build/venv for the comparison)
PRESET ?= release
# On a machine without a GPU, make train, install and package build the program without CUDA and compile no kernels.
PROGRAM_PRESET := $(if $(filter file,$(origin PRESET)),$(if $(wildcard /dev/nvidia0),release,cpu),$(PRESET))
BUILD := build/$(if $(filter ci,$(PRESET)),release,$(PRESET))
# Programs that may run elsewhere have kernels for AVX-512. The first run has them only if this processor can use them.
AVX512 := ON
configure_kernels = @grep -qsx TESSERA_AVX512:BOOL=$(AVX512) $(BUILD)/CMakeCache.txt || \
	cmake --preset $(PRESET) -DTESSERA_AVX512=$(AVX512)
PREFIX ?= /usr/local
override PREFIX := $(abspath $(PREFIX))
TESSERA := $(BUILD)/src/app/tessera
CORPUS := data/corpus
DATASET := data/gcide
CONFIG ?= configs/debugmodel.toml
ARGS ?=
SECONDS ?= 20

.PHONY: all setup build program train run install package image test faults fuzz bench lint format clean
all: build

setup:
	@scripts/setup.sh

$(BUILD)/build.ninja: CMakeLists.txt CMakePresets.json | setup
	cmake --preset $(PRESET)

build: setup $(BUILD)/build.ninja
	$(configure_kernels)
	cmake --build $(BUILD)

# Builds the program alone, without tests and benchmarks.
program:
	@scripts/setup.sh program $(if $(filter cpu,$(PRESET)),,cuda)
	$(configure_kernels)
	cmake --build $(BUILD) --target tessera

$(TESSERA): program

$(CORPUS)/gcide.dict.dz: scripts/fetch_corpus.sh
	scripts/fetch_corpus.sh $(CORPUS)

data/tokenizer/tokenizer.model: $(CORPUS)/gcide.dict.dz | $(TESSERA)
	$(TESSERA) data tokenizer --input $< --vocab-size 2048 --output $@ --force

$(DATASET)/dataset.json: data/tokenizer/tokenizer.model | $(TESSERA)
	$(TESSERA) data prepare --input $(CORPUS)/gcide.dict.dz --tokenizer $< --output $(DATASET) --force

train:
	@$(MAKE) --no-print-directory run PRESET=$(PROGRAM_PRESET) AVX512=$(shell grep -qsw avx512f /proc/cpuinfo && echo ON || echo OFF)

run: program
	@$(MAKE) --no-print-directory $(DATASET)/dataset.json PRESET=$(PRESET)
	scripts/first_run.sh $(TESSERA) $(CONFIG) $(ARGS)
	@echo "The program is $(TESSERA). To call it as tessera: make install PREFIX=\$$HOME/.local, with \$$HOME/.local/bin on the PATH"

install package:
	@$(MAKE) --no-print-directory program PRESET=$(PROGRAM_PRESET)
	@$(MAKE) --no-print-directory do-$@ PRESET=$(PROGRAM_PRESET)

do-install:
	cmake --install $(BUILD) --prefix "$(PREFIX)"
	@case ":$$PATH:" in *":$(PREFIX)/bin:"*) ;; *) \
		echo "To call it as tessera: export PATH=\"$(PREFIX)/bin:\$$PATH\"" ;; esac

do-package:
	@scripts/setup.sh package
	cd $(BUILD) && cpack -G DEB

# docs/cluster.md describes the image with CUDA.
image:
	@scripts/setup.sh image
	@$(MAKE) --no-print-directory program PRESET=cpu
	tests/container/image_test.py build/cpu/src/app/tessera build/image

test: build
	@scripts/setup.sh browser || [ -z "$$TESSERA_REQUIRE_BROWSER" ]
	@scripts/setup.sh cluster
	@scripts/setup.sh kubernetes
	ctest --test-dir $(BUILD) --output-on-failure -j 2
	@$(MAKE) --no-print-directory fuzz SECONDS=5

faults: program
	@scripts/setup.sh cluster
	tests/cluster/faults.py $(TESSERA) $(if $(CAMPAIGN),--campaign $(CAMPAIGN)) $(ARGS)
	$(if $(NOISE),cmake --build $(BUILD) --target nvml_stub)
	$(if $(NOISE),tests/scripts/health_noise_test.py $(TESSERA) $(BUILD)/tests/health/libnvml_stub.so --seconds $(NOISE))

build/fuzz/build.ninja: CMakeLists.txt CMakePresets.json
	cmake --preset fuzz

# Runs the seeds in fuzz/corpus and then new inputs, under the address and undefined-behaviour sanitizers.
fuzz:
	@scripts/setup.sh fuzz
	@$(MAKE) --no-print-directory build/fuzz/build.ninja
	cmake --build build/fuzz
	fuzz/run.sh build/fuzz/fuzz $(SECONDS) $(TARGETS)

bench: build
	@$(MAKE) --no-print-directory $(DATASET)/dataset.json PRESET=$(PRESET)
	bench/run.sh $(BUILD)

# Checks that every source file is formatted as .clang-format says, and that clang-tidy finds nothing. It reads the unity
# files of build/lint, each of which includes a dozen .cc files, and the .cc files that only other builds have. clang
# reads g++'s commands: it does not know all their warnings, and has no omp.h of its own.
TIDY := build/clang-tidy/data/bin/clang-tidy -p build/lint --quiet --extra-arg=-idirafter$(shell c++ -print-file-name=include) \
	$(addprefix --extra-arg=-Wno-,unknown-warning-option unknown-pragmas deprecated-declarations)
lint:
	@scripts/setup.sh lint
	git ls-files '*.h' '*.cc' '*.inc' '*.cu' '*.cuh' | xargs clang-format-14 --dry-run --Werror
	cmake --preset lint >/dev/null
	cmake --build build/lint --target tessera_find_commit >/dev/null
	{ sed -n 's,.*"file": "\(.*\.c[cx]*\)".*,\1,p' build/lint/compile_commands.json; \
		git ls-files 'fuzz/*.cc' '*/no_*.cc'; } | sort -u | xargs -d '\n' -P $$(nproc) -n 1 $(TIDY)

format:
	@scripts/setup.sh lint
	git ls-files '*.h' '*.cc' '*.inc' '*.cu' '*.cuh' | xargs clang-format-14 -i

clean:
	rm -rf build
