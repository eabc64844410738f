# `make demo` and `make test` do all their own set-up: a .venv in the tree, on top of the SGLang of the active Python
# where that has the pinned release, else with SGLang installed into it.
# PYTHON=/path/to/python uses that environment as it is and installs nothing into it.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo test soak lint typecheck docs kernels gpu target

ifdef PYTHON
PY := $(abspath $(shell command -v $(PYTHON)))
$(if $(PY),,$(error PYTHON=$(PYTHON): no such interpreter))
DEMO_READY := check-demo
TEST_READY := check-test
.PHONY: check-demo check-test
check-demo check-test: check-%:
	@$(PY) requirements/check.py $*
else
PY := $(CURDIR)/.venv/bin/python
DEMO_READY := .venv/.ready-demo
TEST_READY := .venv/.ready-test
endif

SETUP := requirements/setup.sh requirements/check.py requirements/demo.txt requirements/demo-nodeps.txt pyproject.toml

.venv/.ready-demo: $(SETUP)
	requirements/setup.sh demo

.venv/.ready-test: .venv/.ready-demo requirements/test.txt requirements/test-nodeps.txt
	requirements/setup.sh test

# Three servers on this machine, the same questions to each, one table. Leaves .demo/demo.json.
demo: $(DEMO_READY) target
	$(PY) -m benchmarks.demo.demo

# The demo's target model, written once to .demo/SmolLM2-135M-Instruct.
target: $(DEMO_READY)
	$(PY) -m benchmarks.demo.target

# Without a host first: it is quick and says most.
test: $(TEST_READY) target
	$(PY) -m pytest -n auto --maxprocesses 4 --dist loadfile -m "not (host or e2e or soak)" \
		--ignore tests/test_kernels
	$(PY) -m pytest -n auto --maxprocesses 2 --dist worksteal -m "not (host or soak)" tests/test_kernels
	$(PY) -m pytest -n auto --maxprocesses 2 --dist worksteal -m "host and not (e2e or soak)"
	$(PY) -m pytest -n auto --maxprocesses 2 --dist loadfile -m "e2e and not soak"

# What takes longer; run by hand.
soak: $(TEST_READY) target
	$(PY) -m pytest -m soak

# Interpreter, bytes moved, compile gates; not the tests of what was committed. Leaves .demo/kernels.json.
# TRITON=/path/to/an/unpacked/wheel takes that Triton.
kernels: $(TEST_READY)
	$(if $(TRITON),PYTHONPATH=$(abspath $(TRITON))) $(PY) -m pytest -n auto --maxprocesses 2 --dist loadfile -m "not soak" \
		--kernels-json .demo/kernels.json --ignore tests/test_kernels/test_tables.py tests/test_kernels

# On a CUDA machine, PYTHON=/path/to/python with torch and triton is enough (tqdm shows progress). Leaves benchmarks/results/gpu-*.json.
gpu:
	$(PY) -m benchmarks.gpu

lint: $(TEST_READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@if git grep -nE 'make_block_ptr|tl\.advance' -- kernels; then echo 'kernels/: block pointers are banned'; exit 1; fi
	@$(MAKE) --no-print-directory typecheck

# In the layout of a wheel: mypy cannot see that kernels/ belongs inside the package.
typecheck: $(TEST_READY)
	rm -rf build/typecheck && mkdir -p build/typecheck
	cp -Rp sglang_eagle3_ext build/typecheck/ && cp -Rp kernels build/typecheck/sglang_eagle3_ext/
	cd build/typecheck && $(PY) -m mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache
	$(PY) -m mypy --no-warn-unused-configs -m benchmarks.render -m benchmarks.targets -m benchmarks.demo.demo

# Figures in README.md come from benchmarks/results/, never from a keyboard.
docs: $(DEMO_READY) target
	$(PY) -m benchmarks.render
	$(PY) -m benchmarks.targets --render
	$(PY) -m benchmarks.kernel_tables
	$(PY) -m benchmarks.probe.render
	$(PY) -m benchmarks.watch.simulate --render
	$(PY) -m benchmarks.dialects --render
