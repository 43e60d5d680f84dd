# `make sweep` and `make test` do all the set-up. ARGS goes to the command: make sweep ARGS="sweeps=granularity shape=7b"
# PYTHON names the interpreter for a new .venv; otherwise the first suitable one on the PATH is taken.
SHELL := /bin/sh
VENV := .venv
PY := $(VENV)/bin/python
TRITON36 := $(VENV)/triton36
JOBS ?= $(shell jobs=$$(nproc 2>/dev/null || echo 2); [ "$$jobs" -lt 8 ] && echo "$$jobs" || echo 8)
SUITABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))

.PHONY: sweep test install clean

sweep: $(VENV)/.installed
	$(PY) -m sonic.sweep $(ARGS)

# One thread per test process: the processes already fill the cores.
test: $(VENV)/.installed $(TRITON36)/.installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	OMP_NUM_THREADS=1 SONIC_TRITON36="$(CURDIR)/$(TRITON36)" $(PY) -m pytest -n $(JOBS) $(ARGS)

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install -c constraints.txt -e ".[dev]"
	@touch $@

# An interpreter may be found and still not start (pyenv's shims), so each is tried.
$(PY):
	@found="$(PYTHON)"; IFS=:; \
	for name in python3.12 python3.11 python3 python; do \
	  for folder in $$PATH; do \
	    [ -z "$$found" ] && "$$folder/$$name" -c "$(SUITABLE)" >/dev/null 2>&1 && found="$$folder/$$name"; \
	  done; \
	done; \
	if ! "$$found" -c "$(SUITABLE)" >/dev/null 2>&1; then \
	  echo "error: $${found:-no python on the PATH} is not Python 3.11 or 3.12 with venv; name one: make PYTHON=/path/to/python3.12" >&2; \
	  exit 1; \
	fi; \
	echo "$$found -m venv $(VENV)"; "$$found" -m venv $(VENV)

# The triton that the committed H200 rows were made with, beside the constrained one; its interpreter needs numpy < 2.4.
$(TRITON36)/.installed: $(VENV)/.installed Makefile
	rm -rf $(TRITON36)
	$(PY) -m pip install --no-deps --target $(TRITON36) triton==3.6.0 numpy==2.3.5
	@touch $@

clean:
	rm -rf $(VENV)
