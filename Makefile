# `make` lists the targets. Each installs what it misses (Debian and Ubuntu packages, cargo tools and test clients in a
# cache outside the tree) and says what it does; all that has to be there already is a Rust toolchain (https://rustup.rs).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# One cargo at a time: they would only wait for each other's lock.
.NOTPARALLEL:

target := $(or $(CARGO_TARGET_DIR),target)
tool := scripts/cargo-tool.sh
say = printf '\n== %s\n' "$(1)" >&2

.PHONY: help
help: ## List these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-9s %s\n", $$1, $$2 }'

.PHONY: demo
demo: toolchain ## The main job in one process: gateway, control and demo upstreams, with a curl to paste
	@$(call say,building (a few minutes the first time))
	@cargo build --release --locked -p obol -p obol-demo
	@exec $(target)/release/obol-demo demo

.PHONY: cluster
cluster: core ## Redis, control, three replicas and a balancer without stickiness; Ctrl-C ends all of it
	@$(call say,building (a few minutes the first time))
	@cargo build --release --locked -p obol -p obol-demo
	@exec $(target)/release/obol-demo cluster

.PHONY: test
test: core ## Everything that CI runs: check, all tests against real Redis, clients and servers, doctests
	@$(call say,test clients and servers)
	@scripts/setup.sh clients
	@$(MAKE) --no-print-directory check
	@$(call say,tests)
	@# nextest builds the programs that the system tests start (.config/nextest.toml).
	@clients=$$(scripts/setup.sh env); eval "$$clients"; $(tool) nextest run --locked --workspace
	@$(call say,doctests)
	@cargo test --locked --quiet --workspace --doc

.PHONY: check
check: toolchain ## Format, lints, docs, licences and sources of dependencies; no test is run
	@$(call say,format)
	@cargo fmt --all --check || { echo 'error: run `make fmt`' >&2; exit 1; }
	@$(call say,lints)
	@cargo clippy --locked --workspace --all-targets -- -D warnings
	@$(call say,documentation)
	@RUSTDOCFLAGS='-D warnings' cargo doc --locked --quiet --workspace --no-deps
	@cargo run --locked --quiet -p obol -- config docs | diff -u docs/configuration.md - \
		|| { echo 'error: docs/configuration.md is stale: run `make docs`' >&2; exit 1; }
	@$(call say,dependencies)
	@# Not advisories: see deny.toml.
	@$(tool) deny --locked check bans licenses sources

.PHONY: bench
bench: core ## Obol beside a bare reverse proxy and no proxy at all, in one run (BENCH='--quick' and other options)
	@$(call say,building (a few minutes the first time))
	@cargo build --release --locked -p obol -p obol-bench
	@exec $(target)/release/obol-bench $(BENCH)

.PHONY: docs
docs: toolchain ## Write the generated pages again: the configuration and the Cedar schema
	@page=$$(cargo run --locked --quiet -p obol -- config docs); printf '%s\n' "$$page" >docs/configuration.md
	@cp crates/obol-authz/src/obol.cedarschema docs/obol.cedarschema

.PHONY: fmt
fmt: rust ## Format the code
	@cargo fmt --all

.PHONY: rust
rust:
	@command -v cargo >/dev/null || { echo 'error: cargo is missing: install Rust from https://rustup.rs' >&2; exit 1; }

# A linker and a C compiler: enough to build. `core` is that and what the tests and the cluster run: Redis, HAProxy, Python.
.PHONY: toolchain core
toolchain: rust
	@scripts/setup.sh toolchain

core: rust
	@scripts/setup.sh core
