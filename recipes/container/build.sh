#!/usr/bin/env bash
# Builds a container image with Tessera: an OCI layout of the distribution's packages, the program and the recipes.
#   recipes/container/build.sh [options]
#     --program FILE    the program to put in (build/cpu/src/app/tessera)
#     --output DIR      the OCI layout (build/image); an older one is replaced
#     --cuda            NVIDIA's libraries as well, from the pinned wheels of cuda.txt; the driver is the node's
#     --sshd            an SSH server on port 2222, for pods that the launcher starts ranks in
# It needs no container runtime and no registry, nor root where user namespaces work. The packages come from this
# machine's distribution, for which the program was built. The same packages give layers with the same digests.
#   skopeo copy oci:build/image:tessera docker://REGISTRY/tessera:TAG
set -euo pipefail

folder=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
repository=$(realpath "$folder/../..")
program=$repository/build/cpu/src/app/tessera
output=$repository/build/image
cuda="" sshd=""
fail() { echo "build.sh: $*" >&2; exit 2; }

while [[ $# -gt 0 ]]; do
  case $1 in
    --program | --output) [[ $# -gt 1 ]] || fail "$1 needs a value" ;;&
    --program) program=$2; shift 2 ;;
    --output) output=$2; shift 2 ;;
    --cuda) cuda=yes; shift ;;
    --sshd) sshd=yes; shift ;;
    *) sed -n '2,/^set -/{/^#/s/^# \?//p}' "$0" >&2; fail "unknown option '$1'" ;;
  esac
done

missing=()
for tool in mmdebstrap umoci objdump strip dpkg-query python3; do command -v "$tool" >/dev/null || missing+=("$tool"); done
[[ ${#missing[@]} -eq 0 ]] || fail "${missing[*]} not found; scripts/setup.sh image installs what is missing"
[[ -x $program ]] || fail "there is no program $program; build it (make image does), or name it by --program"
sources=()
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources; do
  if [[ -s $file ]]; then sources+=("$file"); fi
done
# shellcheck source=/dev/null
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
if [[ -n $(ls -A "$output" 2>/dev/null) && ! -e $output/oci-layout ]]; then
  fail "'$output' has files, and is no OCI layout; give a new folder by --output"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Layer 1 is the distribution, with the packages that own the libraries to which the program is linked.
packages=(openmpi-bin openssh-client)
while read -r library; do
  # A library's file has several paths if /lib is a link to /usr/lib.
  owner=$(dpkg-query -S "*/$library" 2>/dev/null | sed -n "s|^\([^:]*\).*: /.*/$library\$|\1|p" | head -1 || true)
  if [[ -n $owner ]]; then
    packages+=("$owner")
  else
    [[ -n $cuda && $library == libcu* ]] || fail "$program needs $library, which is in no package of this machine"
  fi
done < <(objdump -p "$program" | awk '/NEEDED/ { print $2 }')
if [[ -n $cuda ]]; then packages+=(libibverbs1 ibverbs-providers); fi  # for NCCL over InfiniBand
if [[ -n $sshd ]]; then packages+=(openssh-server); fi

# Files that are newer get this time, so that a layer depends only on its packages.
export SOURCE_DATE_EPOCH=946684800
cat >"$work/sshd_config" <<'END'
# Runs as the user tessera. The key pair comes with a Secret, and is the hosts' key as well.
Port 2222
HostKey /home/tessera/.ssh/id_rsa
AuthorizedKeysFile /home/tessera/.ssh/authorized_keys
AuthenticationMethods publickey
AllowUsers tessera
UsePAM no
PidFile none
# A Secret's files belong to root.
StrictModes no
# Ranks of many nodes are started at once.
MaxStartups 1000
END
cat >"$work/ssh_config" <<'END'
# A pod's name and address change; what proves it is the key that all pods of a run share.
Host *
  Port 2222
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
END
# shellcheck disable=SC2016  # mmdebstrap's own shell expands $1, the root of the image
hooks=(
  # The account has no password. With the usual "!", sshd would treat it as a locked account.
  --customize-hook='chroot "$1" useradd --uid 1000 --create-home --shell /bin/bash --password "*" tessera'
  # These files would differ between machines, or name their registry.
  --customize-hook='rm -rf "$1"/etc/apt/sources.list* "$1"/etc/apt/apt.conf.d/99mmdebstrap "$1"/etc/resolv.conf "$1"/etc/hostname'
  --customize-hook='rm -rf "$1"/var/log/* "$1"/var/cache/* "$1"/var/lib/apt/* "$1"/etc/passwd- "$1"/etc/shadow- "$1"/etc/group- "$1"/etc/gshadow-'
  --customize-hook='rm -f "$1"/etc/ssh/ssh_host_*'
)
if [[ -n $sshd ]]; then
  hooks+=(--customize-hook="mkdir \"\$1/etc/tessera\" && cp '$work/sshd_config' \"\$1/etc/tessera/sshd_config\""
    --customize-hook="cp '$work/ssh_config' \"\$1/etc/ssh/ssh_config.d/tessera.conf\"")
fi
mmdebstrap --quiet --variant=minbase --include="$(IFS=,; echo "${packages[*]}")" \
  --aptopt='Acquire::Languages "none"' --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
  "${hooks[@]}" "$suite" "$work/distribution.tar" "${sources[@]}"

# Packs a folder. The result depends on names, modes and contents only.
pack() { tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --format=gnu -C "$1" -cf "$2" .; }
layers=("$work/distribution.tar")

if [[ -n $cuda ]]; then
  mkdir "$work/wheels" "$work/nvidia"
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.11 \
    --platform manylinux_2_27_x86_64 --platform manylinux_2_18_x86_64 --platform manylinux2014_x86_64 --dest "$work/wheels" --requirement "$folder/cuda.txt"
  for wheel in "$work"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$work/nvidia/site"; done
  # The layer has libraries and licences, and neither headers nor static libraries.
  libraries=$work/nvidia/layer/usr/lib/tessera/nvidia
  mkdir -p "$libraries" "$work/nvidia/layer/etc/ld.so.conf.d" "$work/nvidia/layer/usr/share/doc/tessera-nvidia"
  find "$work/nvidia/site" -name '*.so*' -type f -exec mv -t "$libraries" {} +
  for file in "$work"/nvidia/site/*.dist-info/*icense* "$work"/nvidia/site/*.dist-info/licenses/*icense*; do
    if [[ -f $file ]]; then cp "$file" "$work/nvidia/layer/usr/share/doc/tessera-nvidia/$(basename "${file%%.dist-info*}")"; fi
  done
  chmod -R a+rX,go-w "$work/nvidia/layer"
  # ldconfig makes the links from sonames, and the cache of libraries lists them.
  echo /usr/lib/tessera/nvidia >"$work/nvidia/layer/etc/ld.so.conf.d/tessera-nvidia.conf"
  mkdir "$work/nvidia/root"
  tar -C "$work/nvidia/root" -xf "$work/distribution.tar" --exclude='./dev/*'
  cp -r "$work/nvidia/layer/." "$work/nvidia/root/"
  ldconfig -X -r "$work/nvidia/root" -C /etc/ld.so.cache 2>/dev/null || true
  ldconfig -r "$work/nvidia/root" -n /usr/lib/tessera/nvidia
  ldconfig -r "$work/nvidia/root"
  cp -a "$work/nvidia/root/usr/lib/tessera/nvidia/." "$libraries/"
  cp "$work/nvidia/root/etc/ld.so.cache" "$work/nvidia/layer/etc/"
  pack "$work/nvidia/layer" "$work/nvidia.tar"
  layers+=("$work/nvidia.tar")
fi

# The last layer has what changes with each build of Tessera.
mkdir -p "$work/program/usr/bin" "$work/program/usr/share/tessera"
strip -o "$work/program/usr/bin/tessera" "$program"
cp -r "$repository/configs" "$repository/recipes" "$repository/LICENSE" "$work/program/usr/share/tessera/"
chmod -R a+rX,go-w "$work/program"
pack "$work/program" "$work/program.tar"
layers+=("$work/program.tar")

created=$(date --utc --date="@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)
rm -rf "$output"
mkdir -p "$(dirname "$output")"
umoci init --layout "$output"
umoci new --image "$output:tessera"
for layer in "${layers[@]}"; do
  umoci raw add-layer --image "$output:tessera" --history.created "$created" --history.created_by "$(basename "$layer" .tar)" "$layer"
done
variables=()
# shellcheck disable=SC2054
if [[ -n $cuda ]]; then variables=(--config.env NVIDIA_VISIBLE_DEVICES=all --config.env NVIDIA_DRIVER_CAPABILITIES=compute,utility); fi
umoci config --image "$output:tessera" --no-history --created "$created" --config.user 1000:1000 \
  --config.workingdir /home/tessera --config.entrypoint /usr/bin/tessera --config.cmd doctor \
  --config.env PATH=/usr/local/bin:/usr/bin:/bin "${variables[@]}"
umoci gc --layout "$output"

umoci stat --image "$output:tessera" --json | python3 -c '
import json, sys
for entry in json.load(sys.stdin)["history"]:
    layer = entry["layer"]
    if layer: print(entry["created_by"], layer["digest"], "%.1f MB" % (layer["size"] / 1e6))
'
echo "image $output:tessera, $(du -sm "$output" | cut -f1) MB compressed"
