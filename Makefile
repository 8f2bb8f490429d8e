# One target per habit; `make` or `make help` lists them. Everything is installed into .venv, nothing outside this folder is touched.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run train install wheel docs test test-all check bench slow-test console-test release-test stack-test hostile-test audit sbom lock pin-images

# HOST is not taken from the environment, where other tools keep other things under this name.
PYTHON ?=
PORT ?= 8000
HOST := 127.0.0.1
EXTRA ?= cpu
TORCH_INDEX ?=

ifeq ($(filter $(EXTRA),cpu gpu),)
$(error EXTRA: got '$(EXTRA)', expected cpu or gpu)
endif
OTHER_EXTRA := $(if $(filter $(EXTRA),cpu),gpu,cpu)

VENV_PYTHON := .venv/bin/python
# Hundreds of processes import the same modules: each would compile them anew, torch's for three seconds.
unexport PYTHONDONTWRITEBYTECODE
# Three sets of packages, each with the ones before it: `make run` needs no torch, `make train` no linters.
SERVICE := .venv/installed-$(EXTRA)-service
TRAINING := .venv/installed-$(EXTRA)-training
INSTALLED := .venv/installed-$(EXTRA)-dev
CONFIG := training/configs/debian-depends.toml
SAMPLE := models/debian-depends
LATEST = $(shell ls $(SAMPLE) 2>/dev/null | grep -xE '[1-9][0-9]*' | sort -n | tail -n 1)
NEXT = $(SAMPLE)/$(shell echo $$(( $(or $(LATEST),0) + 1 )))
COMMA := ,
SPACE := $(subst ,, )
# One process a core, at most four, since each imports torch; and one thread of torch in each. The tests of a file share what it trains.
# A process that crashes is not replaced: with loadfile, the tests that it left would be waited for without end.
PARALLEL := -n $(shell nproc) --maxprocesses 4 --dist loadfile --max-worker-restart 0
TORCH := $(shell sed -n 's/^torch==/&/p' constraints.txt)

# About a minute of a core for each package, once for each state of what it compiles; afterwards a second. Where no folder can keep it, the
# service and the trainer compile in memory.
COMPILE := $(VENV_PYTHON) -m espalier.compile --write
PIP := $(VENV_PYTHON) -m pip --disable-pip-version-check install
# What is installed has a hash in requirements.lock. torch has none, since its index can be chosen.
HASHED = $(PIP) --require-hashes -c requirements.lock -r
define INSTALL_TORCH
@echo 'Installing $(TORCH)$(if $(TORCH_INDEX), from $(TORCH_INDEX))'
@$(PIP) --no-deps$(if $(TORCH_INDEX), --index-url '$(TORCH_INDEX)') $(TORCH) | $(PROGRESS)
@$(VENV_PYTHON) docker/requirements.py --of torch > .venv/of-torch.txt
@$(HASHED) .venv/of-torch.txt | $(PROGRESS)
endef
# pip says nothing for minutes, or a line for everything; this keeps the lines that tell how far it is.
PROGRESS := awk '/Downloading .*[MG]B\)/ { print " " $$0; fflush() } /^Installing collected/ { print "  unpacking"; fflush() }'

help:
	@echo 'make run         install the service and serve the models in models/; the trained sample is one'
	@echo 'make train       install the trainer and train the next version of the sample'
	@echo 'make install     install everything, for all commands of README and docs'
	@echo 'make test        install, then all checks and the fast tests'
	@echo 'make test-all    install, then the other tests: processes, long trainings, interpreters, images'
	@echo 'make wheel       build dist/espalier-VERSION-py3-none-any.whl, for other environments'
	@echo 'make docs        install, build the documentation as a site, and show it on port 8001'
	@echo 'make check       install, then the checks alone: ruff, mypy, import rules, and those of audit'
	@echo 'make hostile-test  install, then attack a running service: heads, bodies, readers, connections, disks, signals'
	@echo 'make slow-test  install, then the tests of processes; with test and console-test it is what CI runs'
	@echo 'make release-test  install, then what a release needs besides: benchmarks, interpreted kernels, Ray, trainings of the docs'
	@echo 'make console-test  install, then drive the console in Chromium, where one is installed'
	@echo 'make stack-test  install, then build the images and bring docker-compose.yml up with them'
	@echo 'make bench       install, then the quick benchmarks; figures go to build/benchmarks/'
	@echo 'make audit       install, then name images without a digest and, where it can be asked, known vulnerabilities'
	@echo 'make sbom        install, then write what is installed to sbom.cdx.json (CycloneDX)'
	@echo 'make lock        make requirements.lock anew after a change of constraints.txt; needs an index of packages'
	@echo 'make pin-images  write the digests of images into the files that name them; needs their registries'
	@echo 'make help        this list'
	@echo
	@echo 'Variables, as in `make run PORT=9000`:'
	@echo '  PORT=$(PORT)          port to serve on'
	@echo '  HOST=$(HOST)     address to serve on'
	@echo '  PYTHON=$(PYTHON)             Python 3.11 or newer that .venv is made with; empty: the newest found'
	@echo '  EXTRA=$(EXTRA)           cpu or gpu: which ONNX Runtime to install'
	@echo '  TORCH_INDEX=$(TORCH_INDEX)        wheel index to install torch from; empty: PyPI, whose Linux wheel brings CUDA along'

# It looks for new versions, so that what `make train` writes in another terminal is served at once.
run: $(SERVICE)
	-@$(COMPILE)
	ESPALIER_POLL_S=$${ESPALIER_POLL_S-10} $(VENV_PYTHON) -m service --host $(HOST) --port $(PORT)

# A run that was stopped has left no version, so that the same command goes on with it.
train: $(TRAINING)
	-@$(COMPILE)
	$(VENV_PYTHON) -m training fit --config $(CONFIG) --out $(NEXT) --resume
	@echo 'A service that `make run` has started serves $(NEXT) within ten seconds, another one from its next start.'
	@echo 'Its recall and latency, and those of the version before:'
	@echo '  $(VENV_PYTHON) -m training evaluate --model $(NEXT)'$(if $(LATEST),; echo '  $(VENV_PYTHON) -m training evaluate --model $(SAMPLE)/$(LATEST)')

install: $(INSTALLED)
	@$(COMPILE)

test: check
	OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest $(PARALLEL)

# One after the other: beside the slow tests, waits of the console's tests ran out on a busy machine. What cannot run here is skipped and
# named in the summary.
test-all: $(INSTALLED)
	@$(MAKE) --no-print-directory slow-test
	@$(MAKE) --no-print-directory console-test
	@$(MAKE) --no-print-directory release-test
	$(VENV_PYTHON) -m pytest -m stack -v

slow-test: $(INSTALLED)
	@$(COMPILE)
	OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest $(PARALLEL) -m 'slow and not console and not release and not stack and not hostile'

release-test: $(INSTALLED)
	@$(COMPILE)
	OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest $(PARALLEL) -m release

# Types take a core for a minute or two, in which the other one compiles.
check: $(INSTALLED)
	$(VENV_PYTHON) -m ruff check
	$(VENV_PYTHON) -m ruff format --check
	@$(COMPILE) & compiling=$$!; echo $(VENV_PYTHON) -m mypy; $(VENV_PYTHON) -m mypy; wait $$compiling
	.venv/bin/lint-imports
	$(VENV_PYTHON) docker/pin_images.py
	$(VENV_PYTHON) docker/audit.py constraints.txt

audit: $(INSTALLED)
	$(VENV_PYTHON) docker/pin_images.py
	$(VENV_PYTHON) docker/audit.py constraints.txt

sbom: $(INSTALLED)
	$(VENV_PYTHON) docker/sbom.py espalier > sbom.cdx.json

# The versions are those of constraints.txt, the hashes those of all files that the index has of them, for every platform and Python.
wheel: $(SERVICE)
	$(VENV_PYTHON) -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir dist . ./deploy/client

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) docs/build.py --out build/site
	$(VENV_PYTHON) -m http.server --bind 127.0.0.1 --directory build/site 8001

lock: $(INSTALLED)
	sed -n '/^uv==/,/[^\\]$$/p' requirements.lock > .venv/uv.txt
	$(HASHED) .venv/uv.txt
	grep -vE '^(#|torch==)' constraints.txt \
	  | .venv/bin/uv pip compile --no-deps --universal --python-version 3.11 --generate-hashes --no-annotate --upgrade --quiet \
	    --custom-compile-command 'make lock' --output-file requirements.lock -

pin-images: $(INSTALLED)
	$(VENV_PYTHON) docker/pin_images.py --write

console-test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest tests/console -m console

stack-test: $(INSTALLED)
	$(VENV_PYTHON) -m pytest -m stack -v

# Not in test-all: it judges memory and sockets under load, and fails now and then where other programs want the cores.
hostile-test: $(INSTALLED)
	$(VENV_PYTHON) -m pytest -m hostile -v

bench: $(INSTALLED)
	mkdir -p build/benchmarks
	$(VENV_PYTHON) -m benchmarks.engine_cpu --json build/benchmarks/engine_cpu.json
	$(VENV_PYTHON) -m benchmarks.service_overhead --json build/benchmarks/service_overhead.json

$(SERVICE): PARTS := service
$(TRAINING): PARTS := service training
$(INSTALLED): PARTS := service training dev
# Of its 20,000 modules few are ever imported: Python compiles those when they are. All of them would take half of the installation.
$(INSTALLED): PIP += --no-compile
# The engines on a GPU need torch too.
$(TRAINING) $(INSTALLED) .venv/installed-gpu-service: NEEDS_TORCH := yes

# The two ONNX Runtime packages break each other in one environment, so a change of EXTRA starts from an empty one.
$(SERVICE) $(TRAINING) $(INSTALLED): pyproject.toml constraints.txt requirements.lock
	@if compgen -G '.venv/installed-$(OTHER_EXTRA)*' >/dev/null || ! $(VENV_PYTHON) -m pip --version >/dev/null 2>&1; then \
	  for python in $(or $(PYTHON),python3.13 python3.12 python3.11 python3); do \
	    if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$${found:-}" ]; then \
	    echo 'No Python 3.11 or newer with the venv module: tried $(or $(PYTHON),python3.13 python3.12 python3.11 python3).' >&2; \
	    echo 'Install one (on Debian and Ubuntu with its python3-venv package), or name it: make PYTHON=/path/to/python3.12 ...' >&2; \
	    exit 1; \
	  fi; \
	  echo "Making .venv with $$("$$found" --version)"; \
	  "$$found" -m venv --clear .venv; \
	fi
	@echo 'Installing espalier for $(PARTS) into .venv (some minutes on a slow line)'
	@sed -nE '/^(pip|setuptools)==/,/[^\\]$$/p' requirements.lock > .venv/installers.txt
	@$(PIP) --require-hashes -r .venv/installers.txt | $(PROGRESS)
	@$(VENV_PYTHON) docker/requirements.py $(EXTRA) $(PARTS)$(if $(NEEDS_TORCH), --without torch) > .venv/requirements.txt
	@$(HASHED) .venv/requirements.txt | $(PROGRESS)
	$(if $(NEEDS_TORCH),$(INSTALL_TORCH))
	@# Without an index, so that whatever should still be missing ends the installation instead of coming without a hash.
	@$(PIP) --quiet --quiet --no-index --no-build-isolation -e '.[$(subst $(SPACE),$(COMMA),$(EXTRA) $(PARTS))]' -c constraints.txt | $(PROGRESS)
	@touch $(PARTS:%=.venv/installed-$(EXTRA)-%)
