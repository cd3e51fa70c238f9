#!/usr/bin/env bash
# Installs what Tessera needs from the distribution's packages (Debian 12, Ubuntu 24.04). If there is nvcc, it also puts
# the headers of cuDNN's C++ frontend and of CUTLASS from PyPI into build/. If all of it exists, the script ends
# at once.
#   setup.sh                what the program, tests and benchmarks need
#   setup.sh program        what the program alone needs; `setup.sh program cuda` is for a build with CUDA, which also
#                           configures tests and benchmarks
#   setup.sh lint           also what `make lint` needs
#   setup.sh fuzz           also what `make fuzz` needs
#   setup.sh browser        a browser without a screen, for the tests of the pages of `tessera compare` and
#                           `tessera report` (status 2 if no package has one)
#   setup.sh cluster        what tests/cluster needs, where that can run: as root, with namespaces
#   setup.sh image          what `make image` needs
#   setup.sh package        what `make package` needs besides the program
#   setup.sh kubernetes     the validators of recipes/kubernetes
set -euo pipefail

case "${1:-} ${2:-}" in
  " " | "program " | "program cuda" | "lint " | "fuzz " | "browser " | "cluster " | "image " | "package " | "kubernetes ") ;;
  *) sed -n '2,/^set /s/^# \?//p' "$0" >&2; exit 2 ;;
esac

packages=(
  cmake ninja-build ccache pkg-config                           # build
  libgomp1                                                      # threads
  libopenmpi-dev openmpi-bin                                    # ranks
  libfmt-dev libspdlog-dev libcli11-dev                         # format, log, command line
  libtomlplusplus-dev nlohmann-json3-dev                        # TOML, JSON
  libzmq3-dev cppzmq-dev                                        # a launcher's messages
  prometheus-cpp-dev                                            # metrics for Prometheus
  libboost-math-dev                                             # Student's t distribution
  libsentencepiece-dev libpcre2-dev zlib1g-dev libxxhash-dev    # tokenizers, gzip, checksums
)
if [[ "$*" != program ]]; then
  packages+=(libgtest-dev libgmock-dev libbenchmark-dev python3 python3-venv)  # tests, benchmarks
fi

if [[ ${1:-} == lint ]]; then
  packages+=(clang-format-14)  # pinned: other versions format differently
elif [[ ${1:-} == browser ]]; then
  for browser in chromium-headless-shell chromium google-chrome; do
    if command -v "$browser" >/dev/null; then exit 0; fi
  done
  packages=(chromium-headless-shell)
elif [[ ${1:-} == cluster ]]; then
  if [[ $(id -u) -ne 0 ]] || ! unshare --net --pid --fork true 2>/dev/null; then
    echo "setup: no cluster for tests/cluster, whose tests are skipped: it needs root and namespaces" >&2
    exit 0
  fi
  packages=(
    slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge  # Slurm
    openssh-server openssh-client openmpi-bin                    # MPI over hosts
    iproute2 nftables procps e2fsprogs python3                   # network, faults, harness
    prometheus prometheus-alertmanager                           # promtool, alerts that fire
  )
elif [[ ${1:-} == image ]]; then
  packages=(mmdebstrap umoci binutils python3 python3-pip)
elif [[ ${1:-} == package ]]; then
  packages=(dpkg-dev file)  # CPack finds the libraries that the package depends on with these
elif [[ ${1:-} == kubernetes ]]; then
  packages=(python3)
elif [[ ${1:-} == fuzz ]]; then
  # Installs the compiler. The package of this name depends on libFuzzer and the sanitizers of the same version.
  packages+=(clang libclang-rt-dev)
fi

build=$(dirname "$0")/../build
# Each line has name, package, version, the wanted folder of its wheel, and its platform. Headers need not be for this
# machine's platform.
wheels=()
if { [[ $# -eq 0 || $1 == lint ]] || [[ "$*" == "program cuda" ]]; } && { command -v nvcc || command -v /usr/local/cuda/bin/nvcc; } >/dev/null; then
  wheels+=("cudnn-frontend nvidia-cudnn-frontend 1.32.0 include x86_64"
    "cutlass nvidia-cutlass 4.2.0.0 cutlass_library/source/include any")
fi
if [[ ${1:-} == lint ]]; then wheels+=("clang-tidy clang-tidy 23.1.4 clang_tidy/data any"); fi
wanted=()
for line in "${wheels[@]}"; do
  read -r name _ version _ <<<"$line"
  [[ $(cat "$build/$name/version" 2>/dev/null) == "$version" ]] || wanted+=("$line")
done
# Fetches the validators of Kubernetes' objects and of schemas from PyPI, with the packages that they need.
validators="kubernetes-validate==1.37.0 jsonschema==4.26.0"
if [[ ${1:-} != kubernetes || $(cat "$build/kubernetes/version" 2>/dev/null) == "$validators" ]]; then validators=""; fi
if [[ -n $validators || ${#wanted[@]} -gt 0 ]] && ! python3 -m pip --version >/dev/null 2>&1; then packages+=(python3-pip); fi

fetch_validators() {
  [[ -n $validators ]] || return 0
  echo "setup: fetching $validators" >&2
  rm -rf "${build:?}/kubernetes"
  # shellcheck disable=SC2086
  python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --target "$build/kubernetes" $validators
  echo "$validators" >"$build/kubernetes/version"
}

fetch_wheels() {
  local line name package version folder platform options
  for line in "${wanted[@]}"; do
    read -r name package version folder platform <<<"$line"
    echo "setup: fetching $package $version" >&2
    options=()
    if [[ $platform == x86_64 ]]; then
      options=(--python-version 3.11 --implementation cp --abi cp311 --platform manylinux_2_28_x86_64)
    fi
    rm -rf "${build:?}/$name"
    mkdir -p "$build/$name/wheel"
    python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: "${options[@]}" \
      -d "$build/$name/wheel" "$package==$version"
    python3 -m zipfile -e "$build/$name"/wheel/*.whl "$build/$name/wheel"
    mv "$build/$name/wheel/$folder" "$build/$name/"
    if [[ $name == clang-tidy ]]; then chmod +x "$build/$name"/data/bin/*; fi
    rm -r "$build/$name/wheel"
    echo "$version" >"$build/$name/version"
  done
}

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $status == installed ]] || missing+=("$package")
done
command -v c++ >/dev/null || missing+=(g++)
if [[ ${#missing[@]} -eq 0 ]]; then
  fetch_wheels
  fetch_validators
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
if [[ ${1:-} == cluster && ! -e /usr/sbin/policy-rc.d ]]; then
  # The daemons run in the lab only. Daemons that are installed now start neither now nor when this machine boots.
  printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
  chmod +x /usr/sbin/policy-rc.d
  trap 'rm -f /usr/sbin/policy-rc.d' EXIT
fi
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null
if [[ ${1:-} == cluster ]]; then
  for package in "${missing[@]}"; do
    case $package in
      slurmctld | slurmd | munge | prometheus | prometheus-alertmanager) systemctl -q disable "$package" || true ;;
      openssh-server) systemctl -q disable ssh || true ;;
    esac
  done 2>/dev/null
fi
fetch_wheels
fetch_validators
