# A fresh clone needs only python3 (3.11 or later) and make: each target makes the .venv that it needs.
# Another Python, such as PYTHON=python3.13, has an environment of its own, such as .venv-3.13.
PYTHON ?= python3
ifeq ($(PYTHON),python3)
  VENV := .venv
else
  VENV := .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
endif
ifeq ($(OS),Windows_NT)
  BIN := $(VENV)/Scripts
else
  BIN := $(VENV)/bin
endif

# The library is compiled from these if there is a C compiler ($CC, else cc).
NATIVE := hatch_build.py gpt_cli/ops/constants.inc $(wildcard gpt_cli/ops/native/*.[ch])
# Print one line on standard error.
COMPUTED_BY = @$(BIN)/python -c 'from gpt_cli.ops import get_ops; ops = get_ops("cpu", "float32"); \
  print("computed by", "native " + ops.level if ops.name == "native" else "NumPy: see `gpt-cli doctor`")' >&2

.PHONY: demo test faults soak soak-serve round-trips fuzz mutants test-gpu test-browser test-notebook test-ray test-s3 test-eval test-serve sanitize test-arm test-windows check format bench pictures man site check-release test-oldest test-fresh wheel wheels clean help

demo: $(VENV)/.demo  ## stream a story from the bundled model
	$(COMPUTED_BY)
	$(BIN)/gpt-cli generate --model tiny --echo --max-tokens 500 "Once upon a time"

# Threads of several processes on two cores would wait for one another. Three are fastest, since many tests wait.
# With worksteal, a process gets whole modules, and makes their fixtures, such as servers, for all of their tests.
# Of other plugins, and of packages that bring one, pytest would compile every module again in each process.
# Where files of bytecode are switched off, each process would compile every module with its assertions, each time.
test: export OPENBLAS_NUM_THREADS = 1
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.dev  ## run the tests: no network, no GPU, no PyTorch
	$(COMPUTED_BY)
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal --disable-plugin-autoload -p xdist -p hypothesispytest

# pip takes the constraints from the variable. NumPy 2.0 has no wheels for Python 3.13.
test-oldest: export PIP_CONSTRAINT = $(CURDIR)/build/oldest.txt
test-oldest: build/oldest.txt  ## the tests with the oldest base dependencies that pyproject.toml allows (Python 3.11 or 3.12)
	$(MAKE) test VENV=.venv-oldest

build/oldest.txt: pyproject.toml
	mkdir -p build
	$(PYTHON) -c 'import re, sys, tomllib; project = tomllib.load(sys.stdin.buffer)["project"]; \
	  print(*(re.sub(">=([^,]*).*", r"==\1", bound) for bound in project["dependencies"]), sep="\n")' < $< > $@

faults: $(VENV)/.dev  ## every fault, with a table of the results, all other slow tests, and each property with 200 examples
	$(BIN)/python -m pytest tests/faults tests -m "(fault or slow or hypothesis) and not gpu" --hypothesis-profile thorough --numprocesses 2 --table tests/faults/RESULTS.md

MINUTES ?= 30
soak: $(VENV)/.dev  ## mixed commands in one process: memory, files and threads must stay flat
	$(BIN)/python tests/faults/soak.py $(MINUTES) --save tests/faults/SOAK.md

REQUESTS ?= 10000
soak-serve: $(VENV)/.dev  ## mixed requests to one server: the answers must be the engine's, and memory, files and threads flat
	$(BIN)/python tests/faults/serve_soak.py $(REQUESTS) --save tests/faults/SOAK_SERVE.md

MEGABYTES ?= 300
round-trips: $(VENV)/.dev  ## compress and decompress MEGABYTES of random and hostile files
	$(BIN)/python tests/faults/round_trips.py $(MEGABYTES) --save tests/faults/ROUND_TRIPS.md

test-gpu: $(VENV)/.dev  ## the tests that need an NVIDIA GPU, and nothing else; install the extra cuda12 or cuda13 first
	$(BIN)/python -m pytest -m gpu

test-browser: $(VENV)/.browser  ## the pages of `gpt-cli show --html` and `gpt-cli serve` in Chromium or Google Chrome
	$(BIN)/python -m pytest tests/display tests/serve/test_page.py -m browser

test-notebook: $(VENV)/.browser $(VENV)/.notebook  ## docs/notebook.md as a notebook, and its pictures in Chromium or Google Chrome
	$(BIN)/python -m pytest tests/test_notebook.py tests/display/test_results.py -m "browser or not browser"

# Ray's clusters would send a report of their use to its makers.
test-ray: export RAY_USAGE_STATS_ENABLED = 0
test-ray: $(VENV)/.ray  ## --engine ray and gpt_cli.ray on clusters of nodes on this machine, and the lines of docs/cluster.md
	$(BIN)/python -m pytest tests/test_ray.py tests/test_ray_serve.py tests/test_docs.py -k "ray or cluster"

test-s3: $(VENV)/.s3  ## files at s3://, from a server on this machine
	$(BIN)/python -m pytest tests/jobs/test_s3.py

test-eval: $(VENV)/.eval  ## lm-evaluation-harness with the model gpt-cli, and the lines of docs/evaluate.md
	$(BIN)/python -m pytest tests/test_lm_eval.py tests/test_docs.py -k "lm_eval or evaluate"

test-serve: $(VENV)/.clients  ## `gpt-cli serve` with the clients openai, llm, curl and lm-evaluation-harness, and the lines of docs/serve.md
	$(BIN)/python -m pytest tests/serve/test_clients.py tests/test_docs.py -k "test_clients or serve.md"

sanitize: $(VENV)/.dev  ## the C code under the sanitizers of GCC (Linux)
	$(BIN)/python -m tools.sanitize

test-arm: $(VENV)/.dev  ## the package in an arm64 Python under qemu: the bits of this machine (Debian)
	$(BIN)/python -m tools.test_arm

test-windows: $(VENV)/.wheels  ## the library for Windows under Wine, and for musl: the results of each operation are those of this machine (Debian)
	$(BIN)/python -m tools.test_systems

test-fresh:  ## the last commit and its wheel on fresh systems of the present and the next Debian (as root, on Debian)
	$(PYTHON) -m tools.test_fresh $(QUICK)

check: $(VENV)/.dev  ## formatting, lint, types, and the direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev  ## format the code, and apply lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev  ## speed and memory on a model of 124M parameters with random weights
	$(BIN)/python benchmarks/run.py

LOOKS := Once upon a time, there was a clever girl named Emma. Emma looked up at the
SHOW := GPT_CLI_OPS=numpy $(BIN)/gpt-cli show
pictures: $(VENV)/.dev  ## the pictures in docs/
	$(SHOW) attention -m tiny --layer 1 --head 0 --force --png docs/pictures/attention.png "$(LOOKS) moon."
	$(SHOW) attention -m tiny --force --png docs/pictures/heads.png "$(LOOKS) moon."
	$(BIN)/python tools/record.py

man: $(VENV)/.dev  ## the man pages in docs/man, from --help
	$(BIN)/python -m tools.man_pages

site: export NO_MKDOCS_2_WARNING = 1
site: $(VENV)/.site  ## the site, in build/site; every link, anchor and reference is checked
	$(BIN)/python -m mkdocs build --strict

SECONDS ?= 60
fuzz: export PYTHONPATH = tests
fuzz: $(VENV)/.fuzz  ## SECONDS of damaged files and odd texts, two processes at a time; exit code 1 after a finding
	$(BIN)/python tests/fuzz/run.py $(SECONDS)

mutants: export OPENBLAS_NUM_THREADS = 1
mutants: $(VENV)/.mutants  ## break each detail of MODULE, or of all in tools/mutant_tests.py, and list what no test notices
	$(BIN)/python -m tools.mutants $(MODULE)

# The wheel computes in a clean environment with an empty PATH, outside of this folder.
CLEAN := build/wheel
CLEAN_BIN := $(subst $(VENV),$(CLEAN),$(BIN))
wheel: $(VENV)/.demo  ## the wheel for this platform, in dist/
	rm -rf dist/*.whl $(CLEAN)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv $(CLEAN)
	$(CLEAN_BIN)/python -m pip install --quiet dist/*.whl
	cd / && PATH= GPT_CLI_OPS=native "$(CURDIR)/$(CLEAN_BIN)/gpt-cli" generate --model tiny -n 20 "Once upon a time" && echo
	ls -l dist/*.whl

wheels: $(VENV)/.wheels  ## the wheels of a release for all systems, in dist/
	rm -rf dist/*.whl
	$(BIN)/python -m tools.wheels dist
	$(BIN)/check-wheel-contents dist/*.whl

# pyroma would like an address and a home page, which the project does not have yet. The SBOM is about what `make wheel`
# has installed, without the installer. It can be attested only with its serial number, which --output-reproducible omits.
check-release: wheel $(VENV)/.release  ## the files of a release, in dist/: what is in them, equal bytes from two builds, the workflows
	rm -f dist/*.tar.gz
	$(BIN)/python -m build --sdist .
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(BIN)/pyroma --min 10 --skip-tests AuthorEmail,Url dist/*.tar.gz
	$(CLEAN_BIN)/python -m pip uninstall --quiet --yes setuptools pip
	sed "s/^dynamic = .*/version = \"$$($(BIN)/hatchling version)\"/" pyproject.toml > build/pyproject.toml
	$(BIN)/cyclonedx-py environment --pyproject build/pyproject.toml --output-file build/sbom.cdx.json $(CLEAN)
	grep -q '"serialNumber"' build/sbom.cdx.json
	$(BIN)/python tools/release_notes.py > build/notes.md
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline .github
	$(BIN)/hadolint Dockerfile
	$(BIN)/python -m pytest tests/test_build.py -m slow

clean:  ## remove the environments and the compiled library
	rm -rf .venv .venv-3.* .venv-oldest $(CLEAN) gpt_cli/ops/native/libkernels.* gpt_cli/ops/native/kernels.dll

help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*  ## /\1: /p' Makefile

$(VENV)/.demo: pyproject.toml $(NATIVE)
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

# Not after each change of the C code: `.demo` compiles it.
$(VENV)/.dev: pyproject.toml | $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

$(VENV)/.browser: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --editable ".[browser]"
	touch $@

$(VENV)/.notebook: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --editable ".[notebook]"
	touch $@

$(VENV)/.site: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --editable ".[site]"
	touch $@

$(VENV)/.fuzz: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --editable ".[fuzz]"
	touch $@

$(VENV)/.mutants: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --editable ".[mutants]"
	touch $@

$(VENV)/.release: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --editable ".[release]"
	touch $@

$(VENV)/.wheels: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --editable ".[wheels]"
	touch $@

$(VENV)/.s3: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --editable ".[s3]"
	touch $@

$(VENV)/.eval: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --editable ".[eval]"
	touch $@

$(VENV)/.clients: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --editable ".[clients]"
	touch $@

$(VENV)/.ray: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --editable ".[ray,ray-serve]"
	touch $@
