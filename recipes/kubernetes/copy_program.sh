#!/bin/bash
# Copies the program with all its libraries into a folder, for containers of other images:
#   copy_program.sh FOLDER    then FOLDER/tessera.sh is called like tessera
set -euo pipefail
[[ $# -eq 1 ]] || { sed -n '2,3s/^# \?//p' "$0" >&2; exit 2; }
program=$(command -v tessera)
new=$1.new
rm -rf "$new"
mkdir -p "$new"
ldd "$program" | awk '$2 == "=>" { print $3 } $1 ~ "^/" { print $1 }' | xargs cp -L -t "$new"
cp "$program" "$new/tessera"
loader=$(basename "$(ldd "$program" | awk '$1 ~ "^/" { print $1 }')")
cat >"$new/tessera.sh" <<END
#!/bin/sh
folder=\$(dirname "\$0")
exec "\$folder/$loader" --library-path "\$folder" "\$folder/tessera" "\$@"
END
chmod +x "$new/tessera.sh"
rm -rf "$1"
mv "$new" "$1"
