# Everything a developer or CI runs. `make demo` and `make test` work on a fresh clone with Python 3.11+.
PYTHON ?= python3
BIN := .venv/bin

# Else each process that a test starts would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: checked demo demo-deploy docs results reproduced test test-system test-slow evidence-fedalt evidence-fedslr evidence-quped evidence-fedbcd evidence-deploy lint types unit format package install install-dev clean

demo: install
	$(BIN)/personafl compare recipes/demo.toml

# A server and three devices on this machine, as processes, with certificates of their own.
demo-deploy: install-deploy
	$(BIN)/python benchmarks/demo_deploy.py

test: lint types unit

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install-dev
	$(BIN)/mypy

unit: install-dev
	$(BIN)/pytest -n 2 --dist loadfile --durations 15

# Real processes on loopback, kills at every write, Ray, a SuperLink, the site and a browser, and tests that take long: 50 minutes on two cores.
# Ray's tests have a process to themselves: threads that were started in their network of its own stay in it.
RAY := tests/simulate/test_ray.py
test-system: install-dev
	$(BIN)/pytest -m system -n 2 --dist loadfile --timeout 900 --durations 15 --ignore $(RAY)
	$(BIN)/pytest -m system --timeout 900 $(RAY)

test-slow: install-dev
	$(BIN)/pytest -m slow --timeout 0

# The tables of docs/evidence.md on FedAlt and FedSim; long, CIFAR-10 wants a GPU. DATA has the data sets.
DATA ?= ../shared/data
evidence-fedalt: install
	$(BIN)/personafl compare recipes/fedalt-mnist.toml --dataset $(DATA)/mnist/mnist.npz
	$(BIN)/personafl compare recipes/fedalt-cifar10.toml --dataset $(DATA)/cifar10/cifar10_20k4k.npz
	$(BIN)/personafl compare recipes/fedalt-shakespeare.toml --dataset $(DATA)/shakespeare/shakespeare_roles.npz
	$(BIN)/personafl compare recipes/fedalt-speech.toml --dataset $(DATA)/fsdd/fsdd_logmel.npz

# The tables of docs/evidence.md on FedSLR and its baselines; wants a GPU. OUT keeps the runs, which Table 9 is measured on.
OUT ?= runs/evidence-fedslr
C10 := --dataset $(DATA)/cifar10/cifar10_20k4k.npz
C100 := --dataset $(DATA)/cifar100/cifar100_5k1k.npz
IID := --partition iid:clients=100 --seeds 0
LAMBDAS := lambda-0,lambda-1e-5,lambda-5e-5,lambda-1e-4,lambda-5e-4,lambda-1e-3
OTHERS := mu-1e-4,mu-5e-4,mu-5e-3,mu-1e-2,alone-1e-3,alone-1e-4,alone-1e-5,gpgd,lpgd,sparse+sparse,low+low,sparse+low,start-w0
evidence-fedslr: install
	$(BIN)/personafl compare recipes/fedslr.toml $(C10) --out $(OUT)/cifar10
	$(BIN)/personafl compare recipes/fedslr.toml $(C100) --out $(OUT)/cifar100
	$(BIN)/personafl compare recipes/fedslr.toml $(C10) $(IID) --out $(OUT)/cifar10-iid
	$(BIN)/personafl compare recipes/fedslr.toml $(C100) $(IID) --out $(OUT)/cifar100-iid
	$(BIN)/personafl compare recipes/fedslr.toml $(C100) --methods $(LAMBDAS) --seeds 0 --out $(OUT)/lambda
	$(BIN)/personafl compare recipes/fedslr.toml $(C100) --methods $(OTHERS) --seeds 0 --out $(OUT)/others
	$(BIN)/python benchmarks/low_rank_inference.py $(OUT)/lambda/lambda-*
	$(BIN)/python benchmarks/server_memory.py
	$(BIN)/python benchmarks/nuclear_prox.py
	$(BIN)/personafl compare recipes/uplink.toml --dataset $(DATA)/mnist/mnist.npz --out $(OUT)/uplink

# The tables of docs/evidence.md on QuPeD and its baselines, and the picture; wants a GPU. QUPED keeps the runs.
QUPED ?= runs/evidence-quped
MNIST := --dataset $(DATA)/mnist/mnist.npz
WRITERS := $(MNIST) --partition users:merge=3,clients=66
SAMPLED := --methods fedavg,quped,quped-2bit,quped-1bit,pfedme,perfedavg,fml \
	federation.cohort=0.2 rounds=100 compare.options.quped.freeze_after=80
ALONE := alone-C1+C2,alone-C1_2bit+C2,alone-C1_2bit+C1,alone-C1_2bit+C2_2bit
TOGETHER := quped-C1+C2,quped-C1_2bit+C2,quped-C1_2bit+C1,quped-C1_2bit+C2_2bit
evidence-quped: install-dev
	$(BIN)/personafl compare recipes/quped.toml $(MNIST) --out $(QUPED)/mnist4
	$(BIN)/personafl compare recipes/quped.toml $(MNIST) data.partition.per_client=3 --out $(QUPED)/mnist3
	$(BIN)/personafl compare recipes/quped.toml $(WRITERS) --out $(QUPED)/writers
	$(BIN)/personafl compare recipes/quped.toml $(C10) data.test=0.2 --out $(QUPED)/cifar10
	$(BIN)/personafl compare recipes/quped.toml $(C10) data.test=0.2 data.partition.per_client=3 --out $(QUPED)/cifar10-3
	$(BIN)/personafl compare recipes/quped.toml $(MNIST) $(SAMPLED) --out $(QUPED)/sampled
	$(BIN)/personafl compare recipes/quped.toml $(WRITERS) --methods $(ALONE),$(TOGETHER) --out $(QUPED)/devices
	$(BIN)/personafl compare recipes/quped.toml $(WRITERS) --methods fixed-2bit,fixed-1bit --out $(QUPED)/fixed
	$(BIN)/personafl compare recipes/quped.toml $(C10) data.test=0.2 --methods fixed-2bit,fixed-1bit --out $(QUPED)/cifar10-fixed
	$(BIN)/personafl compare recipes/quped-agnews.toml --dataset $(DATA)/agnews/agnews.npz --out $(QUPED)/agnews
	$(BIN)/personafl compare recipes/quped-central.toml --out $(QUPED)/central
	$(BIN)/personafl compare recipes/quped.toml $(MNIST) --methods quped-3bit,quped-4bit,quped-8bit --out $(QUPED)/bits
	$(BIN)/python benchmarks/quped_curve.py $(QUPED)/mnist4 $(QUPED)/bits --out $(QUPED)/curve.svg
	$(BIN)/python benchmarks/device_inference.py $(QUPED)/mnist4/quped-2bit-seed0 --client 7

# The tables and pictures of docs/evidence.md on FedBCD and the cloud. MNIST takes hours on a CPU and minutes on a GPU
# (DEVICE=cuda); CIFAR-10 wants a GPU.
DEVICE ?= cpu
FEDBCD := compare recipes/fedbcd.toml engine.device=$(DEVICE) --dataset $(DATA)
SIX := cloud.active=6 compare.variants.fedbcdi.federation.offline=2
RESNET := "model={name='resnet20'}" data.partition.samples=100 cloud.active=5 compare.variants.fedbcdi.federation.offline=3
ASYNC := --methods sync,async-3,async-5,async-7,fedprox evaluation.every=4
CURVES := $(BIN)/python benchmarks/learning_curves.py runs/evidence-fedbcd
evidence-fedbcd: install
	$(BIN)/personafl $(FEDBCD)/mnist/mnist.npz --out runs/evidence-fedbcd/a
	$(BIN)/personafl $(FEDBCD)/mnist/mnist.npz --out runs/evidence-fedbcd/b data.partition.labels=6
	$(BIN)/personafl $(FEDBCD)/mnist/mnist.npz --out runs/evidence-fedbcd/c $(SIX)
	$(BIN)/personafl $(FEDBCD)/cifar10/cifar10_20k4k.npz --out runs/evidence-fedbcd/d $(RESNET) --seeds 0 rounds=400 evaluation.every=25
	$(BIN)/personafl $(FEDBCD)/mnist/mnist.npz --out runs/evidence-fedbcd/time-3 $(ASYNC)
	$(BIN)/personafl $(FEDBCD)/mnist/mnist.npz --out runs/evidence-fedbcd/time-6 $(ASYNC) data.partition.labels=6
	$(CURVES)/a --out docs/fedbcd-personal.svg --title "MNIST, 3 labels a device: personal models"
	$(CURVES)/time-3 --time --out docs/fedbcd-time.svg --title "FedBCD-I against time: personal models"
	$(BIN)/personafl latency
	$(BIN)/personafl compare recipes/buffered.toml --out runs/evidence-fedbcd/buffered

# The figures of docs/reliability.md: real processes on loopback, on a CPU.
EVIDENCE := $(BIN)/python tests/deploy/processes.py
evidence-deploy: install-deploy
	$(EVIDENCE) equal
	$(EVIDENCE) kills 120
	$(EVIDENCE) failpoints
	$(EVIDENCE) malformed 10000
	$(EVIDENCE) canary
	$(EVIDENCE) dropouts
	$(EVIDENCE) load 200
	for part in equal kills random failpoints down delays; do $(BIN)/python tests/deploy/clouds.py $$part || exit 1; done
	$(BIN)/python tests/deploy/attacks.py
	for part in damage kills full; do $(BIN)/python tests/deploy/faults.py $$part || exit 1; done

# The documentation as a site, in site/: open site/index.html, its search works from disk too. Warnings are errors; nothing is loaded from elsewhere.
docs: install-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# docs/results.md, from the runs that the evidence targets made: make results > docs/results.md; and the pictures of the runs that are kept.
VERDICTS := quped/table8-4:mnist4 quped/table8-3:mnist3 quped/table3-mnist:sampled quped/table2-femnist:writers quped/table4-femnist:devices \
	quped/table7:writers,fixed fedbcd/figure3a:a fedbcd/figure3b:b fedbcd/figure3c:c fedbcd/figure4ab:time-3 fedbcd/figure4cd:time-6
results: install
	@cat docs/_build/results.head docs/_build/at-size.head
	@folder=$$(mktemp -d) && for archive in benchmarks/results/*.tar.xz; do \
		name=$$(basename $$archive .tar.xz); tar -xJf $$archive -C $$folder; \
		$(BIN)/personafl reproduce $$(echo $$name | sed 's|-|/|') --from $$folder/$$name --markdown | \
		sed "s|$$folder|runs/at-size|; s|^\(## .*\)|\1, at the paper's size|; /^Differences are paired/d" | cat -s; cat docs/_build/$$name.tail; echo; \
		for against in size time; do $(BIN)/python benchmarks/quped_curve.py $$folder/$$name --table $$(echo $$name | sed 's|-|/|') \
			--against $$against --out docs/$$name-$$against.svg >&2 || exit 1; done; \
	done; rm -r $$folder
	@for verdict in $(VERDICTS); do \
		preset=$${verdict%%:*}; runs=--from\ runs/evidence-$${preset%%/*}/; \
		$(BIN)/personafl reproduce $$preset $$(echo ,$${verdict#*:} | sed "s|,| $$runs|g") --markdown || exit 1; \
	done | grep -v "^Differences are paired" | cat -s

# docs/reproduced.md, from runs of `personafl reproduce`: make reproduced RUNS="runs/a runs/b" > docs/reproduced.md
reproduced: install
	@cat docs/_build/reproduced.head
	@$(BIN)/personafl reproduce $(RUNS:%=--from %) --markdown

# docs/reproduce.md with its table of settings made anew: make checked > page.md && mv page.md docs/reproduce.md
checked: install
	@sed '/^<!-- checked -->$$/q' docs/reproduce.md
	@folder=$$(mktemp -d) && $(BIN)/python $(DATA)/unpack.py cifar10 $$folder/cifar10.npz && \
	$(BIN)/personafl reproduce --check --size paper --dataset-dir $(DATA) --dataset cifar10=$$folder/cifar10.npz --markdown && rm -r $$folder

# What would be published, in dist/; tests/test_package.py has more checks, and CI runs it with make test-system.
package: install-dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: .venv/installed
install-deploy: .venv/installed-deploy
install-dev: .venv/installed-dev

# torch is pinned in constraints.txt: an unpinned install may pull gigabytes of CUDA libraries.
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/installed-deploy: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[deploy]'
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv site .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
