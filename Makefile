# `make demo` and `make test` need python3 (3.11 to 3.13), git, make and g++, and do all their own set-up.
#   make demo [STACKS=torch2.11] [PROFILE=podman]    the whole pipeline on the embedded model, on a CPU
#   make laboratory                 the same for every option, every failure and every other engine of the published work
#   make grpo                       GRPO on every rollout backend, at the demo's size; results/grpo_demo/results.md
#   make images [RUNTIME=podman] [VARIANT=cpu] [BASE=IMAGE]    build, test and record the container images
#   make test                       all tests, in the driver environment and in every stack
#   make stack STACK=torch2.11      install one stack;  make setup: the driver environment and all stacks
SHELL := /bin/bash
PYTHON ?= python3
STACKS ?=
PROFILE ?= native
unexport PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE := 1
export UV_SYSTEM_CERTS := 1
SETUP := $(PYTHON) workflow/scripts/setup.py
COMPILE := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes
# The kernel drops this lock when its last holder ends, so that nothing needs unlocking after a kill.
ALONE := flock .cache/run.lock

.DEFAULT_GOAL := help
.PHONY: help demo laboratory grpo images test driver setup stack lock schema lint format plan clean distclean

help:
	@sed -n 's/^#   //p' Makefile

demo laboratory grpo:
ifeq ($(PROFILE),native)
	@$(SETUP) $(if $(STACKS),"$(STACKS)",--all)
else
	@test -d "profiles/$(PROFILE)" || { echo "no profile '$(PROFILE)'; known: $$(ls profiles | xargs)" >&2; exit 2; }
	@$(MAKE) --no-print-directory images RUNTIME=$(filter apptainer podman docker,$(PROFILE))
endif
	@flock --nonblock .cache/run.lock true || echo "[$@] another run of this tree has not ended; waiting for it"
	@$(ALONE) .venv/bin/snakemake --workflow-profile profiles/$(PROFILE) --nolock --cores all \
	  --configfile workflow/presets/$@.yaml $(if $(STACKS),--config "stacks=$(STACKS)")
	@echo "[$@] done: results/$$(sed -n 's/^run: //p' workflow/presets/$@.yaml)/results.md"

images: driver
	@.venv/bin/flexroll images $(if $(RUNTIME),--runtime "$(RUNTIME)") $(if $(VARIANT),--variant "$(VARIANT)") \
	  $(if $(BASE),--base "$(BASE)")

test:
	@$(SETUP) --all
	@status=0; \
	echo "[test] driver environment"; .venv/bin/python -m pytest -q || status=1; \
	echo "[test] torch2.11, and beside it torch2.9.1, whose output follows"; \
	.stacks/torch2.9.1/bin/python -m pytest -q -m "not slow" > .cache/test-torch2.9.1.log 2>&1 & other=$$!; \
	.stacks/torch2.11/bin/python -m pytest -q || status=1; \
	wait $$other || status=1; \
	echo "[test] torch2.9.1"; cat .cache/test-torch2.9.1.log; \
	exit $$status

driver:
	@$(SETUP)

setup:
	@$(SETUP) --all

stack:
	@$(if $(STACK),,echo "name one: make stack STACK=torch2.11" >&2; exit 2)
	@$(SETUP) "$(STACK)"

lock: export PATH := $(CURDIR)/.venv/bin:$(PATH)
lock: driver
	$(COMPILE) requirements.in -o requirements.lock
	sed -n '/^uv==/,/^ *# via/p' requirements.lock > containers/uv.txt
	cd containers/report && $(COMPILE) any.in -o any.lock
	@set -e; for file in containers/*/requirements.in; do folder=$$(dirname $$file)/; for kind in cpu cuda; do \
	  echo "$$folder$$kind.lock"; \
	  (cd $$folder && $(COMPILE) $$kind.in $$(test ! -f $$kind.overrides || echo --override $$kind.overrides) -o $$kind.lock); \
	done; done

schema: driver
	.venv/bin/python -m flexroll.schema.export > workflow/config.schema.json

lint: driver
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/snakefmt --check Snakefile workflow
	.venv/bin/snakemake --lint

format: driver
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/snakefmt Snakefile workflow

plan: driver
	@.venv/bin/flexroll plan --config config.yaml

clean:
	rm -rf work .cache .snakemake .pytest_cache .ruff_cache .hypothesis

distclean: clean
	rm -rf .venv .stacks .images
