# Every target makes the environment in .venv when it is missing; nothing else is needed but Python 3.11 and pip.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check docs format clean

demo: .venv/ready
	$(BIN)/mctf demo

test: .venv/ready
	$(BIN)/python -m pytest
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: .venv/ready
	PYTHONPATH=tests $(BIN)/python -m helpers.model_page

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@
