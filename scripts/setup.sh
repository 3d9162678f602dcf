#!/usr/bin/env bash
# Installs what moesh needs and is not there yet: Debian or Ubuntu packages (as root), and torch in
# .venv inside the tree.
#   scripts/setup.sh program    what the command moesh needs
#   scripts/setup.sh tests      that, and what the tests need (default)
# With nothing missing it takes a moment. MOESH_TORCH_DIR names an installed torch to use instead of
# .venv. What apt and pip print goes to a log, which is shown when they fail.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-tests}
case $what in program | tests) ;; *) echo "usage: setup.sh [program | tests]" >&2; exit 2 ;; esac

TORCH_VERSION=2.13.0
# Python packages that tests compare moesh with, and those that build moesh's own.
PEERS=(safetensors==0.8.0 transformers==5.22.2 tokenizers==0.23.3 numpy pyarrow
  tensorboard==2.21.0 nanobind==3.1.0 scikit-build-core==1.1.1 peft==0.21.2 jinja2==3.1.6)
# Only the chat templates inside of it are read: what it needs to train is not installed.
TEMPLATES=trl==1.16.0
PACKAGES=(g++ cmake ninja-build ccache python3 python3-venv libopenmpi-dev openmpi-bin
  libtomlplusplus-dev nlohmann-json3-dev libxxhash-dev libcli11-dev zlib1g-dev
  libzstd-dev libre2-dev libjs-dygraphs)
TEST_PACKAGES=(python3-dev zstd openssh-client libgtest-dev clang-format-19 clang-19
  libclang-rt-19-dev chromium)
# Not on every release; moesh builds and tests without them.
OPTIONAL=(ccache openssh-client clang-format-19 clang-19 libclang-rt-19-dev libjs-dygraphs chromium)
[ "$what" = tests ] && PACKAGES+=("${TEST_PACKAGES[@]}")

log=${TMPDIR:-/tmp}/moesh-setup-$(id -u).log
: >"$log"

# logged COMMAND ...: its output goes to the log; when it fails, the end of the log is shown.
logged() {
  "$@" >>"$log" 2>&1 && return
  local code=$?
  { echo "setup: failed: $*" && tail -n 15 "$log" | sed 's/^/  /'; } >&2
  echo "setup: all that was printed: $log" >&2
  return $code
}

installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }
is_optional() { [[ " ${OPTIONAL[*]} " == *" $1 "* ]]; }

# install_packages NAME ...: those that are missing.
install_packages() {
  local missing=() wanted=() as_root=()
  for p in "$@"; do installed "$p" || missing+=("$p"); done
  [ ${#missing[@]} -eq 0 ] && return
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
      echo "setup: install these packages as root, then run again: ${missing[*]}" >&2
      return 1
    fi
    as_root=(sudo)
  fi
  if [ -z "${updated:-}" ]; then
    logged "${as_root[@]}" apt-get update || return
    updated=yes
  fi
  for p in "${missing[@]}"; do
    if apt-cache show "$p" >/dev/null 2>&1; then
      wanted+=("$p")
    elif ! is_optional "$p"; then
      echo "setup: no package '$p' here; moesh needs Debian 12 or later" >&2
      return 1
    fi
  done
  [ ${#wanted[@]} -eq 0 ] && return
  echo "setup: installing ${wanted[*]}"
  logged "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends "${wanted[@]}"
}

# Not where MOESH_TORCH_DIR names a torch from elsewhere: it has its own Python, whose packages are
# not ours to change. The peers stand beside the torch in .venv.
install_python_packages() {
  [ -n "${MOESH_TORCH_DIR:-}" ] && return
  local stamp=.venv/torch-$TORCH_VERSION
  if [ ! -e "$stamp" ]; then
    echo "setup: installing torch $TORCH_VERSION in .venv"
    [ -x .venv/bin/pip ] || logged python3 -m venv .venv
    logged .venv/bin/pip install --disable-pip-version-check "torch==$TORCH_VERSION"
    touch "$stamp"
  fi
  [ "$what" = tests ] || return 0
  stamp=.venv/peers-$(printf '%s\n' "${PEERS[@]}" "$TEMPLATES" | cksum | cut -d' ' -f1)
  [ -e "$stamp" ] && return
  echo "setup: installing ${PEERS[*]} $TEMPLATES in .venv, for tests"
  logged .venv/bin/pip install --disable-pip-version-check "${PEERS[@]}"
  logged .venv/bin/pip install --disable-pip-version-check --no-deps "$TEMPLATES"
  touch "$stamp"
}

# apt and pip work at the same time; pip needs a Python that makes virtual environments. A machine
# without apt must bring the packages itself; CMake says what is missing.
if ! command -v apt-get >/dev/null; then
  install_python_packages
  exit
fi
install_packages python3 python3-venv
install_python_packages &
python_packages=$!
install_packages "${PACKAGES[@]}" || { wait $python_packages; exit 1; }
wait $python_packages
