# make demo: from a fresh clone to a trained model.   make test: lint, types and the tests.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  := 2.13.0
TRITON := 3.7.1
RUN    ?= runs/demo
FUZZ   ?= 200
# Three files of tests at a time on two cores: what waits for messages, processes or time-outs leaves
# its core to the others.
THREE  := --numprocesses 3 --dist loadfile --no-loadscope-reorder

# Where it is set, as in many container images, each of the hundreds of processes that tests start
# would compile the package anew, and each test run would rewrite all asserts.
suite test-all: export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test suite test-all lint style types fmt docs lock release clean help

help:
	@echo "make demo    set up, prepare real text, train a small GPT-2 on a 2x2 grid, sample from it"
	@echo "make test    lint, type check and the test suite, in about ten minutes on two cores"
	@echo "make test-all the same, with the cases that are more of the same and fresh random examples"
	@echo "             (FUZZ=2000: that number of random models on random layouts); writes docs/results/exactness.md"
	@echo "make docs    check and build the site of the documentation (build/site)"
	@echo "make lock    pin the dependencies anew (requirements.lock)"
	@echo "make release build the wheel and the sdist, and check them in an environment of their own"
	@echo "make clean   remove the environment, prepared data and runs"

demo: $(VENV)/.ready
	@$(BIN)/gridformer demo --out $(RUN)
	@echo 'To type `gridformer` as it is, in this shell: source $(BIN)/activate'

# mypy takes half a minute of one core, so it runs beside the first tests.
test: $(VENV)/.ready style
	@$(MAKE) --no-print-directory --jobs=2 types suite

suite: $(VENV)/.ready
	$(BIN)/python -m pytest $(THREE)

test-all: $(VENV)/.ready lint
	$(BIN)/python -m pytest $(THREE) -m "full or not full" --hypothesis-profile=fresh --fuzz-cases $(FUZZ) --exactness-table docs/results/exactness.md

lint: style types

style: $(VENV)/.ready
	$(BIN)/ruff check src tests benchmarks examples docs
	$(BIN)/ruff format --check src tests benchmarks examples docs
	$(BIN)/lint-imports --no-logo --no-cache

types: $(VENV)/.ready
	$(BIN)/mypy

fmt: $(VENV)/.ready
	$(BIN)/ruff check --fix src tests benchmarks examples docs
	$(BIN)/ruff format src tests benchmarks examples docs

# The checks of links and commands are those of `make test`; mkdocs then finds broken links and names
# of the API. To upgrade what requirements-docs.lock pins: pip install --upgrade '.[docs]', pip freeze.
docs: $(VENV)/.ready
	@$(BIN)/python -c "import material, mkdocstrings_handlers.python" 2> /dev/null || \
	  $(BIN)/python -m pip install -qq --no-deps -r requirements-docs.lock
	$(BIN)/python -m pytest -n 0 tests/docs/test_site.py tests/docs/test_links.py tests/docs/test_commands.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "built build/site; to read and search it: python -m http.server --directory build/site"

# torch first and pinned: a looser requirement, met with no torch installed, would pull another build.
# Triton exists for Linux. CUDA builds of torch bring the version that they need; for CPU builds it is
# installed here, for the tests of the kernels. pip compiles what it installs, but not what is editable;
# where Python may not do that either (see above), commands would start half a second later.
$(VENV)/.ready: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "gridformer needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch $(TORCH) and the pinned dependencies (a minute or two)"
	@$(BIN)/python -m pip install -qq torch==$(TORCH)
	@$(BIN)/python -m pip install -qq -r requirements.lock
	@$(BIN)/python -c "import triton" 2> /dev/null || test $$(uname) != Linux || \
	  $(BIN)/python -m pip install -qq --no-deps triton==$(TRITON)
	@$(BIN)/python -m pip install -qq --no-deps --editable .
	@$(BIN)/python -m compileall -q src
	@touch $@

# Upgrade everything pyproject.toml allows, then pin what was installed, but for what only the site
# needs. torch has its own line above.
lock: $(VENV)/.ready
	$(BIN)/python -m pip install -qq --upgrade --upgrade-strategy eager torch==$(TORCH) --editable '.[dev]'
	$(BIN)/python -m pip freeze --exclude-editable --exclude torch --exclude triton --exclude gridformer | grep -vxFf requirements-docs.lock > requirements.lock

release: $(VENV)/.ready
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	$(BIN)/python -m pytest tests/cli/test_install.py --built dist
	@echo "To publish gridformer $$($(BIN)/python -m hatchling version):"
	@echo "  git tag --annotate v$$($(BIN)/python -m hatchling version) && git push --tags"
	@echo "  python3 -m pip install twine && python3 -m twine upload dist/*"

clean:
	rm -rf $(VENV) data runs build dist
