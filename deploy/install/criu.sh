#!/usr/bin/env bash
# Installs CRIU >= 4.2, which current kernels need and stable releases lack.
#
# Usage: criu.sh DEST          (root is needed only to use CRIU, not to install)
#
# Leaves behind DEST/bin/criu: a link, if PATH already has one that is new
# enough; otherwise a wrapper for DEST/criu-VERSION, taken from Debian sid with
# its own libraries. Where DEST/bin/criu already works it does nothing.
# Remove DEST to uninstall, once no snapshot needs it.
set -euo pipefail
# shellcheck source=debian-tool.sh
. "$(dirname "$(readlink -f "$0")")/debian-tool.sh"

minimum=4.2
[ $# -eq 1 ] || { sed -n '4s/^# //p' "$0" >&2; exit 2; }
dest=$(realpath -m "$1")

criu_version() { "$1" --version 2>/dev/null | sed -n 's/^Version: //p'; }
good_enough() {
    have=$(criu_version "$1") || return 1
    [ -n "$have" ] && version_at_least "$have" "$minimum"
}

if good_enough "$dest/bin/criu"; then
    say "already there: $dest/bin/criu $have"
    exit 0
fi
open_work "$dest"
if on_path=$(command -v criu) && good_enough "$on_path"; then
    mkdir -p "$dest/bin"
    ln -s "$(readlink -f "$on_path")" "$work/criu"
    mv -T "$work/criu" "$dest/bin/criu"
    say "linked $on_path $have to $dest/bin/criu"
else
    take_tool "$dest" criu criu "$minimum"
    write_wrapper "$dest" criu
    good_enough "$dest/bin/criu" ||
        die "$dest/bin/criu does not run: $("$dest/bin/criu" --version 2>&1 | head -n 3)"
    say "installed $dest/bin/criu $have"
fi
if [ "$(id -u)" -eq 0 ] && ! "$dest/bin/criu" check >"$work/check.log" 2>&1; then
    say "warning: this kernel or container refuses something that CRIU needs:"
    cat "$work/check.log" >&2
    say "snapshots cannot be made here; 'rewake doctor' says more"
fi
