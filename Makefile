# make train: the default job. make test: linter and tests. make setup: the environment only. All work on a fresh clone.
PYTHON ?= python3
OUT ?= runs/$(shell date +%Y%m%d-%H%M%S)
ARGS ?=

.PHONY: setup train test bench
setup: .venv/.ready

.venv/.ready: setup.sh requirements.txt requirements-cpu.txt
	sh setup.sh "$(PYTHON)"

train: setup
	.venv/bin/python train.py --out $(OUT) $(ARGS)

test: setup
	.venv/bin/ruff check .
	.venv/bin/python -m pytest tests $(ARGS)

bench: setup
	.venv/bin/python -m lab.bench $(ARGS)
