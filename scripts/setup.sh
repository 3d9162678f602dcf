#!/usr/bin/env bash
# Installs what moesh needs and is not there yet: Debian or Ubuntu packages (as root), and torch in .venv inside the tree, with
# the Python packages that tests compare moesh with. With nothing missing it takes a moment. MOESH_TORCH_DIR names an installed
# torch to use instead of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH_VERSION=2.13.0
PEERS=(safetensors==0.8.0 transformers==5.22.2 numpy) # Python packages that tests compare moesh with
PACKAGES=(g++ cmake ninja-build ccache python3 python3-venv libopenmpi-dev openmpi-bin openssh-client libgtest-dev libcli11-dev
  libtomlplusplus-dev nlohmann-json3-dev libxxhash-dev clang-format-19 clang-19 libclang-rt-19-dev)
# Not on every release; moesh builds and tests without them.
OPTIONAL=(ccache openssh-client libtomlplusplus-dev clang-format-19 clang-19 libclang-rt-19-dev)

installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }
is_optional() { [[ " ${OPTIONAL[*]} " == *" $1 "* ]]; }

install_packages() {
  local missing=()
  for p in "${PACKAGES[@]}"; do installed "$p" || missing+=("$p"); done
  [ ${#missing[@]} -eq 0 ] && return
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "setup: install these packages as root, then run again: ${missing[*]}" >&2; exit 1; }
    as_root=(sudo)
  fi
  "${as_root[@]}" apt-get update -qq
  local wanted=()
  for p in "${missing[@]}"; do
    if apt-cache show "$p" >/dev/null 2>&1; then wanted+=("$p");
    elif ! is_optional "$p"; then echo "setup: no package '$p' here; moesh needs Debian 12, Ubuntu 22.04 or later" >&2; exit 1; fi
  done
  [ ${#wanted[@]} -eq 0 ] && return
  echo "setup: installing ${wanted[*]}"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${wanted[@]}" >/dev/null
}

install_torch() {
  [ -n "${MOESH_TORCH_DIR:-}" ] && return
  local stamp=.venv/torch-$TORCH_VERSION
  [ -e "$stamp" ] && return
  echo "setup: installing torch $TORCH_VERSION in .venv"
  [ -x .venv/bin/pip ] || python3 -m venv .venv
  .venv/bin/pip install -q --disable-pip-version-check "torch==$TORCH_VERSION"
  touch "$stamp"
}

# Beside the torch that is in .venv: a torch from elsewhere has its own Python, whose packages are not ours to change.
install_peers() {
  [ -n "${MOESH_TORCH_DIR:-}" ] && return
  local stamp
  stamp=.venv/peers-$(printf '%s\n' "${PEERS[@]}" | cksum | cut -d' ' -f1)
  [ -e "$stamp" ] && return
  echo "setup: installing ${PEERS[*]} in .venv, for tests"
  .venv/bin/pip install -q --disable-pip-version-check "${PEERS[@]}"
  touch "$stamp"
}

# A machine without apt must bring the packages itself; CMake says what is missing.
if command -v apt-get >/dev/null; then install_packages; fi
install_torch
install_peers
