# A few verbs. Each makes its own environment in .venv, from nothing, the first time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test quick check bench reliability docs docs-serve

# Train on 4 processes, stop, resume on another layout, gather to one file, compare with a plain model.
demo: $(INSTALLED)
	$(BIN)/python recipes/demo.py

# All of it, or of one room: make test ROOM=checkpoint. A room is a folder of tests.
# Three files at a time on two cores: much of a test of several ranks is waiting for processes to start.
test: $(INSTALLED)
	$(BIN)/python -m pytest -n 3 --dist loadfile $(ROOM:%=tests/%)

# The tests that need neither other processes nor a server nor a GPU.
quick: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not ranks and not server and not gpu and not long" $(ROOM:%=tests/%)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

# The site, into build/site; any warning fails. Its environment has neither torch nor the package: it reads their source.
DOCS := $(VENV)-docs
$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	  | $(DOCS)/bin/python -m pip install --quiet -c constraints.txt -r /dev/stdin
	@touch $@

docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

docs-serve: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve

# All tests of faults, the long ones too, and the page of what they counted; in about an hour.
LEDGER := $(CURDIR)/.cache/reliability
FAULTS := tests/checkpoint/faults tests/training/running/test_elastic.py tests/training/running/test_preemption.py
reliability: $(INSTALLED)
	@rm -rf $(LEDGER) && mkdir -p $(LEDGER)
	@RELIABILITY_LEDGER=$(LEDGER) $(BIN)/python -m pytest $(FAULTS) -m "long or not long" -n 2 --dist worksteal; \
	status=$$?; $(BIN)/python tests/checkpoint/faults/report.py $(LEDGER) docs/reliability.md "make reliability" && exit $$status

# Every version is pinned: an open range of torch may take several GB of another build.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("lightning-shard needs Python 3.11 or newer; this is %d.%d. Choose another one with: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,recipes,hf]'
	@touch $@
