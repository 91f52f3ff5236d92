# Every target creates the environment in .venv when it is missing. Python 3.11 or later and pip are all it needs.
PYTHON ?= python3
BIN := .venv/bin
# Bytecode is written whatever the environment says: tests start many processes that import the same packages.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/python -m pytest

.PHONY: demo five-minutes test test-all nightly chaos adversarial check coverage docs site wheel release-check format clean

# The demo and the playground alone need fewer packages than the tests.
demo: .venv/demo
	@echo "mctf demo: one model, unfused and fused, on photographs; nothing is downloaded"
	$(BIN)/mctf demo

# The commands of docs/index.md, in a fresh clone with an environment of its own: some minutes and 6 GB while it runs.
five-minutes:
	PYTHONPATH=tests $(PYTHON) -m helpers.five_minutes

# Tests run in three processes, some of which wait. The Triton kernels run on the CPU, by Triton's interpreter.
test: .venv/ready
	$(PYTEST)
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels

# The tests marked slow as well.
test-all: .venv/ready
	$(PYTEST) -m "not nightly"
	TRITON_INTERPRET=1 $(PYTEST) -m "not nightly" tests/kernels

# What takes long for what it finds; about three minutes.
nightly: .venv/ready
	$(PYTEST) -m nightly

# Embedding of 2,000 photographs of ../shared/data, killed 20 times and resumed, on this machine and with Ray workers lost.
chaos: .venv/ready
	MCTF_CHAOS=full $(PYTEST) -m "" -n 0 tests/adversarial/test_embedding.py

# Bad input, hostile files and killed runs; the last lines count the cases that held.
adversarial: .venv/ready
	$(PYTEST) -m "" tests/adversarial

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# The last line of the report is the figure; --cov-append adds the interpreter's run to the first one.
coverage: .venv/ready
	$(PYTEST) --cov --cov-report=
	TRITON_INTERPRET=1 $(PYTEST) --cov --cov-append --cov-report=term tests/kernels

docs: .venv/ready
	PYTHONPATH=tests $(BIN)/python -m helpers.model_page
	$(BIN)/python benchmarks/performance_page.py

# The documentation as a site in site/; a warning is an error. The variable stops an advertisement of the theme.
site: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# By the environment's own setuptools, so that it needs no network.
wheel: .venv/ready
	$(BIN)/python -m build --no-isolation

# Wheel and sdist, checked; then the wheel on every Python that is found, and with the lowest versions of dependencies.
# Each of these environments is some 6 GB of downloads; CHECK="--only 3.11,lowest" chooses some, CHECK="--skip 3.13" leaves
# one out. What could not be checked is an error.
release-check: .venv/ready
	rm -rf build dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/repo/release_check.py $(CHECK)

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist site .coverage .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# Python compiles what is imported; compiling every package beforehand takes a third of the installation.
.venv/ready: pyproject.toml constraints.txt
	@echo "installing mctf with all tools of development into .venv: 6.6 GB, most of it PyTorch with CUDA; about 5 minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch .venv/demo $@

.venv/demo: pyproject.toml constraints.txt
	@echo "installing mctf with the demo and the playground into .venv: 5.7 GB, most of it PyTorch with CUDA; about 4 minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[demo,playground]"
	touch $@
