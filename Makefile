# Two commands on a fresh machine (Linux, Python 3.10 to 3.13, pip, make):
#   make demo   the main job end to end: train both stages, export, run on two backends, energy report
#   make test   the test suite
# Each makes .venv and installs what it needs; a second call finds everything in place.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.10 python3.13 python3; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null \
	&& echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
# Asked for by this exact version before anything that depends on it: a looser request may bring GPU builds of several
# gigabytes. Elsewhere choose your own: make test TORCH="torch==2.9.1 --index-url …"
TORCH ?= torch==2.13.0
# Lava 0.10.0 needs numpy < 2.4 (docs/lava.md).
NUMPY := "numpy>=1.26,<2.4"
DEMO ?= demo
# pip's own words are kept in a file and shown only if it fails: it warns of Lava's old pins each time (docs/lava.md).
PIP = sh examples/quietly.sh $(VENV)/install.log $(BIN)/python -m pip install -q --no-compile --disable-pip-version-check --root-user-action=ignore
PYTEST := $(BIN)/python -m pytest
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: help demo test test-slow test-interop lint install lava sanafe docs bench clean

help:
	@sed -n 's/^# \{0,1\}//; 1,4p' Makefile
	@echo "also: make test-slow, test-interop, lint, lava, sanafe, docs, bench, clean"

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.10 to 3.13 found. Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 2; }
	@echo "== environment: $(VENV) with $$($(PYTHON) --version); minutes the first time, nothing the second"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "venv failed: on Debian, apt-get install python3-venv"; exit 2; }
	@echo "== installing $(TORCH)"
	@$(PIP) $(TORCH) \
		|| { echo "torch did not install. Choose another: make $(MAKECMDGOALS) TORCH=torch"; exit 2; }
	@echo "== installing spikeopd with everything the demo and the tests use"
	@$(PIP) -e ".[train,lava,eval,viz,serve,dev]" $(NUMPY)
	@echo "== installing Lava"  # last and without its pins, which are older than what it works with (docs/lava.md)
	@$(PIP) --no-deps --ignore-requires-python lava-nc==0.10.0
	@touch $@

demo: install
	@BIN=$(BIN) OUT=$(DEMO) sh examples/demo.sh

test: install
	@echo "== tests"
	$(PYTEST) -n 2 --dist loadfile

test-slow: install
	$(PYTEST) -m "slow and not interop and not network"

# Third-party tools, each in an environment of its own; a missing one says how to make it.
test-interop: install
	$(PYTEST) -m interop -rs

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# lava-nc 0.10.0 declares Python < 3.11 but works up to 3.13 (docs/lava.md); `install` does the same.
lava: install
	@$(BIN)/python -c 'from neuro_sim.lava.compat import lava_available; print("Lava:", "ready" if lava_available() else "missing")'

# The documentation as a site in site/; a broken link fails.
docs: install
	@$(PIP) -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q -d site

# A simulator of Loihi under GPL-3: an environment of its own, never a dependency (docs/sanafe.md).
sanafe: .venv-sanafe/.installed

.venv-sanafe/.installed:
	@test -n "$(PYTHON)" || { echo "No Python 3.10 to 3.13 found; name it: make sanafe PYTHON=/path/to/python3.11"; exit 2; }
	@test -x .venv-sanafe/bin/python || $(PYTHON) -m venv .venv-sanafe || { echo "venv failed: on Debian, apt-get install python3-venv"; exit 2; }
	@.venv-sanafe/bin/python -m pip install -q --no-compile --disable-pip-version-check sanafe==2.2.9 numpy pyyaml
	@.venv-sanafe/bin/python -c 'from importlib.metadata import version; import sanafe; print("SANA-FE:", version("sanafe"))'
	@touch $@

bench: install
	@echo "Two of benchmarks/*.py: each says in its head what it measures, and prints ratios taken in turns in one run"
	$(BIN)/python benchmarks/neuron.py
	$(BIN)/python benchmarks/decode.py

clean:
	rm -rf $(VENV) $(DEMO) site .pytest_cache .hypothesis
