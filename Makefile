# Every target is safe to repeat; an environment is built again only when its lock changes.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BENCH := .venv-bench
PIP_TOOLS := pip-tools==7.6.2
# The lock must not depend on this machine's pip settings, and must not name them.
COMPILE := env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL -u PIP_CONSTRAINT PIP_CONFIG_FILE=/dev/null \
	CUSTOM_COMPILE_COMMAND='make lock' .venv-lock/bin/pip-compile --quiet --generate-hashes \
	--allow-unsafe --strip-extras --no-emit-index-url --no-emit-trusted-host --no-emit-find-links

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo serve test lint format bench soak lock clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## Run the weather example to its end; again, it carries on or shows the result.
	$(VENV)/bin/playledger run examples/weather.py:yearly_report \
		--input @examples/data/seattle-weather.csv --run-id weather-demo --db demo.db

serve: $(VENV)/.installed ## Serve the examples over HTTP, on the log that the demo wrote.
	$(VENV)/bin/playledger serve examples/weather.py examples/shop.py --db demo.db --insecure-local

test: $(VENV)/.installed ## Run the tests.
	$(VENV)/bin/python -m pytest -q

lint: $(VENV)/.installed ## Check style, format and types; change nothing.
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/.installed ## Format the code, and fix what can be fixed safely.
	$(VENV)/bin/ruff check --fix-only --quiet .
	$(VENV)/bin/ruff format .

bench: $(BENCH)/.installed ## Measure against the limits and the peers, in an environment of its own.
	$(BENCH)/bin/python -m benchmarks

soak: $(VENV)/.installed ## Kill it again and again, and compare with a run that was never killed.
	$(VENV)/bin/python -m tests.crash.soak

lock: ## Resolve the dependencies again and write both lock files.
	test -x .venv-lock/bin/pip-compile || { $(PYTHON) -m venv .venv-lock && \
		.venv-lock/bin/python -m pip install --quiet $(PIP_TOOLS); }
	$(COMPILE) --upgrade --extra dev --output-file requirements.lock pyproject.toml
	$(COMPILE) --extra dev --extra bench --constraint requirements.lock \
		--output-file requirements-bench.lock pyproject.toml

clean: ## Remove what can be made again: environments, caches, builds, the demo's log.
	rm -rf $(VENV) $(BENCH) .venv-lock build dist *.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis demo.db demo.db-* demo.db.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: requirements.lock pyproject.toml
$(BENCH)/.installed: requirements-bench.lock pyproject.toml
$(VENV)/.installed $(BENCH)/.installed:
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --require-hashes -r $<
	$(@D)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@
