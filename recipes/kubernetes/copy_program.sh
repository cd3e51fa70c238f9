#!/bin/bash
# Copies the program with all its libraries into a folder, for containers of other images:
#   copy_program.sh FOLDER    then FOLDER/tessera.sh is called like tessera
# FOLDER is new, empty, or has an older copy. Files of other names in it stay.
set -euo pipefail
[[ $# -eq 1 ]] || { sed -n '2,4s/^# \?//p' "$0" >&2; exit 2; }
program=$(command -v tessera) || { echo "copy_program.sh: no tessera on the PATH" >&2; exit 2; }
target=${1%/}
if [[ -n $(ls -A "$target" 2>/dev/null) && ! -e $target/tessera.sh ]]; then
  echo "copy_program.sh: '$target' has other files, and no tessera.sh; give a new folder" >&2
  exit 2
fi
mkdir -p "$target"
new=$(mktemp -d "$target/.new.XXXXXX")
trap 'rm -rf "$new"' EXIT
ldd "$program" | awk '$2 == "=>" { print $3 } $1 ~ "^/" { print $1 }' | xargs cp -L -t "$new"
cp "$program" "$new/tessera"
loader=$(basename "$(ldd "$program" | awk '$1 ~ "^/" { print $1 }')")
cat >"$new/tessera.sh" <<END
#!/bin/sh
folder=\$(dirname "\$0")
exec "\$folder/$loader" --library-path "\$folder" "\$folder/tessera" "\$@"
END
chmod +x "$new/tessera.sh"
# The loader, the libraries and the program are replaced one by one, and tessera.sh comes last.
find "$new" -mindepth 1 ! -name tessera.sh -exec mv -f -t "$target" {} +
mv -f "$new/tessera.sh" "$target"
