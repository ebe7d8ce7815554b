# Every target sets up $(VENV) first, and again when what it was made from has changed.
#   PYTHON       the Python to use, 3.10 to 3.13
#   TORCH        what pip is asked for
#   TORCH_INDEX  the index torch comes from; empty: tools/install_torch.py chooses by the machine
#   DATA, RUN, TRAIN_ARGS    make train: the corpus folder, the run's name, further options
#   TEST_ARGS, TEST_JOBS     make test: further options of pytest, processes
#   GPU_ARGS     make gpu: options of benchmarks/gpu.py
#   BENCH_ARGS   make bench: further options of pytest, such as --long
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
TEST_JOBS ?= 2

PY := $(VENV)/bin/python
TORCH_STAMP := $(VENV)/.torch-$(shell printf '%s' '$(TORCH) $(TORCH_INDEX)' | cksum | cut -d' ' -f1)
BUILD_REQUIRES := $(shell sed -n 's/^requires = \[\(.*\)\]/\1/p' pyproject.toml | tr -d ',')
CSRC := $(shell find csrc)
CXX_FILES := $(filter %.h %.cpp %.cuh,$(CSRC))
GPU := $(wildcard /dev/nvidia0)
EMULATED := tests/ops -m 'not gpu' -k 'emulator and not compile and not export'

.PHONY: help setup train test test-triton test-emulator test-full sanitize bench docs lint format clean distclean

help:
	@echo 'make train       a Transformer learns to translate: prepare, train, translate, score, draw'
	@echo 'make test        the tests; make test-full: the slow ones as well'
	@echo 'make test-triton the Triton kernels, interpreted on the CPU'
	@echo 'make test-emulator  the CUDA kernels on the CPU, in other orders and under sanitizers'
	@echo 'make sanitize    of these only the kernels under AddressSanitizer and UBSan'
	@echo 'make bench       the benchmarks'
	@echo 'make gpu         with a GPU: tests, comparisons, speed, a model; GPU_ARGS=--dry-run plans only'
	@echo 'make docs        the documentation, in site/'
	@echo 'make lint        the style checks; make format: repair what can be'
	@echo 'make setup       only the virtual environment $(VENV)'
	@echo 'make clean       remove what was built; make distclean: $(VENV) as well'

setup: $(VENV)/.built

train: setup
	$(PY) -m examples.translation.run $(if $(DATA),--data '$(DATA)') $(if $(RUN),--run '$(RUN)') $(TRAIN_ARGS)

test: setup
	OMP_NUM_THREADS=1 $(PY) -m pytest -m 'not slow and not gpu' -n $(TEST_JOBS) $(TEST_ARGS)

# A process of its own: what is interpreted and what is compiled is settled when triton is imported.
test-triton: setup
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(PY) -m pytest -m 'triton and not slow' -n $(TEST_JOBS) $(TEST_ARGS)

test-full: setup
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(PY) -m pytest -m triton -n $(TEST_JOBS) $(TEST_ARGS)
	OMP_NUM_THREADS=1 $(PY) -m pytest $(if $(GPU),,-m 'not gpu') -n $(TEST_JOBS) $(TEST_ARGS)
	$(MAKE) test-emulator

# The CUDA kernels on emulated threads: other orders of threads, other cards' paths, and sanitizers.
test-emulator: setup
	OMP_NUM_THREADS=1 FASTATTN_EMULATOR_ORDER=reverse FASTATTN_EMULATOR_ARCH=750 $(PY) -m pytest $(EMULATED) -n $(TEST_JOBS) $(TEST_ARGS)
	OMP_NUM_THREADS=1 FASTATTN_EMULATOR_ORDER=17 FASTATTN_EMULATOR_ARCH=700 $(PY) -m pytest $(EMULATED) -n $(TEST_JOBS) $(TEST_ARGS)
	OMP_NUM_THREADS=1 FASTATTN_EMULATOR_SANITIZE=address,undefined ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" \
	  $(PY) -m pytest $(EMULATED) -n $(TEST_JOBS) $(TEST_ARGS)

sanitize: setup
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/native/test_sanitizers.py -n $(TEST_JOBS) $(TEST_ARGS)

bench: setup
	$(PY) -m pytest benchmarks --benchmark-only $(BENCH_ARGS)

gpu: setup
	$(PY) -m benchmarks.gpu $(GPU_ARGS)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)

docs: setup
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist site *.egg-info fastattn/_C*.so .pytest_cache .ruff_cache .mypy_cache .benchmarks
	rm -f $(VENV)/.built
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v <= (3, 13) or sys.exit("fastattn needs Python 3.10 to 3.13, and $(PYTHON) is %d.%d: say make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# pip counts any build of the right version as good enough, so another build needs the first one gone.
$(TORCH_STAMP): $(VENV)/.made
	$(if $(wildcard $(VENV)/.torch-*),$(PY) -m pip uninstall --quiet --yes torch)
	$(PY) tools/install_torch.py '$(TORCH)' $(TORCH_INDEX)
	@rm -f $(VENV)/.torch-* && touch $@

# Without build isolation, so that later builds find the same headers and compile only what changed.
$(VENV)/.installed: $(TORCH_STAMP) pyproject.toml setup.py
	$(PY) -m pip install --quiet $(BUILD_REQUIRES)
	$(PY) -m pip install --quiet --no-build-isolation --editable '.[examples,integrations,docs,test,bench,dev]'
	$(if $(filter Linux,$(shell uname)),$(PY) tools/get_nvdisasm.py)
	@touch $@

$(VENV)/.built: $(VENV)/.installed $(CSRC)
	$(PY) setup.py --quiet build_ext --inplace
	@touch $@
