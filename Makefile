# Two commands: `make run` (the main job, embedded) and `make test` (everything, a real Slurm too).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := .venv-torch
TRL := .venv-trl
DOCS := .venv-docs
DIST := .venv-dist
FUZZ := .venv-fuzz
PEERS := .venv-peers
FUZZ_S ?= 60
TORCH_TESTS := $(wildcard tests/services/test_*.py tests/client/test_services_client.py \
  tests/demo/test_demo_mixed.py tests/hooks/test_reference*.py)
TRL_TESTS := tests/hooks/test_trl_run.py tests/slurm/test_slurm_trl.py

# The tests start thousands of Python processes. Where this variable forbids to keep bytecode each of
# them compiles the package anew: a broker's imports take 1.6 s of CPU then, and 0.5 s without it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install python run test test-long test-sites hostile chaos chaos-long swarm chatter planted trl fuzz test-gpu gpu-all golden golden-update lint docs dist coverage bench bench-peers clean system system-long

install: $(STAMP)

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "tangram: error: $(PYTHON) is older than 3.10; set PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { [ "$$(id -u)" = 0 ] && \
	  command -v apt-get >/dev/null && apt-get update -q && \
	  apt-get install -q -y --no-install-recommends python3-venv; } || \
	  { echo "tangram: error: $(PYTHON) has no ensurepip; install python3-venv" >&2; exit 2; }

# Without --no-compile pip compiles 6,000 files, of which a few hundred are ever imported: 15 s of CPU.
$(STAMP): pyproject.toml setup.py tangram_hpc/sandbox/process/_fast_path.c | python
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-compile --upgrade pip
	$(BIN)/pip install -q --no-compile -e '.[dev]'
	@touch $@

# The extra `torch` is large and only the long tests need it: it has a venv of its own.
$(TORCH)/.installed: $(STAMP)
	$(PYTHON) -m venv $(TORCH)
	$(TORCH)/bin/pip install -q --upgrade pip
	$(TORCH)/bin/pip install -q -e '.[dev,torch]'
	@touch $@

# The extra `trl` needs Python 3.11 and brings other versions of torch's companions: a third venv.
$(TRL)/.installed: $(STAMP)
	$(PYTHON) -m venv $(TRL)
	$(TRL)/bin/pip install -q --upgrade pip
	$(TRL)/bin/pip install -q -e '.[dev,trl]'
	@touch $@

run: install
	$(BIN)/tangram demo

# What only root can install on Debian: Slurm, munge and MariaDB for the real-Slurm tests, what its
# plugin is built with, and programs for the sandboxes, each as PROGRAM:PACKAGE.
PROGRAMS := bwrap:bubblewrap newuidmap:uidmap fuse-overlayfs:fuse-overlayfs \
  slirp4netns:slirp4netns
LONG_PROGRAMS := debootstrap:debootstrap qemu-aarch64-static:qemu-user-static buildah:buildah \
  podman:podman nft:nftables zsh:zsh psql:postgresql mariadbd:mariadb-server \
  chromium:chromium chromedriver:chromium-driver \
  prometheus:prometheus prometheus-node-exporter:prometheus-node-exporter
MISSING = for each in $(1); do \
  command -v "$${each%:*}" >/dev/null || missing="$$missing $${each\#*:}"; done
INSTALL = [ -z "$$missing" ] || apt-get install -q -y --no-install-recommends $$missing
system:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  slurm/devcluster/devcluster install && missing="" && $(call MISSING,$(PROGRAMS)) && \
	  { /usr/bin/python3 -c 'import ensurepip' 2>/dev/null || missing="$$missing python3-venv"; } \
	  && { $(INSTALL); }; \
	else echo "tangram: not root on Debian: the real-Slurm tests will be skipped" >&2; fi

# What only the long tests use. Without it they are skipped with the reason.
system-long: system
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  missing=""; $(call MISSING,$(LONG_PROGRAMS)); $(INSTALL); fi

# Tests that judge times run alone on the machine. The Slurm tests mostly wait, so all other tests run
# beside them, in three workers that take a file at a time, since many of these tests wait too. mypy
# uses one core only, so it runs beside them too.
PART := $(BIN)/python -m pytest --durations=10 -m
WORKERS := -n 3 --dist loadfile
# in the order of their names, as pytest collects a folder
SLURM_FILES := $(sort $(shell grep -rl 'mark\.slurm' tests --include='test_*.py'))
test: install system
	$(BIN)/ruff check .
	$(PART) "not long and alone"
	@$(BIN)/mypy > .mypy.log 2>&1 & mypy=$$!; \
	  $(PART) "not long and not slurm and not alone" $(WORKERS) > .beside.log 2>&1 & beside=$$!; \
	  $(PART) "not long and slurm" $(SLURM_FILES); slurm=$$?; \
	  wait $$mypy; mypy=$$?; wait $$beside; beside=$$?; cat .beside.log .mypy.log; \
	  rm -f .beside.log .mypy.log; exit $$((slurm | beside | mypy))

test-long: install system-long lint $(TORCH)/.installed trl
	$(BIN)/python -m pytest -m "long" $(TORCH_TESTS:%=--ignore=%) $(TRL_TESTS:%=--ignore=%)
	$(TORCH)/bin/python -m pytest -m "long" $(TORCH_TESTS)

# Broker, workers and gateway are killed and stopped again and again under load; nothing may be lost
# or repeated. CHAOS='--keep FOLDER' keeps the job's files.
chaos: install
	$(BIN)/python bench/bench_restarts.py --seconds 180 --gap 6 --pause 2 10 $(CHAOS)

chaos-long: install
	$(BIN)/python bench/bench_restarts.py --seconds 3600 --gap 33 --pause 10 60 --clients 4 \
	  --threads 5 --grace 120 $(CHAOS)

# Seeds of a whole job in one process, each with many kinds of faults together, under checkers of
# every law (tests/swarm); and bugs that are planted one by one, which the same checkers must find.
SEEDS ?= 0:10000
swarm: install
	cd tests && ../$(BIN)/python -m swarm --seeds $(SEEDS) --jobs 2

# A broker among clients and workers that say anything, under each placer; the first failure of each
# kind is told. SEEDS=0:50 takes about five minutes.
chatter: install
	cd tests && ../$(BIN)/python -m chatter $(SEEDS)

planted: install
	cd tests && ../$(BIN)/python -m planted --jobs 2

# An ordinary job on clusters in which each two settings that sites have meet once (tests/sites). It
# prints the table that slurm/README.md has.
test-sites: install system-long
	$(BIN)/python -m pytest -m "slurm and long" tests/slurm/test_sites.py

# Every attack that the tests have, by attacker and asset (tests/hostile): as this user, and if that
# is root, as a user without privileges too. HOSTILE='--long --slurm' adds more of them.
hostile: install
	cd tests && ../$(BIN)/python -m hostile $(HOSTILE)
	@[ "$$(id -u)" != 0 ] || { cd tests && ../$(BIN)/python -m hostile --as-user $(HOSTILE); }

# A few steps of the training run with TRL (docs/TRAINING_RUN.md), in its own venv.
trl: $(TRL)/.installed
	$(TRL)/bin/python -m pytest -m "long" $(TRL_TESTS)

# Each fuzz target for FUZZ_S seconds, guided by coverage; TARGETS=folder: those with this name. The
# fuzzer is large and has wheels for few versions of Python: it has a venv of its own.
$(FUZZ)/.installed: $(STAMP)
	$(PYTHON) -m venv $(FUZZ)
	$(FUZZ)/bin/pip install -q --upgrade pip
	$(FUZZ)/bin/pip install -q -e '.[dev,fuzz]'
	@touch $@

fuzz: $(FUZZ)/.installed
	$(FUZZ)/bin/python tests/fuzz/run.py --seconds $(FUZZ_S) $(TARGETS)

# What needs an NVIDIA GPU, in a venv of its own that uses a torch which is there already. Without
# a GPU torch is not fetched: all is skipped, and the reason printed. GPU_PYTHON=python3 takes an
# interpreter as it is, where nothing can be fetched.
GPU_VENV := .venv-gpu
GPU_PYTHON ?= $(GPU_VENV)/bin/python
GPU_EXTRAS := $(shell [ -e /dev/nvidiactl ] || [ -e /dev/dxg ] || command -v nvidia-smi \
  >/dev/null && echo dev,gpu,torch || echo dev,gpu)

$(GPU_VENV)/.$(GPU_EXTRAS): pyproject.toml setup.py | python
	$(PYTHON) -m venv --system-site-packages $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install -q -e '.[$(GPU_EXTRAS)]'
	@touch $@

test-gpu: $(if $(filter $(GPU_VENV)/%,$(GPU_PYTHON)),$(GPU_VENV)/.$(GPU_EXTRAS))
	$(GPU_PYTHON) -m pytest -m gpu

# The tests of `test-gpu` and the GPU benches, in at most ten minutes, without a network. GPU_ALL='--cpu --tiny' runs them on
# slots of CPU, as the long tests do.
gpu-all: $(if $(filter $(GPU_VENV)/%,$(GPU_PYTHON)),$(GPU_VENV)/.$(GPU_EXTRAS))
	$(GPU_PYTHON) bench/gpu_all.py $(GPU_ALL)

# What users, files and other processes meet is what it was: docs/GOLDEN.md. `make golden-update
# CLASS=listed` writes the listings; CLASS=frozen needs FROZEN=rewrite as well.
golden: install
	cd tests && ../$(BIN)/python -m golden check

golden-update: install
	cd tests && ../$(BIN)/python -m golden update $(CLASS:%=--class %) \
	  $(if $(filter rewrite,$(FROZEN)),--rewrite-frozen)

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site is in build/docs/index.html; a warning is an error. Only the packages of the extra `docs`
# are fetched, once.
$(DOCS)/.installed: pyproject.toml | python
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install -q --upgrade pip
	$(DOCS)/bin/pip install -q -e '.[docs]'
	@touch $@

docs: $(DOCS)/.installed
	rm -rf build/docs
	$(DOCS)/bin/sphinx-build -E -W --keep-going -q -b html -c docs/site . build/docs
	$(DOCS)/bin/python docs/man_page.py build/man
	@echo "docs: open build/docs/index.html; man -l build/man/tangram.1"

# All files of a release, checked, in OUT (docs/RELEASING.md). Its tools have exact versions, so that two
# builds give the same bytes.
OUT ?= dist
$(DIST)/.installed: release/requirements.txt | python
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/pip install -q -r release/requirements.txt
	@touch $@

dist: $(DIST)/.installed
	$(DIST)/bin/python release/dist.py --out $(OUT)

# Which lines no test reached, processes that the tests started included; TESTS=tests/broker: of some.
coverage: install
	$(BIN)/coverage erase
	PYTHONPATH=$(CURDIR)/tests/coverage $(BIN)/coverage run -m pytest -m "not long and not slurm" $(TESTS); status=$$?; \
	  $(BIN)/coverage combine -q && $(BIN)/coverage report; rm -f .coverage.*; exit $$status

bench: install
	@for b in bench/bench_*.py; do $(BIN)/python $$b || exit 1; done

# Ours beside Ray, Dask, Parsl, HyperQueue and others, about 15 minutes (docs/BENCHMARKS.md). The peers
# have a venv of their own; root on Debian also installs GNU parallel, and Slurm for srun.
# BENCH_PEERS='--rounds 5 --seed 1' are arguments of run.py.
$(PEERS)/.installed: pyproject.toml setup.py | python
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install -q --no-compile --upgrade pip
	$(PEERS)/bin/pip install -q --no-compile -e '.[peers]'
	@touch $@

bench-peers: $(PEERS)/.installed system
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  missing=""; $(call MISSING,parallel:parallel); $(INSTALL); fi
	@mkdir -p build
	$(PEERS)/bin/python bench/peers/run.py $(BENCH_PEERS) > build/peers.new
	@mv build/peers.new build/peers.json; cat build/peers.json

# tangram_hpc/backends: a checkout from before the regrouping (0053) may hold a built library there.
clean:
	rm -rf $(VENV) $(TORCH) $(TRL) $(DOCS) $(DIST) $(FUZZ) $(PEERS) $(GPU_VENV) .fuzz .vm .beside.log .mypy.log tangram_hpc/sandbox/process/*.so tangram_hpc/backends build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
