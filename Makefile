# depthlab needs only Python >= 3.11, make and pip.
#   make run     install, execute every notebook, print the claims so far
#   make test    lint, policy, unit tests, notebooks against their committed outputs
#   make lab     open the notebooks in Jupyter
#   make bench   measure the kernels (needs an NVIDIA GPU); replaces their records in data/results
#   make clean   remove .venv and build/

PYTHON ?= python3
CONSTRAINTS ?=
BIN := .venv/bin
INSTALLED := .venv/.installed
# Prints how long a part took; in CI a part that outruns its budget (in seconds) fails.
WITHIN := $(BIN)/python .ci/within.py
# Two workers on two cores: more threads inside each would only fight.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
POLICY := tests/test_notebook_policy.py tests/test_repository_policy.py
# Triton must be told before it is imported that it runs in its interpreter, on the CPU: a pytest run of its own.
FUSED := tests/kernels/mgr/fused

.PHONY: run test lint policy unit kernels notebooks notebooks-elsewhere lab bench clean install

run: install
	@$(ONE_THREAD) $(BIN)/python -m depthlab notebooks run; code=$$?; \
	$(BIN)/python -m depthlab claims || code=1; \
	exit $$code

test: lint policy unit kernels notebooks

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

policy: install
	$(ONE_THREAD) $(BIN)/python -m pytest -q $(POLICY)

unit: install
	$(ONE_THREAD) $(WITHIN) 720 "unit tests" $(BIN)/python -m pytest -q -n 2 --dist worksteal tests $(addprefix --ignore=,$(POLICY) $(FUSED))

kernels: install
	TRITON_INTERPRET=1 $(ONE_THREAD) $(WITHIN) 300 "kernels, interpreted" $(BIN)/python -m pytest -q -n 2 --dist worksteal $(FUSED)

notebooks: install
	$(ONE_THREAD) $(WITHIN) 480 "notebooks" $(BIN)/python -m depthlab notebooks check

# Another processor's arithmetic and another thread count: what passes only on the first machine fails here.
notebooks-elsewhere: install
	ATEN_CPU_CAPABILITY=default MKL_CBWR=SSE4_2 OMP_NUM_THREADS=2 MKL_NUM_THREADS=2 \
	$(WITHIN) 840 "notebooks, as another machine" $(BIN)/python -m depthlab notebooks check

lab: install
	$(ONE_THREAD) $(BIN)/jupyter lab notebooks

bench: install
	$(BIN)/python -m depthlab bench mgr

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "depthlab needs Python 3.11 or newer, this is %d.%d; set PYTHON=python3.12, say." % sys.version_info[:2])'
	@echo "Installing into .venv (torch is large; a few minutes the first time)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv  # also after one cut short
	@$(BIN)/python -m pip install -q --upgrade pip setuptools wheel
	@PYTHONWARNINGS=ignore $(WITHIN) 300 "installation" $(BIN)/python -m pip install -q $(addprefix -c ,$(CONSTRAINTS)) -e '.[notebooks,data,dev]'
	@touch $(INSTALLED)

clean:
	rm -rf .venv build *.egg-info src/*.egg-info
