# `make demo` and `make test` need nothing but Python 3.11 or newer: each creates or reuses .venv.
# Another interpreter: make clean, then make test PYTHON=python3.13

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
# A warning fails the build: a broken link, an example that raises, markup that does not render.
SITE := OMP_NUM_THREADS=1 $(RUN) sphinx -b html -n -W --keep-going -q docs build/site

# Tests start many processes: a package that is not compiled is compiled again by each of them.
unexport PYTHONDONTWRITEBYTECODE

# An installation is named after all it depends on, so it is redone exactly when one of them changes.
KEY := $(shell { pwd; cat pyproject.toml constraints.txt; } | cksum | cut -d ' ' -f 1)
CORE := $(VENV)/.core-$(KEY)
TEST := $(VENV)/.test-$(KEY)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: demo test campaign docs pictures links lint types format clean help

demo: $(CORE) ## set up, then run the demonstration
	$(VENV)/bin/otad demo

# Types and documentation are checked while the tests run: each of them alone leaves a core idle.
test: lint ## set up, then lint, type check, build the documentation and run all tests
	{ $(RUN) mypy && $(SITE); } & rest=$$!; $(RUN) pytest -n 2 --dist worksteal && wait $$rest

campaign: $(TEST) ## 20,000 bad calls, forged files and kills; writes results/campaign.json
	PYTHONPATH=tests $(VENV)/bin/python benchmarks/run_campaign.py

docs: $(TEST) ## build the documentation site and its gallery into build/site
	$(SITE)

pictures: $(TEST) ## draw the pictures of the documentation again
	$(VENV)/bin/python docs/pictures.py
	$(VENV)/bin/python benchmarks/draw_gain.py
	$(VENV)/bin/python benchmarks/draw_comparison.py

links: $(TEST) ## check the links of the documentation to other sites
	$(RUN) sphinx -b linkcheck -q -D plot_gallery=0 docs build/links

lint: $(TEST) ## check the style and the layout of the code
	$(RUN) ruff check
	$(RUN) ruff format --check

types: $(TEST) ## check the types over src
	$(RUN) mypy

format: $(TEST) ## rewrite the code in the agreed layout
	$(RUN) ruff check --fix
	$(RUN) ruff format

clean: ## remove the environment, caches and build products
	rm -rf $(VENV) build dist docs/auto_examples docs/api/generated docs/sg_execution_times.rst .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

$(CORE):
	$(install)
	@touch $(CORE)

$(TEST): EXTRAS := [reference,index,singlecell,attacks,clients,purification,serve,cluster,hub,docs,dev]
$(TEST):
	$(install)
	@touch $(CORE) $(TEST)

# Old marks go before pip starts: once it has, and should it be interrupted, none of them is true.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
# Parts of packages that are rarely imported.
UNUSED := /tests?/|/testing/|/(mypyc?|setuptools)/|/ray/(data|llm|rllib|serve|train|tune)/
UNUSED := $(UNUSED)|/diffusers/(modular_)?pipelines/|/fontTools/(feaLib|ttLib|ufoLib|varLib)/|/sympy/(physics|stats)/
define install
@$(VENV)/bin/python -c 'import pip; $(NEW_ENOUGH)' 2>/dev/null || { \
	$(PYTHON) -c '$(NEW_ENOUGH)' || { \
		echo "otad needs Python 3.11 or newer, but PYTHON=$(PYTHON) is: $$($(PYTHON) --version 2>&1)"; \
		echo "Name another one, for example: make PYTHON=python3.12 $(MAKECMDGOALS)"; \
		exit 1; }; \
	$(PYTHON) -m venv --clear $(VENV); }
@rm -f $(VENV)/.core-* $(VENV)/.test-*
@echo "Installing otad$(EXTRAS) into $(VENV): a few minutes the first time"
@$(RUN) pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade pip # resolves three times as fast
@$(RUN) pip install --quiet --no-compile -c constraints.txt -e '.$(EXTRAS)'
@$(RUN) compileall -q -j 0 -x '$(UNUSED)' $(VENV)/lib >/dev/null 2>&1 || true # on all cores, unlike pip
endef
