# Everything here does its own set-up and says so. Needed beforehand: Go and make; a C compiler for the race detector;
# Node with npm for buf (lint, generate), the TypeScript end-to-end tests and the conformance suite. The Python client and
# the end-to-end tests need Debian packages, which are installed if this runs as root.
#
# Tools are pinned in modules of their own under .ci/tools, so that who imports `client` or `mcpserver` never sees them.
# They are built into .bin/ and built again only when their go.mod, go.sum or package-lock.json changes.

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BIN    := .bin
GO     ?= go
# Where `make run` listens, and where its embedded etcd keeps its files.
LISTEN   ?= 127.0.0.1:8080
DATA_DIR ?= ./data
# More flags for the program that `make run` or `make demo` starts.
ARGS     ?=
# quick is the comparison in less than five minutes, scale is very many of everything instead, "scale quick" is less of it; more
# flags with BENCH_FLAGS, see .bin/bench --help.
BENCH       ?=
BENCH_FLAGS ?=
# Where the results of the comparison go.
BENCH_OUT   ?= bench-results
# The benchmarks of single paths to run, as a regular expression, and more flags, which for a profile
# must be of one package: make microbench PACKAGES=./sessiond RUN=Cycle RUN_FLAGS='-benchtime=5s -cpuprofile=cpu.out'.
RUN       ?= .
RUN_FLAGS ?=
PACKAGES  ?= ./...

# The race detector needs cgo. Without a C compiler the tests still run, and say what they miss.
RACE = $(shell [ "$$($(GO) env CGO_ENABLED)" = 1 ] && command -v "$$($(GO) env CC | cut -d' ' -f1)" >/dev/null && echo -race)
# The end-to-end tests start real programs, so they have a target of their own.
UNIT_PACKAGES = $$($(GO) list ./... | grep -v '/sessiond/e2e\(/\|$$\)\|/client/languages$$')
# The interpreter that has grpcio. Debian's packages belong to Debian's Python, whatever else the PATH has.
PYTHON ?= /usr/bin/python3

##@ Use

help: ## List the targets.
	@awk 'BEGIN {FS = ":.*## "} /^##@ / {printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

run: $(BIN)/mcpserver ## Start an MCP front-end with sessiond inside (LISTEN, DATA_DIR, ARGS).
	@echo "MCP at http://$(LISTEN)/mcp, data in $(DATA_DIR); Ctrl-C stops it"
	@exec $(BIN)/mcpserver --listen $(LISTEN) --data-dir $(DATA_DIR) $(ARGS)

demo: $(BIN)/etcd $(BIN)/sessiond $(BIN)/mcpserver $(BIN)/demo ## Show it: etcd, sessiond and front-ends on loopback (ARGS).
	@exec $(BIN)/demo --etcd $(BIN)/etcd --sessiond $(BIN)/sessiond --mcpserver $(BIN)/mcpserver $(ARGS)

##@ Build and test

build: $(BIN)/sessiond $(BIN)/mcpserver ## Compile all packages, and both programs into .bin/.
	@$(GO) build ./...
	@cd sessiond/bench && $(GO) build -o /dev/null ./...

test: ## Run all tests but the end-to-end ones, with the race detector.
	@echo "test: fetching modules that are missing and compiling; the first time takes minutes, then Go's cache has it"
	@[ -n "$(RACE)" ] || echo "test: no C compiler found, so WITHOUT the race detector (on Debian: apt-get install gcc libc6-dev)"
	@# One package at a time: two etcds that sync at once on a small machine time each other out.
	@$(GO) test $(RACE) -p 1 $(UNIT_PACKAGES)
	@# A module of its own, for what it compares us with is nothing that importers of ours should see.
	@cd sessiond/bench && $(GO) test $(RACE) ./...

# The tests install the npm packages that they need. E2E_COUNT=1000 in the environment repeats what must never fail that often.
e2e: $(BIN)/etcd $(BIN)/sessiond $(BIN)/mcpserver $(BIN)/demo client-typescript client-python proxies ## Run the end-to-end tests: real programs on loopback.
	@[ -n "$(RACE)" ] || echo "e2e: no C compiler found, so WITHOUT the race detector"
	@E2E_BIN_DIR="$(CURDIR)/$(BIN)" PYTHON="$(PYTHON)" $(GO) test $(RACE) -count=1 -timeout 20m ./client/languages ./sessiond/e2e/...

proxies:
	@missing=; \
	for program in nginx haproxy; do PATH="$$PATH:/usr/sbin" command -v $$program >/dev/null || missing="$$missing $$program"; done; \
	.ci/debian e2e $$missing

conformance: $(BIN)/etcd $(BIN)/sessiond $(BIN)/mcpserver ## Run the official MCP conformance suite (CONFORMANCE=quick, CONFORMANCE_FLAGS).
	@E2E_BIN_DIR="$(CURDIR)/$(BIN)" $(GO) run ./sessiond/e2e/conformance $(if $(filter quick,$(CONFORMANCE)),--quick) $(CONFORMANCE_FLAGS)

# CHAOS=quick is a short run of a fixed seed. Without a seed there is a new one each time, which is printed. On a machine that is too busy for
# enough operations to be answered (exit status 4) a run proves little, but nothing is wrong with the change that is tested.
chaos: $(BIN)/etcd $(BIN)/sessiond $(BIN)/mcpserver $(BIN)/chaos ## Break a cluster at random and judge what clients saw (SEED, DURATION, FAULTS, CHAOS=quick).
	@status=0; E2E_BIN_DIR="$(CURDIR)/$(BIN)" $(BIN)/chaos $(if $(filter quick,$(CHAOS)),--seed 20 --duration 3m) \
		$(if $(SEED),--seed $(SEED)) $(if $(DURATION),--duration $(DURATION)) $(if $(FAULTS),--faults $(FAULTS)) $(CHAOS_FLAGS) || status=$$?; \
	[ "$$status" -eq 0 ] || { [ "$$status" -eq 4 ] && [ "$(CHAOS)" = quick ]; }

client-typescript: $(BIN)/buf client/typescript/node_modules/.package-lock.json ## Set up client/typescript: packages, stubs, compile.
	@$(BIN)/buf generate --template client/typescript/buf.gen.yaml
	@npm run --silent --prefix client/typescript build

# npm writes this file last.
client/typescript/node_modules/.package-lock.json: client/typescript/package.json client/typescript/package-lock.json
	@echo "installing the npm packages of client/typescript (once)"
	@npm ci --prefix client/typescript --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

client-python: $(BIN)/buf ## Set up client/python: Debian packages if they are missing (PYTHON), stubs.
	@missing=; \
	command -v protoc >/dev/null || missing="$$missing protobuf-compiler"; \
	command -v grpc_python_plugin >/dev/null || missing="$$missing protobuf-compiler-grpc"; \
	$(PYTHON) -c 'import google.protobuf' 2>/dev/null || missing="$$missing python3-protobuf"; \
	$(PYTHON) -c 'import grpc' 2>/dev/null || missing="$$missing python3-grpcio"; \
	.ci/debian client-python $$missing || { echo "or set PYTHON to an interpreter that has protobuf and grpcio"; exit 1; }
	@$(PYTHON) -c 'import google.protobuf, grpc' || { echo "client-python: PYTHON=$(PYTHON) lacks protobuf or grpcio"; exit 1; }
	@$(BIN)/buf generate --template client/python/buf.gen.yaml

bench: $(BIN)/etcd $(BIN)/sessiond $(BIN)/bench redis ## Compare with what others use, side by side (BENCH=quick or scale, BENCH_FLAGS, BENCH_OUT).
	@E2E_BIN_DIR="$(CURDIR)/$(BIN)" $(BIN)/bench --out '$(BENCH_OUT)' $(if $(filter quick,$(BENCH)),--quick) $(if $(filter scale,$(BENCH)),--only scale) $(BENCH_FLAGS)

redis:
	@missing=; command -v redis-server >/dev/null || missing=redis-server; .ci/debian bench $$missing

microbench: ## Run the benchmarks of single paths (RUN, RUN_FLAGS, PACKAGES).
	@$(GO) test -run '^$$' -bench '$(RUN)' -benchmem $(RUN_FLAGS) $(PACKAGES)

fuzz: ## Fuzz the front-end's request path (FUZZTIME); what it finds goes to mcpserver/testdata, to be kept.
	@$(GO) test -run '^$$' -fuzz FuzzRequest -fuzztime $(FUZZTIME) ./mcpserver
FUZZTIME ?= 60s

##@ Before a commit

lint: $(BIN)/golangci-lint $(BIN)/buf ## Check Go and proto style; changes nothing.
	@unformatted=$$(gofmt -l $(wildcard proto client mcpserver sessiond)); \
	[ -z "$$unformatted" ] || { echo "not formatted; run gofmt -w on:"; echo "$$unformatted"; exit 1; }
	@$(GO) vet ./...
	@diff=$$($(GO) fix -diff ./...) || [ -n "$$diff" ] || exit 1; \
	[ -z "$$diff" ] || { echo "older idioms; run go fix ./... for:"; echo "$$diff"; exit 1; }
	@$(BIN)/golangci-lint run
	@cd sessiond/bench && $(GO) vet ./... && "$(CURDIR)/$(BIN)/golangci-lint" run
	@diff=$$(cd sessiond/bench && $(GO) fix -diff ./...) || [ -n "$$diff" ] || exit 1; \
	[ -z "$$diff" ] || { echo "older idioms; run go fix ./... in sessiond/bench for:"; echo "$$diff"; exit 1; }
	@$(BIN)/buf lint
	@.ci/breaking
	@$(BIN)/buf format -d --exit-code || { echo "proto files not formatted; run .bin/buf format -w"; exit 1; }

generate: $(BIN)/buf $(BIN)/protoc-gen-go $(BIN)/protoc-gen-go-grpc ## Write the Go stubs beside the .proto files.
	@$(BIN)/buf generate

check-generate: generate ## Fail when the committed stubs are not what generate writes.
	@changed=$$(git status --porcelain proto); \
	[ -z "$$changed" ] || { echo "proto/ differs from what is committed; commit what 'make generate' wrote:"; echo "$$changed"; git --no-pager diff --stat proto; exit 1; }

breaking: $(BIN)/buf ## Report changes of proto/ that break callers (AGAINST a commit; else see .ci/breaking).
	@AGAINST="$(AGAINST)" .ci/breaking
AGAINST ?=

clean: ## Delete .bin/, installed npm packages and what is made of them; keeps the data folder.
	rm -rf $(BIN) .ci/tools/npm/node_modules sessiond/e2e/typescript/node_modules sessiond/e2e/conformance/node_modules \
		client/typescript/node_modules client/typescript/src/gen client/typescript/dist client/python/gen

.PHONY: help run demo build test e2e chaos proxies conformance client-typescript client-python bench redis microbench fuzz lint generate check-generate breaking clean FORCE

# Our own programs: go build knows best whether there is something to do.
$(BIN)/sessiond $(BIN)/mcpserver: $(BIN)/%: FORCE
	@[ -e $@ ] || echo "building $@; the first time takes minutes, then Go's cache has it"
	@$(GO) build -o $@ ./$*/cmd/$*

$(BIN)/demo: FORCE
	@$(GO) build -o $@ ./sessiond/e2e/demo

$(BIN)/bench: FORCE
	@[ -e $@ ] || echo "building $@; the first time takes minutes, then Go's cache has it"
	@cd sessiond/bench && $(GO) build -o "$(CURDIR)/$@" .

$(BIN)/chaos: FORCE
	@$(GO) build -o $@ ./sessiond/chaos/cmd/chaos

# Tools. $(call go_tool,folder under .ci/tools,module that has the version,package)
define go_tool
	@version=$$(awk '$$1 == "$(2)" && $$2 ~ /^v/ {print $$2}' .ci/tools/$(1)/go.mod); \
	echo "installing $(@F) $$version into $(BIN)/ (once; it may take a few minutes)"; \
	cd .ci/tools/$(1) && $(GO) build -trimpath -o "$(CURDIR)/$@" $(3)
	@touch $@
endef

$(BIN)/golangci-lint: .ci/tools/lint/go.mod .ci/tools/lint/go.sum
	$(call go_tool,lint,github.com/golangci/golangci-lint/v2,github.com/golangci/golangci-lint/v2/cmd/golangci-lint)

$(BIN)/protoc-gen-go: .ci/tools/proto/go.mod .ci/tools/proto/go.sum
	$(call go_tool,proto,google.golang.org/protobuf,google.golang.org/protobuf/cmd/protoc-gen-go)

$(BIN)/protoc-gen-go-grpc: .ci/tools/proto/go.mod .ci/tools/proto/go.sum
	$(call go_tool,proto,google.golang.org/grpc/cmd/protoc-gen-go-grpc,google.golang.org/grpc/cmd/protoc-gen-go-grpc)

$(BIN)/etcd: .ci/tools/etcd/go.mod .ci/tools/etcd/go.sum
	$(call go_tool,etcd,go.etcd.io/etcd/server/v3,go.etcd.io/etcd/server/v3)

$(BIN)/etcdctl: .ci/tools/etcd/go.mod .ci/tools/etcd/go.sum
	$(call go_tool,etcd,go.etcd.io/etcd/etcdctl/v3,go.etcd.io/etcd/etcdctl/v3)

# The npm package carries buf as a binary, one package a platform, and npm installs the one that fits.
$(BIN)/buf: .ci/tools/npm/package.json .ci/tools/npm/package-lock.json
	@command -v npm >/dev/null || { echo "buf comes as an npm package: install Node with npm (on Debian: apt-get install nodejs npm)"; exit 1; }
	@version=$$(awk -F'"' '$$2 == "@bufbuild/buf" {print $$4}' .ci/tools/npm/package.json); echo "installing buf $$version into $(BIN)/ (once)"
	@npm ci --prefix .ci/tools/npm --ignore-scripts --no-audit --no-fund --loglevel=error >/dev/null
	@mkdir -p $(BIN) && cp .ci/tools/npm/node_modules/@bufbuild/buf-*/bin/buf $@
