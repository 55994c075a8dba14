# One command per task. Every target first prepares .venv by itself; the second time that costs nothing.

PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8000
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SITE   := docs/_build/html
PAGES  := $(wildcard README.md docs/*.md docs/*/*.md)
CODE   := $(wildcard src tests docs benchmarks tutorials)
PROSE  := $(wildcard *.md conf)

export JAX_PLATFORMS ?= cpu
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup site serve test doctest browser lint clean

help:  ## Show this list
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1#\2/p' $(MAKEFILE_LIST) | column -t -s '#'

setup: $(STAMP)  ## Make .venv and install the package with everything the other targets need

# uv is faster; pip is always there. Without a wheel of libtpu (macOS, Arm) the compile-only TPU checks are skipped.
$(STAMP): pyproject.toml requirements.lock
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "diloco needs Python 3.11 or newer; run: make setup PYTHON=python3.11" >&2; exit 2; }
	@$(BIN)/python -m pip install --quiet uv || echo "uv is not to be had; pip does the work" >&2
	@for extras in docs,test,lint,nnx,tpu docs,test,lint,nnx; do \
	  for installer in "$(BIN)/python -m uv pip install --quiet --python $(BIN)/python" "$(BIN)/python -m pip install --quiet"; do \
	    echo "installing diloco[$$extras]"; \
	    $$installer -c requirements.lock -e ".[$$extras]" && touch $@ && exit 0; \
	  done; \
	done; echo "the install failed; the messages above say why" >&2; exit 1

site: $(STAMP)  ## Build the documentation, running every page (docs/_build/html)
	$(BIN)/python -m sphinx -T -n -W -b html docs $(SITE)
	@echo "open $(SITE)/index.html, or run: make serve"

serve: site  ## Build the documentation and serve it on PORT (8000)
	$(BIN)/python -m http.server --directory $(SITE) $(PORT)

test: $(STAMP)  ## Run all tests and every example in the docstrings, the README and the pages
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests src $(PAGES)

doctest: $(STAMP)  ## Run only the examples in the docstrings, the README and the pages
	$(BIN)/python -m pytest -q src $(PAGES)

browser: site  ## Open every built page in chromium: errors, formulas, links, phone width
	$(BIN)/python -m pytest -q tests/test_site.py

lint: $(STAMP)  ## Check style, formatting and spelling
	$(BIN)/python -m ruff check $(CODE)
	$(BIN)/python -m ruff format --check $(CODE)
	$(BIN)/codespell $(PROSE) $(CODE)

clean:  ## Remove what was built; .venv stays
	rm -rf docs/_build docs/reference/generated build dist .pytest_cache .ruff_cache .hypothesis
	find src tests docs tutorials -name __pycache__ -prune -exec rm -rf {} +
