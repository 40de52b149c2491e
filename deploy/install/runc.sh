#!/usr/bin/env bash
# Installs runc >= 1.1, for models whose engine.backend is runc.
#
# Usage: runc.sh DEST          (root is needed only to use runc, not to install)
#
# Leaves behind DEST/bin/runc: a link, if PATH already has one that is new
# enough; otherwise the program out of the package of this machine's own release
# of Debian or Ubuntu. Not a newer release's: runc starts itself anew, so it
# cannot run on a C library beside the system's. Nothing else is installed.
# Where DEST/bin/runc already works it does nothing. Remove it to uninstall.
set -euo pipefail
# shellcheck source=debian-tool.sh
. "$(dirname "$(readlink -f "$0")")/debian-tool.sh"

minimum=1.1
[ $# -eq 1 ] || { sed -n '4s/^# //p' "$0" >&2; exit 2; }
dest=$(realpath -m "$1")

good_enough() {
    have=$("$1" --version 2>/dev/null | sed -n 's/^runc version \([0-9.]*\).*/\1/p') || return 1
    [ -n "$have" ] && version_at_least "$have" "$minimum"
}

if good_enough "$dest/bin/runc"; then
    say "already there: $dest/bin/runc $have"
    exit 0
fi
open_work "$dest"
mkdir -p "$dest/bin"
if on_path=$(command -v runc) && good_enough "$on_path"; then
    ln -s "$(readlink -f "$on_path")" "$work/runc"
    mv -T "$work/runc" "$dest/bin/runc"
    say "linked $on_path $have to $dest/bin/runc"
    exit 0
fi

for tool in apt-get dpkg-deb; do
    command -v $tool >/dev/null ||
        die "$tool not found: this script needs Debian or Ubuntu; elsewhere put runc >= $minimum on PATH"
done
# The system's sources, but lists and caches of our own: it works without root, and where the system has fetched no lists.
own_apt() {
    apt-get -q -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache" -o Dir::Cache::archives="$work/cache/archives" \
        -o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::Retries=2 -o Acquire::http::Timeout=30 "$@"
}
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/tree"
cd "$work"
if ! apt-get -q download runc >"$work/download.log" 2>&1; then
    say "fetching the package lists of this machine's release"
    own_apt update >"$work/update.log" 2>&1 || true
    own_apt download runc >"$work/download.log" 2>&1 ||
        die "download of runc failed: $(grep -m 3 '^E' "$work/download.log"). Run this script again; nothing was installed."
fi
dpkg-deb -x ./runc_*.deb "$work/tree" || die "cannot unpack runc: is the disk full? (df -h $dest)"
program=$(find "$work/tree" -path '*bin/runc' -type f -print -quit)
[ -n "$program" ] || die "the package of this release has no runc"
good_enough "$program" ||
    die "runc of this release does not run, or is older than $minimum: $("$program" --version 2>&1 | head -n 1)
  To mend: apt-get install libseccomp2, or put a newer runc on PATH."
mv -T "$program" "$dest/bin/runc"
say "installed $dest/bin/runc $have"
