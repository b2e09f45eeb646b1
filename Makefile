# make demo      set up .venv with what rotor needs, then calibrate, export and validate the bundled model in short: the
#                recipe `rotor`, one target, small measurements; ends with a table
# make demo-full two recipes and three targets as their recipes stand
# make reference MODEL=folder  what recipes remove at 0.99 from a model, and KL beside quantised caches: a table
# make test      set up .venv, then lint, types, the layers of the packages, and tests
# make test-fast those that take seconds
# make test-slow the tests marked slow or nightly: what repeats, forges, kills, or goes over every case
# make test-min  the tests on the oldest versions that pyproject.toml allows
# make gpu       on a GPU: tests and measurements in nine minutes (MINUTES=4: in four)
# make gpu-bundle  packages for a GPU machine without network (Python 3.12, PyTorch and Triton there), in .gpu-bundle/;
#                MODEL=file: also a real model (.gguf, or .tar of a folder), in parts of at most 60 MiB, in .gpu-model/
# make docs      the pages of README, docs/ and artifacts/, and the API from docstrings, as a site in build/site
# make test-vllm the tests of vLLM's plugin, in an environment with vLLM for CPUs

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= auto
# One thread a process, and compiled modules kept for the processes that tests start, whatever the user's shell says.
TESTED := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
TARGETS := 0.99 0.95 0.90
# Tests of values and of words: what needs no exports, no processes and no interpreter of kernels.
FAST := $(wildcard $(foreach name,bases codes forms json recipe recipe_reference search inspection cost layers \
	arguments installing ranks,tests/test_$(name).py))

PAGES = README.md CONTRIBUTING.md LICENSE docs artifacts/NOTES.md artifacts/NOTES-old.md artifacts/studies artifacts/benchmarks

.PHONY: docs demo demo-full notebook reference gpu gpu-bundle test test-fast test-slow test-vllm test-min lint setup clean

# Modules are compiled when they are first imported: few of those that are installed are.
INSTALL := pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

setup: $(VENV)/.done

$(VENV)/.done: $(VENV)/.installed
	$(BIN)/$(INSTALL) -e '.[test]'
	touch $@

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(INSTALL) -e .
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python artifacts/demo.py

demo-full: setup
	@for recipe in fdc rotor; do \
		$(BIN)/rotor calibrate artifacts/demo-model -o runs/demo-$$recipe --recipe $$recipe --overwrite || exit; \
		for target in $(TARGETS); do \
			$(BIN)/rotor export runs/demo-$$recipe -o out/demo-$$recipe-$$target --accuracy $$target --set evaluation.seq_len=512 --overwrite || exit; \
		done; \
	done
	$(BIN)/rotor generate out/demo-rotor-0.99 "def main(" --max-new-tokens 40
	$(BIN)/rotor validate $(foreach recipe,fdc rotor,$(foreach target,$(TARGETS),out/demo-$(recipe)-$(target)))

# Runs artifacts/demo.ipynb, and stores what it printed.
notebook: setup
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -c "import nbclient, nbformat; \
		notebook = nbformat.read('artifacts/demo.ipynb', 4); \
		nbclient.NotebookClient(notebook, coalesce_streams=True, record_timing=False, \
			resources={'metadata': {'path': 'artifacts'}}).execute(); \
		notebook.metadata.language_info = {'name': 'python'}; \
		nbformat.write(notebook, 'artifacts/demo.ipynb')"

MODEL ?= artifacts/reference-model
REFERENCE := rotor palu fdc
reference: setup
	@for recipe in $(REFERENCE); do \
		$(BIN)/rotor calibrate $(MODEL) -o runs/reference-$$recipe --recipe $$recipe $(SETTINGS) --overwrite || exit; \
		$(BIN)/rotor export runs/reference-$$recipe -o out/reference-$$recipe --accuracy 0.99 --overwrite || [ $$? = 3 ] || exit; \
	done
	$(BIN)/rotor study $(MODEL) --recipes rotor --parts artifacts/studies/fair.py:Fair $(SETTINGS) --no-plots -o runs/reference-study
	$(BIN)/python artifacts/reference.py $(REFERENCE:%=out/reference-%) --study runs/reference-study

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: lint
	$(TESTED) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not slow and not nightly"

test-fast: setup
	$(TESTED) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not slow and not nightly" $(FAST)

test-slow: setup
	$(TESTED) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "slow or nightly"

# Every lower bound of pyproject.toml as an exact version, in an environment of its own (Python 3.10 if there is one).
test-min:
	$$(command -v python3.10 || command -v $(PYTHON)) -m venv .venv-min
	.venv-min/bin/pip install --quiet --disable-pip-version-check \
		$$(sed -n 's/^ *"\([A-Za-z_-]*\)>=\([0-9.]*\)",$$/\1==\2/p' pyproject.toml | grep -v -e ruff -e mypy -e types- -e import-linter)
	.venv-min/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	$(TESTED) .venv-min/bin/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not slow and not nightly"

# Where Python has a PyTorch that sees a GPU, it is used as it is.
MINUTES ?= 9
GPU_RUN = artifacts/gpu -o artifacts/benchmarks/gpu.jsonl --minutes $(MINUTES)
gpu:
	@if $(PYTHON) -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null; then \
		PYTHONPATH="$(CURDIR)/$(BUNDLE)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) $(GPU_RUN); \
	else \
		$(MAKE) setup && $(BIN)/python $(GPU_RUN); \
	fi

# What such a machine lacks, unpacked; wheels for its Python, whatever this one is.
BUNDLE := .gpu-bundle
BUNDLE_PYTHON ?= 3.12
BUNDLE_PACKAGES := pydantic
CARRIED := .gpu-model
FOR_PLATFORM := --only-binary=:all: --implementation cp --python-version $(BUNDLE_PYTHON) \
	--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64
UNPACK := pip install --quiet --disable-pip-version-check --no-compile --target $(BUNDLE) $(FOR_PLATFORM)
gpu-bundle:
	rm -rf $(BUNDLE) $(CARRIED)
	$(PYTHON) -m $(UNPACK) -c constraints.txt $(BUNDLE_PACKAGES)
ifneq ($(origin MODEL),file)
	$(PYTHON) -m $(UNPACK) --no-deps --upgrade gguf accelerate psutil
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) artifacts/gpu cut $(MODEL) -o $(CARRIED)
	@echo "Carry each part, too. There: python3 artifacts/gpu join (a run does so by itself)"
endif
	@du -sh $(BUNDLE)
	@echo "Carry this tree with $(BUNDLE)/, which git ignores. There, in its root:"
	@echo "    export PYTHONPATH=\$$PWD/$(BUNDLE) $$(git rev-parse HEAD 2>/dev/null | sed 's/^/ROTOR_COMMIT=/')"
	@echo "    python3 artifacts/gpu -o gpu.jsonl --minutes 9"

# vLLM for CPUs, without what it needs for pictures and sounds (torchvision, torchaudio, torchcodec).
test-vllm: .venv-vllm/.done
	$(TESTED) .venv-vllm/bin/python -m pytest -q -m vllm

.venv-vllm/.done: constraints-vllm.txt pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps -r constraints-vllm.txt
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

docs: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	rm -rf build/docs && mkdir -p build/docs
	tar -cf - --exclude=runs --exclude=text $(PAGES) | tar -xf - -C build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) .venv-min .venv-vllm runs out build
