# Two commands on a fresh machine: make demo, make test. Each target sets up what it needs in .venv.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
RUN    := $(VENV)/.run-ready
DEV    := $(VENV)/.dev-ready
DOCS   := .venv-docs
FT     := .venv-torchft

.PHONY: demo test check interop gpu bench goodput soak coverage clusters format files tables docs screenshots release clean

demo: $(RUN)
	$(PY) examples/demo.py

test: $(DEV)
	$(PY) -m pytest -m "not soak" -n 2

# FAST= leaves the fast tests out, for those who run make test next.
FAST := yes
check: $(DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(if $(FAST),$(PY) -m pytest -m fast -n 2)

# Programs of torch's own libraries, on gloo and on our backend, compared.
interop: $(DEV)
	$(PY) -m pytest tests/interop tests/launch/test_elastic_programs.py

# What only a machine with CUDA can show, see tests/gpu/README.md; on others everything is skipped, with the reason.
gpu: $(DEV)
	$(PY) -m pytest tests/gpu -n 0 -rs

# Stores what it measured under benchmarks/results; `python -m benchmarks.compare` shows what moved.
bench: $(DEV)
	$(PY) -m benchmarks

# A worker killed every 5, 15 and 60 s, with torchrun and torchft: half an hour, on a machine that has nothing else to do.
goodput: $(DEV) $(FT)/.ready
	$(PY) -m benchmarks goodput -- --every 5 15 15 15 15 15 60 --once torchft --torchft $(FT)/bin/python

soak: $(DEV)
	$(PY) -m pytest -m soak

# Every operator sample of torch on distributed tensors, under many placements; some minutes.
coverage: $(DEV)
	$(PY) -W ignore tests/tensor/coverage.py
	$(PY) -W ignore tests/tensor/coverage.py --shape 3
	$(PY) -W ignore tests/tensor/coverage.py --shape 4
	$(PY) -W ignore tests/tensor/coverage.py --shape 2x2 --samples 3 --layouts 4
	$(PY) -W ignore tests/tensor/coverage.py --order reversed
	$(PY) -W ignore tests/tensor/coverage.py --order channels_last --shape 3
	$(PY) -W ignore tests/tensor/coverage.py --partial avg --samples 2
	$(PY) -W ignore tests/tensor/coverage.py --partial max --shape 3 --samples 2
	$(PY) -W ignore tests/tensor/coverage.py --against-torch --samples 2 --layouts 10
	$(PY) -W ignore tests/tensor/coverage.py --compile --samples 1 --layouts 2

format: $(DEV)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# The faults between hosts in a box, as a table in docs/clusters.md; needs root. Half an hour.
clusters: $(DEV)
	PYTHONPATH=.:tests:tests/elastic $(PY) -m tests.hosts.faults

# docs/files.md, from the docstrings of the modules. Needs nothing but Python.
files:
	$(PYTHON) -m tools.files

# The tables of measurements in docs, from the newest runs under benchmarks/results.
tables: $(DEV)
	$(PY) -m tools.tables

# The documentation site, in build/site/VERSION; a warning fails it. It reads the source without importing torch, so its
# environment is a small one of its own, and nothing of it can change what the tests run on.
docs: $(DOCS)/.ready
	$(DOCS)/bin/python -m tools.site

# Pictures of the live page for the docs; needs Chromium.
screenshots: $(RUN)
	$(PY) -m tools.screenshots

# Wheel and sdist, checked, and the wheel tried in an environment of its own (without torch: a version needs none).
release: $(RUN)
	$(PIP) -e ".[release]"
	rm -rf dist
	$(PY) -m build --quiet >/dev/null
	$(PY) -m twine check --strict dist/*
	$(PY) -m venv --clear build/try
	build/try/bin/python -m pip install --quiet --disable-pip-version-check --no-deps dist/*.whl
	build/try/bin/phalanx --version

clean:
	rm -rf $(VENV) $(DOCS) $(FT) .mypy_cache .ruff_cache build dist src/*.egg-info

$(PY):
	$(PYTHON) -m venv $(VENV)

$(RUN): pyproject.toml constraints.txt | $(PY)
	$(PIP) -e .
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(PY)
	$(PIP) -e ".[dev]"
	@touch $@ $(RUN)

$(FT)/.ready: constraints.txt
	$(PYTHON) -m venv $(FT)
	$(FT)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torchft==0.2.0
	@touch $@

$(DOCS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m tools.site --requirements > $(DOCS)/requirements.txt
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $(DOCS)/requirements.txt
	@touch $@
