# make demo: everything from a bare Python 3.11 to two columns of text. make test: what CI runs.
PYTHON ?= python3
# Installed first, and pinned: a CPU build is enough for demo and tests; change TORCH=... for another.
TORCH ?= torch==2.13.0

BIN := .venv/bin
PIP := $(BIN)/pip install -q --disable-pip-version-check
CORE := src/draftwood/tree.py,src/draftwood/treebuilder.py,src/draftwood/sampling.py,src/draftwood/cache/*,src/draftwood/verifiers/*,src/draftwood/engine/*

.PHONY: demo test check format clean

demo: .venv/.installed
	$(BIN)/draftwood models --fetch smollm2
	$(BIN)/draftwood demo --weights w8a8
	@echo; echo "The same by a trained head (eagle3), with weights of full precision:"; echo
	$(BIN)/draftwood demo --weights float32 --drafter eagle3

test: check
	$(BIN)/draftwood models --fetch smollm2
	$(BIN)/pytest -n auto --dist worksteal --cov=draftwood --cov-branch --cov-report=
	$(BIN)/coverage report
	$(BIN)/coverage report --include='$(CORE)' --fail-under=95

check: .venv/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: .venv/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .coverage build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The long waits say what they are for; torch is by far the largest, so pip shows its progress.
.venv/.torch:
	@echo "Installing $(TORCH) into .venv: hundreds of MB as a CPU build, several GB with CUDA; this can take minutes."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check "$(TORCH)"
	touch $@

.venv/.installed: .venv/.torch pyproject.toml
	@echo "Installing draftwood and its other dependencies (tens of MB) ..."
	$(PIP) -e .
	touch $@

.venv/.installed-dev: .venv/.installed pyproject.toml
	@echo "Installing what tests and checks need (hundreds of MB) ..."
	$(PIP) -e ".[dev]"
	touch $@

# Peers of the CPU benchmark, in an environment of their own; one that cannot be installed is reported as missing.
# AMX is announced by machines that fault on it, so it is not used here, and compilers told "native" are kept from it.
PEERS := .venv-peers/bin/pip install -q --disable-pip-version-check
NO_AMX := $(shell grep -qs amx_tile /proc/cpuinfo && echo -mno-amx-tile -mno-amx-int8 -mno-amx-bf16)

.PHONY: bench-cpu
bench-cpu: .venv/.installed-dev .venv-peers/.installed
	$(BIN)/draftwood models --fetch smollm2
	$(BIN)/python benchmarks/cpu.py $(ARGS)

.venv-peers/.installed: benchmarks/cpu_peers/openvino.txt benchmarks/cpu_peers/llamacpp.txt
	$(PYTHON) -m venv .venv-peers
	-$(PEERS) "$(TORCH)" -r benchmarks/cpu_peers/openvino.txt
	-$(PEERS) --no-deps optimum-intel==2.2.0
	-CFLAGS="$(NO_AMX)" CXXFLAGS="$(NO_AMX)" CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" \
		$(PEERS) -r benchmarks/cpu_peers/llamacpp.txt
	touch $@
