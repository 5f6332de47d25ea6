# make demo, make test and make book need Python 3.11 to 3.13 and nothing else: each makes .venv if it has to.
# `make help` lists the rest.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Nothing is installed whose hash is not in requirements/, whatever index it comes from. Only zero_ref and its course are built.
PIP        := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PIP_LOCKED := $(PIP) --require-hashes --no-deps --only-binary :all: --requirement

SHELL       := bash
MAKEFLAGS   += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help install lock demo notebook test thorough lint types imports unit ranks notebooks book browser pages-in-browser links loc address offline pdf bench gpu clean
# Hundreds of processes import the package. Where a variable keeps Python from writing bytecode, each compiles it anew.
export PYTHONDONTWRITEBYTECODE :=
# Notebooks and tests may start the environment's own programs, such as torchrun.
export PATH := $(abspath $(BIN)):$(PATH)

# $(call step,name,commands): the commands, up to the first that fails, between a heading and a line that says how it went.
# `set -e` stands here because macOS has make 3.81, which knows no .SHELLFLAGS.
define step
@set -euo pipefail; began=$$SECONDS; printf '\n\033[1m==> %s\033[0m\n' '$(1)'; \
ended() { if [ $$1 = 0 ]; then printf -- '--- %s: passed in %d s\n' '$(1)' $$((SECONDS - began)); \
else printf '\n--- %s: FAILED after %d s. Mend it, then try this part alone: make %s\n' '$(1)' $$((SECONDS - began)) '$@' >&2; fi; }; \
trap 'ended $$?' EXIT; $(2)
endef

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## .venv with the pinned requirements, this package and its course

# torch comes in a step of its own, the only one that looks at TORCH_INDEX_URL, and without what its builds ask for:
# that is in locked.txt, and for PyPI's build for Linux also in cuda.txt. A torch of this version that is there stays.
# It is downloaded by version, so that where pip is told of a CPU build that is taken, and then installed by hash.
$(STAMP): $(addprefix requirements/,locked.txt torch.txt cuda.txt) pyproject.toml zero_ref_course/pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else f"zero_ref needs Python 3.11 to 3.13, and $(PYTHON) is {v[0]}.{v[1]}: run make PYTHON=python3.13")'
	$(call step,install into $(VENV),\
	    test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
	    $(PIP_LOCKED) requirements/locked.txt; \
	    if ! $(PIP_LOCKED) requirements/torch.txt --no-index 2>/dev/null; then \
	        $(PIP:install=download) --no-deps --only-binary :all: $(addprefix --index-url ,$(TORCH_INDEX_URL)) \
	            --dest $(VENV)/wheels $$(sed -n '/^torch==/p' requirements.txt); \
	        $(PIP_LOCKED) requirements/torch.txt --no-index --find-links $(VENV)/wheels; \
	        rm -r $(VENV)/wheels; \
	    fi; \
	    if { $(BIN)/python -m pip check || true; } | grep '^torch .* not installed' > /dev/null; then \
	        $(PIP_LOCKED) requirements/cuda.txt; \
	    fi; \
	    $(PIP) --no-deps --no-build-isolation --editable . --editable ./zero_ref_course; \
	    touch $(STAMP))

lock:  ## write requirements/*.txt from requirements.txt; UPGRADE=1 for new versions of what it leaves open
	@$(PYTHON) requirements/lock.py

demo: $(STAMP)  ## train the same model under DDP, every stage of ZeRO, and local SGD; pictures in demo-out/
	@$(BIN)/zero-ref demo $(DEMO_ARGS)

FOLDER := notebooks
notebook: $(STAMP)  ## open the chapters in JupyterLab, installed into .venv the first time; FOLDER=week-2 opens those of a class
	@$(BIN)/python -c 'import jupyterlab, jupyterlab_myst' 2>/dev/null || $(PIP_LOCKED) requirements/notebook.txt
	@$(BIN)/jupyter lab "$(FOLDER)"

test: $(STAMP)  ## what each change has to pass: all parts from lint to browser; what failed stands in the table at the end
	@$(BIN)/python tests/parts.py '$(MAKE)'

# The browser's are left out where no Chromium starts, as by `make browser`. nbgrader grades a class in one of them.
thorough: $(STAMP)  ## what `make test` leaves out: further cases, random ones, other libraries' trainers; for once a day
	@$(BIN)/python -c 'import nbgrader' 2>/dev/null || $(PIP_LOCKED) requirements/nbgrader.txt
	$(call step,thorough tests,$(BIN)/python -m pytest -q -m 'thorough and not browser' -n 3 --dist loadfile --durations=40)
	@test -f _build/html/index.html || $(MAKE) book
	@$(MAKE) browser PAGES_TESTED=thorough

lint: $(STAMP)  ## format, style, spelling, notebooks without outputs, numbers that nothing asserts
	$(call step,lint,\
	    $(BIN)/ruff format --check --quiet . || { echo 'To format: $(BIN)/ruff format .'; exit 1; }; \
	    $(BIN)/ruff check --quiet .; \
	    $(BIN)/codespell; \
	    $(BIN)/nbstripout --keep-id --verify notebooks/*.ipynb; \
	    $(BIN)/python book/address.py --check; \
	    $(BIN)/python book/unasserted.py)

types: $(STAMP)  ## mypy, strict
	$(call step,types,$(BIN)/mypy)

imports: $(STAMP)  ## who may import whom; the plan and the simulator without any third-party package
	$(call step,imports,\
	    $(BIN)/lint-imports --no-logo; \
	    $(BIN)/python -S -c "$$STANDARD_LIBRARY_ONLY")

unit: $(STAMP)  ## tests that start no processes, and the examples in docstrings
	$(call step,unit tests and doctests,$(BIN)/python -m pytest -q -m 'not ranks and not browser and not thorough' -n 2 --dist worksteal --durations=40)

# Three files at a time: much of the time is waiting, for processes to start and for time-outs to pass. Other files need not be read.
ranks: $(STAMP)  ## tests on real ranks
	$(call step,tests on real ranks,\
	    $(BIN)/python -m pytest -q -m 'ranks and not thorough' -n 3 --dist loadfile --durations=5 \
	        $$(grep -rl --include='test_*.py' 'mark\.ranks' tests))

notebooks: $(STAMP)  ## run every notebook from top to bottom
	$(call step,notebooks,\
	    $(BIN)/python -m pytest -q --nbval-lax --nbval-current-env --nbval-cell-timeout=600 --nbval-kernel-startup-timeout=600 -n 2 --dist loadfile notebooks)

book: $(STAMP)  ## write the book to _build/html; a warning is an error
	$(call step,book,\
	    rm -rf _build; \
	    $(BIN)/python book/vendor.py; \
	    $(BIN)/python tests/surroundings.py $(BIN)/python book/execute.py; \
	    $(BIN)/python tests/surroundings.py $(BIN)/jupyter-book build . -W -n --keep-going --all --quiet; \
	    $(BIN)/python book/check_pages.py _build/html)

# Where no Chromium starts this says so and goes on; where NEEDS_BROWSER is set that is an error.
browser: $(STAMP)  ## read every page of the built book in Chromium: offline, accessible, on a phone
	@if $(BIN)/python tests/browser/ready.py; then $(MAKE) pages-in-browser; else test -z "$$NEEDS_BROWSER"; fi

PAGES_TESTED := not thorough
pages-in-browser:
	$(call step,browser,$(BIN)/python -m pytest -q -m 'browser and $(PAGES_TESTED)' -n 2 --durations=10 tests/browser)

# Nothing is run again: it is put together from the pages.
offline: $(STAMP)  ## the whole book as one file, _build/zero_ref-book.html, from what `make book` wrote
	$(call step,offline edition,\
	    $(BIN)/python book/offline_edition.py _build/html _build/zero_ref-book.html; \
	    $(BIN)/python book/check_pages.py _build/zero_ref-book.html)

pdf: offline  ## the same as a PDF with numbered pages, _build/zero_ref-book.pdf; needs Chromium
	$(call step,pdf,$(BIN)/python book/print_book.py _build/zero_ref-book.html _build/zero_ref-book.pdf)

# The links are in the text, so no notebook is run. Other sites come and go, so this is no part of `make test`.
links: $(STAMP)  ## look up every link of the book to another site
	$(call step,links,\
	    mkdir -p _build/links; \
	    sed 's/execute_notebooks: .*/execute_notebooks: "off"/' _config.yml > _build/links/config.yml; \
	    PYTHONPATH=book:book/_ext $(BIN)/jupyter-book build . --config _build/links/config.yml --path-output _build/links --builder linkcheck --all --quiet)

loc: $(STAMP)  ## the core against its targets: functions that a call passes, lines, branches, comments
	@$(BIN)/python -m benchmarks.seams

# Half an hour, with nothing else running. Reports of one commit are put together; what was measured apart from them goes.
bench: $(STAMP)  ## measure what the page "How fast is it?" shows; into benchmarks/results/
	$(call step,benchmarks,\
	    measure="$(BIN)/python -m benchmarks"; parts=$$(mktemp -d); \
	    $$measure step sync construction memory iteration --rounds 9 --json $$parts/two.json; \
	    $$measure checkpoint --rounds 5 --json $$parts/checkpoint.json; \
	    $$measure step sync construction iteration --ranks 4 --rounds 5 --json $$parts/four.json; \
	    $$measure --json benchmarks/results/benchmarks.json \
	        --from $$parts/two.json --from $$parts/checkpoint.json --from $$parts/four.json; \
	    rm -rf $$parts benchmarks/results/sharded.json benchmarks/results/step.json)

# Up to ten minutes. Without a GPU it says what it would measure, writes nothing, and fails: its exit code is 1.
gpu: $(STAMP)  ## memory and times on this machine's GPUs; into benchmarks/results/gpu.json
	@$(BIN)/python -m benchmarks gpu --json benchmarks/results/gpu.json

address: $(STAMP)  ## write the repository's address, as pyproject.toml has it, to the files that name it
	@$(BIN)/python book/address.py

clean:  ## remove what was built; .venv stays
	rm -rf _build demo-out .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# -S leaves site-packages out, so an import of anything but the standard library fails.
define STANDARD_LIBRARY_ONLY
import importlib, pkgutil, sys
names = ["zero_ref.plan", "zero_ref.local_sgd.averaging", "zero_ref.simulator", "zero_ref.live"]
for name in names:
    module = importlib.import_module(name)
    names += [m.name for m in pkgutil.iter_modules(getattr(module, "__path__", []), name + ".")]
print("standard library only:", *names)
endef
export STANDARD_LIBRARY_ONLY
