# Everything a fresh machine needs: Python >= 3.11 and make. The environment is made when it is missing.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
WORKERS ?= 2
STUDY ?=
ARGS ?=
RESULTS ?=
FIGURES ?= figures
DEMO := runs/demo
NO_NETWORK := ConnectionError|ConnectTimeout|ReadTimeout|ProxyError|Max retries exceeded|name resolution

# One thread: two on a busy machine were seen many times slower for networks of this size.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all study publish figures notebooks audit bench-tables bench-trunks clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(VENV)/.installed ## make the environment in .venv, if it is missing or pyproject.toml changed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python >= 3.11 is needed; choose one with: make PYTHON=python3.12 …"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: install ## a small sweep on the embedded digits (2 seeds x 2 criteria x 4 sparsities) and its figures
	$(PY) run.py -m experiment=digits study=demo seed=0,1 \
	    pruning.criterion=variance,random pruning.sparsity=0.25,0.5,0.75,0.9
	$(PY) -m tnvp.results $(DEMO)
	$(PY) -m tnvp.figures $(DEMO) --out $(FIGURES)/demo
	@echo
	@echo "Figures:  $(FIGURES)/demo/  (start with accuracy-*.png)"
	@echo "Runs:     $(DEMO)/  (config.yaml, metrics.jsonl, events.jsonl, traces.parquet, model.pt, summary.json)"
	@echo "W&B view: $(VENV)/bin/wandb leet $$(ls -d $(DEMO)/*/wandb | head -1)/latest-run   (offline; q leaves it)"
	@echo "Next:     README.md, section \"In your own training loop\""

test: install ## the tests (a few minutes, in WORKERS=2 processes)
	$(PY) -m pytest -n $(WORKERS) --dist loadfile

test-all: install ## the slow tests too; says what was skipped, and which extra that wants
	$(PY) -m pytest -n $(WORKERS) --dist loadfile -rs -m 'slow or not slow'

study: install ## run what is missing of the study STUDY=name (ARGS="…" goes to every run)
	$(PY) -m tnvp.study run $(STUDY) $(ARGS)

publish: install ## its tables and figures from the finished runs, into experiments/STUDY
	$(PY) -m tnvp.study publish $(STUDY) $(ARGS)

figures: install ## redraw the published figures; RESULTS=runs: those of your own runs, into FIGURES (default: figures)
	$(PY) -m tnvp.study figures $(if $(RESULTS),--results $(RESULTS) --out $(FIGURES))

notebooks: install ## run the notebooks anew and keep what they show (a minute; on digits)
	TNVP_DATA_ROOT= $(PY) notebooks/execute.py

audit: install ## look the installed packages up among known vulnerabilities (needs the network)
	@folder=$$(mktemp -d) && trap "rm -rf $$folder" EXIT && $(PYTHON) -m venv $$folder && \
	packages=$$($(PY) -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])') && { \
	{ $$folder/bin/pip install --quiet --disable-pip-version-check --retries 1 pip-audit && \
	  $$folder/bin/pip-audit --progress-spinner off --path "$$packages"; } 2>$$folder/said; status=$$?; \
	if test $$status -ne 0 && grep -qE '$(NO_NETWORK)' $$folder/said; \
	then echo "make audit needs the network: $$(grep -E '$(NO_NETWORK)' $$folder/said | tail -1 | cut -c1-200)" >&2; \
	else cat $$folder/said >&2; fi; exit $$status; }

bench-tables: install ## measure how long a table of 5,000 runs takes to read
	$(PY) -m tests.bench_tables

bench-trunks: install ## measure what the trunk cache saves of the study one_shot (half an hour; needs MNIST)
	$(PY) -m tests.bench_trunks

clean: ## remove caches; runs, figures and the environment stay
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	rm -rf .pytest_cache .hypothesis *.egg-info
