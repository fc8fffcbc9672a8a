# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: quickstart test lint install clean

$(VENV)/.installed: pyproject.toml setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e ".[dev]" -c constraints.txt
	touch $@

install: $(VENV)/.installed

quickstart: install
	$(BIN)/python examples/quickstart.py

lint: install
	$(BIN)/ruff check kimi_hf tests examples benchmarks

# Two workers with one thread each: many small tensors gain nothing from more threads.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

clean:
	rm -rf $(VENV) build *.egg-info
