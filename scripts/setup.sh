#!/usr/bin/env bash
# Installs what Tessera needs from the distribution's packages (Debian 12, Ubuntu 24.04), and where there is nvcc, cuDNN's
# C++ frontend (headers) from PyPI into build/. Does nothing, in a moment, when all of it is there. `setup.sh lint` installs what `make lint` needs instead, `setup.sh fuzz` what `make fuzz` needs as
# well, `setup.sh browser` a browser without a screen, for the tests of `tessera compare`'s report (status 2 where there
# is no package of one).
set -euo pipefail

packages=(
  cmake ninja-build ccache pkg-config                           # build
  libdnnl-dev libgomp1                                          # CPU GEMM, threads
  libopenmpi-dev openmpi-bin                                    # ranks
  libfmt-dev libspdlog-dev libcli11-dev                         # format, log, command line
  libtomlplusplus-dev nlohmann-json3-dev                        # TOML, JSON
  libsentencepiece-dev libpcre2-dev zlib1g-dev libxxhash-dev    # tokenizers, gzip, checksums
  libgtest-dev libgmock-dev libbenchmark-dev                    # tests, micro-benchmarks
)

if [[ ${1:-} == lint ]]; then
  packages=(clang-format-14)  # pinned: other versions format differently
elif [[ ${1:-} == browser ]]; then
  for browser in chromium-headless-shell chromium google-chrome; do
    if command -v "$browser" >/dev/null; then exit 0; fi
  done
  packages=(chromium-headless-shell)
elif [[ ${1:-} == fuzz ]]; then
  # The compiler, and libFuzzer and the sanitizers of the same version, which the package of this name depends on.
  packages+=(clang libclang-rt-dev)
fi

frontend=$(dirname "$0")/../build/cudnn-frontend frontend_version=1.32.0
wants_frontend=false
if [[ $# -eq 0 ]] && { command -v nvcc || command -v /usr/local/cuda/bin/nvcc; } >/dev/null; then
  [[ $(cat "$frontend/version" 2>/dev/null) == "$frontend_version" ]] || wants_frontend=true
fi
if $wants_frontend && ! python3 -m pip --version >/dev/null 2>&1; then packages+=(python3-pip); fi

# The wheel of one platform, whatever this machine is: headers are wanted only.
fetch_frontend() {
  echo "setup: fetching cuDNN's frontend $frontend_version" >&2
  rm -rf "$frontend"
  mkdir -p "$frontend/wheel"
  python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.11 \
    --implementation cp --abi cp311 --platform manylinux_2_28_x86_64 -d "$frontend/wheel" \
    "nvidia-cudnn-frontend==$frontend_version"
  python3 -m zipfile -e "$frontend"/wheel/*.whl "$frontend/wheel"
  mv "$frontend/wheel/include" "$frontend/include"
  rm -r "$frontend/wheel"
  echo "$frontend_version" >"$frontend/version"
}

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $status == installed ]] || missing+=("$package")
done
command -v c++ >/dev/null || missing+=(g++)
if [[ ${#missing[@]} -eq 0 ]]; then
  if $wants_frontend; then fetch_frontend; fi
  exit 0
fi

as_root=()
if [[ $(id -u) -ne 0 ]]; then
  command -v sudo >/dev/null || { echo "setup: need root or sudo to install: ${missing[*]}" >&2; exit 2; }
  as_root=(sudo)
fi
echo "setup: installing ${missing[*]}" >&2
"${as_root[@]}" apt-get update -q >/dev/null
# Ubuntu has Chromium as a snap only.
if [[ ${1:-} == browser ]] && ! apt-cache show "${packages[@]}" >/dev/null 2>&1; then
  echo "setup: no package of a browser; the tests that need one are skipped (install google-chrome to run them)" >&2
  exit 2
fi
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null
if $wants_frontend; then fetch_frontend; fi
