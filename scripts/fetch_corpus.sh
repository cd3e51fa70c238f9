#!/usr/bin/env bash
# Fetches the corpus of the examples: GNU's Collaborative International Dictionary of English, 40 MB of text. It is in
# the distribution's package dict-gcide (Debian main, Ubuntu universe), which is unpacked and not installed.
#   scripts/fetch_corpus.sh OUTPUT_DIR
# Puts gcide.dict.dz (gzip) and gcide.index there. Does nothing if both files exist.
set -euo pipefail

if [[ $# -ne 1 || $1 == -* ]]; then
  echo "usage: $0 OUTPUT_DIR" >&2
  exit 2
fi
output=$1
files=(gcide.index gcide.dict.dz)

if [[ -s $output/gcide.index && -s $output/gcide.dict.dz ]]; then
  echo "corpus: '$output' has it already" >&2
  exit 0
fi
for tool in apt-get dpkg-deb; do
  command -v "$tool" >/dev/null || { echo "corpus: $tool is needed (Debian or Ubuntu)" >&2; exit 2; }
done
mkdir -p "$output"

work=$(mktemp -d)
trap 'rm -rf "$work" "${files[@]/#/$output/.new-}"' EXIT
chmod 755 "$work"

download() {  # writes the package to $work; needs no root
  (cd "$work" && apt-get -q -o APT::Sandbox::User="$(id -un)" download dict-gcide >"$work/log" 2>&1)
}

echo "corpus: downloading the package dict-gcide" >&2
if ! download; then
  echo "corpus: the package lists do not have it; updating them" >&2
  as_root=()
  if [[ $(id -u) -ne 0 ]]; then
    command -v sudo >/dev/null || { echo "corpus: need root or sudo for apt-get update" >&2; exit 2; }
    as_root=(sudo)
  fi
  "${as_root[@]}" apt-get update -q >/dev/null
  download || { echo "corpus: apt-get download dict-gcide failed:" >&2; cat "$work/log" >&2; exit 1; }
fi
dpkg-deb -x "$work"/dict-gcide_*.deb "$work/unpacked"
gzip -t -S .dz "$work/unpacked/usr/share/dictd/gcide.dict.dz"

for file in "${files[@]}"; do
  cp "$work/unpacked/usr/share/dictd/$file" "$output/.new-$file"
  mv "$output/.new-$file" "$output/$file"
done
echo "corpus: $output/gcide.dict.dz and gcide.index" >&2
