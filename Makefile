# The targets are what CI runs. Each installs what it needs, and prints nothing about it when all is installed.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
PY := .venv/bin/python

# Debian packages the tests use, besides a Python with venv.
#   git             `exec` on a repository; the list of files that test_forbidden.py reads
#   gcc, libc6-dev  attacks that need machine code (other ABIs, static programs); running C
#   g++             running C++
#   nodejs          sessions of JavaScript
#   mmdebstrap      builds images; the tests build a small one once, into .cache
#   uidmap          newuidmap: builds images as an ordinary user
#   zstd            unpacks layers of images that are compressed with it
#   e2fsprogs       mkfs.ext4, for workspaces on disk
#   patch           applies the diffs of snapshots, to check them
#   docker.io       the container backend; the tests start a daemon of their own, in a temporary folder
#   podman, crun    the container backend through Podman
#   runsc           the gVisor backend
#   busybox-static, musl-tools   images without Python or glibc
SYSTEM_PACKAGES := git gcc g++ libc6-dev nodejs mmdebstrap uidmap zstd e2fsprogs patch docker.io podman crun runsc busybox-static musl-tools
# The benchmarks compare Ringfence with bubblewrap and tinyproxy.
BENCH_PACKAGES := bubblewrap tinyproxy

# qemu starts the virtual machines with cgroup v2; without it `make proof` reports that they did not run.
PROOF_PACKAGES := qemu-system-x86

.PHONY: help setup system demo test proof lint format typecheck pytest everywhere attack bench lock clean

help:
	@echo 'make demo       set up .venv, run code of an agent and four hostile snippets'
	@echo 'make test       set up everything that tests need; run lint, types and tests'
	@echo 'make proof      the same, and slow tests: whole attack matrices, soak, virtual machines'
	@echo 'make everywhere run the behaviour tests on every backend; make test runs the conformance table on each'
	@echo 'make format     rewrite the code in the house format'
	@echo 'make attack     run the escape attempts, as a user does'
	@echo 'make bench      measure the table of docs/performance.md here'
	@echo 'make lock       choose new versions of dependencies (needs uv)'
	@echo 'make clean      remove everything that these targets made, .venv too'

setup:
	@scripts/setup dev

system:
	@scripts/system $(SYSTEM_PACKAGES)

demo:
	@scripts/setup build
	@$(PY) examples/demo.py

# Runs parts of the suite, and the type checker, side by side. With ARGS='tests/policy -k narrow': one pytest process.
test: system setup lint
	@$(if $(ARGS),$(PY) -m mypy --no-error-summary && $(PY) -m pytest -q $(ARGS),$(PY) tests/suite.py)

# If it was stopped, the next run on the same code continues there.
proof: system setup lint
	@scripts/system $(PROOF_PACKAGES)
	@$(PY) tests/suite.py --proof

lint: setup
	@$(PY) -m ruff check --quiet --output-format concise .
	@$(PY) -m ruff format --check --quiet . || { echo 'not in the house format: make format'; exit 1; }

format: setup
	@$(PY) -m ruff check --quiet --fix-only .
	@$(PY) -m ruff format --quiet .

typecheck: setup
	@$(PY) -m mypy --no-error-summary

pytest: setup
	@$(if $(ARGS),$(PY) -m pytest -q $(ARGS),$(PY) tests/suite.py)

everywhere: system setup
	@$(PY) -m pytest -q tests/behaviour --backend process --backend container --backend podman --backend gvisor $(ARGS)

attack:
	@scripts/setup build
	@$(PY) -m ringfence attack $(ARGS)

bench:
	@scripts/system $(BENCH_PACKAGES)
	@scripts/setup dev
	@scripts/setup bench
	@scripts/setup mitmproxy
	@scripts/setup llm-sandbox
	@$(PY) -m benchmarks $(ARGS)

# A lock file holds no address: hashes say what is installed, the installer's configuration says from where.
lock:
	@cd requirements && for name in build dev bench; do \
	    uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	        --no-emit-index-url --no-emit-find-links $$name.in --output-file $$name.txt || exit 1; \
	done
	@cd requirements && echo mitmproxy | uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-header --no-emit-index-url --no-emit-find-links - --output-file mitmproxy.txt
	@cd requirements && echo 'llm-sandbox[docker]' | uv pip compile --quiet --universal --python-version 3.11 \
	    --generate-hashes --no-header --no-emit-index-url --no-emit-find-links - --output-file llm-sandbox.txt

clean:
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
