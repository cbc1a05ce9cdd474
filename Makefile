# The targets are what CI runs. Each sets up what it needs and is silent about it when there is nothing to do.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
PY := .venv/bin/python

# Debian packages the tests use, besides a Python with venv.
#   git             `exec` on a repository; the list of files that test_forbidden.py reads
#   gcc, libc6-dev  attacks that need machine code: other ABIs, static programs; a language that is compiled
#   g++             the same for C++
#   nodejs          sessions of JavaScript
#   mmdebstrap      builds images; the tests build a small one once, into .cache
#   uidmap          newuidmap: builds images as an ordinary user
#   zstd            unpacks layers of images that are compressed with it
#   e2fsprogs       mkfs.ext4, for workspaces on disk
#   patch           the judge of our diffs
#   docker.io       the container backend; the tests start a daemon of their own, in a temporary folder
#   podman, crun    the same through Podman
#   runsc           the gVisor backend
#   busybox-static, musl-tools   images without Python or glibc
SYSTEM_PACKAGES := git gcc g++ libc6-dev nodejs mmdebstrap uidmap zstd e2fsprogs patch docker.io podman crun runsc busybox-static musl-tools
# bubblewrap is a peer in the benchmarks.
BENCH_PACKAGES := bubblewrap tinyproxy

# qemu starts the machines with cgroup v2; without them `make proof` says so.
PROOF_PACKAGES := qemu-system-x86

.PHONY: help setup system demo test proof lint format typecheck pytest everywhere attack bench lock clean

help:
	@echo 'make demo       set up .venv and show the main job'
	@echo 'make test       set up all that tests need; lint, types, tests'
	@echo 'make proof      that, and what a change seldom breaks: whole attack matrices, soak, virtual machines'
	@echo 'make everywhere the behaviour tests on every backend; make test has the conformance table on each'
	@echo 'make format     rewrite the code in the house format'
	@echo 'make attack     the escape attempts, as a user runs them'
	@echo 'make bench      the table of docs/performance.md, measured here'
	@echo 'make lock       choose dependencies anew (needs uv)'
	@echo 'make clean      remove what these made, .venv too'

setup:
	@scripts/setup dev

system:
	@scripts/system $(SYSTEM_PACKAGES)

demo:
	@scripts/setup build
	@$(PY) examples/demo.py

# Parts side by side, types among them. ARGS, such as ARGS='tests/policy -k narrow', run in one process of pytest.
test: system setup lint
	@$(if $(ARGS),$(PY) -m mypy --no-error-summary && $(PY) -m pytest -q $(ARGS),$(PY) tests/suite.py)

# Started again on the same code, it goes on where it stopped.
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

# No index or other address goes into a lock file: hashes say what, the installer's configuration says from where.
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
