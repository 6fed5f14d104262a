# Everything runs in .venv, which is made from requirements.txt on first use.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: demo fit ways notebooks test matrix sanitize check format bench docs lock clean

demo: $(READY)  ## the main job: resample a brain, check and time it
	$(RUN) examples/resample_brain.py

fit: $(READY)  ## recover a volume and its sampling positions by gradient descent
	$(RUN) examples/fit_volume.py

ways: $(READY)  ## build the operators in three ways, compare bits and times
	$(RUN) examples/three_ways/compare.py

notebooks: $(READY)  ## run examples/*.ipynb on the CPU and keep their outputs in them
	$(RUN) -m loader bench notebooks

# A test that hangs ends it all, by faulthandler_timeout; a worker made anew would begin it again.
test: $(READY)  ## on all cores, the longest first; one worker more, as some tests wait
	OMP_WAIT_POLICY=passive $(RUN) -m pytest -q -n $$(($$(nproc) + 1)) --maxprocesses 8 \
	    --dist loadscope --no-loadscope-reorder --max-worker-restart 0

VERSIONS ?= 2.10 2.11 2.13 2.15 newest
matrix: $(READY)  ## the suite on the CPU under each of VERSIONS of torch; FAST=1 what a new one may break
	$(RUN) tests/matrix.py $(if $(FAST),--fast) $(VERSIONS)

sanitize: $(READY)  ## the operators' C++ under the address and undefined-behaviour sanitizers
	$(RUN) -m pytest -q tests/test_sanitizers.py

check: $(READY)  ## formatting, lint, the borders of the rooms, type hints; nothing is changed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(shell git ls-files '*.cpp' '*.cu' '*.h' '*.cuh')
	$(VENV)/bin/lint-imports --no-logo --no-cache
	$(RUN) -m pytest -q tests/test_rooms.py
	$(RUN) -m mypy

format: $(READY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .
	$(VENV)/bin/clang-format -i $(shell git ls-files '*.cpp' '*.cu' '*.h' '*.cuh')

bench: $(READY)
	$(RUN) -m loader bench interpolation

docs: $(READY)  ## the site, in site/: search, formulas and pictures without a network
	rm -rf site
	$(RUN) docs/made.py
	$(RUN) -m sphinx -E -W --keep-going -n -q -b html docs site
	$(RUN) docs/check_site.py site

lock:  ## needs uv
	uv pip compile --universal --python-version 3.10 --group dev --no-emit-index-url --no-header \
	    --no-annotate -q -o requirements.txt
	sed -i '1i # Made by `make lock` from pyproject.toml, for every Python from 3.10 on. Do not edit.' requirements.txt

$(READY): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, \
	    $(PYTHON) is %d.%d; set PYTHON=python3.12, say" % sys.version_info[:2])'
	@$(PYTHON) -m venv $(VENV) || { echo 'Python has no venv module; Debian, Ubuntu: apt install python3-venv'; exit 1; }
	@echo 'Installing the packages of requirements.txt into $(VENV), once (some 5 GB with torch)'
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.txt
	@touch $@

clean:  ## the build cache; .venv stays
	rm -rf site tmp_build/store tmp_build/work examples/three_ways/build examples/cpp/build
