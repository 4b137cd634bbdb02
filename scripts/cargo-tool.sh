#!/usr/bin/env bash
# Runs a cargo subcommand that does not come with cargo, and installs it first when it is missing.
#
#   scripts/cargo-tool.sh nextest run --workspace
#
# What is on PATH is used, whatever its version. Else the version below is built from crates.io, once, into the cache
# ${OBOL_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/obol}, outside the tree.
set -euo pipefail

tool=${1:?usage: scripts/cargo-tool.sh TOOL [ARGUMENT…]}
cache=${OBOL_TEST_CACHE:-${XDG_CACHE_HOME:-${HOME:?cargo-tool: HOME is not set; set OBOL_TEST_CACHE to a folder}/.cache}/obol}

case $tool in
  nextest) version=0.9.143 ;;
  deny) version=0.20.2 ;;
  *) echo "cargo-tool: error: no version is pinned for cargo-$tool" >&2; exit 2 ;;
esac

if ! command -v "cargo-$tool" >/dev/null 2>&1; then
  root=$cache/cargo-$tool-$version
  if [[ ! -x $root/bin/cargo-$tool ]]; then
    echo "cargo-tool: building cargo-$tool $version into $root; this takes some minutes, once" >&2
    mkdir -p "$cache"
    # A target directory of its own: the workspace's may be locked by a build, and belongs to other flags.
    env -u CARGO_TARGET_DIR cargo install --quiet --locked --root "$root" "cargo-$tool@$version" >&2 || {
      echo "cargo-tool: error: cargo-$tool could not be built; is crates.io reachable?" >&2
      exit 1
    }
  fi
  PATH=$root/bin:$PATH
fi
exec cargo "$@"
