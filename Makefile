PYTHON ?= python3
BIN := .venv/bin

.PHONY: venv train test slow

venv: .venv/ready

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

train: venv
	$(BIN)/python train.py

test: venv
	$(BIN)/python -m pytest

slow: venv
	$(BIN)/python -m pytest -m slow
