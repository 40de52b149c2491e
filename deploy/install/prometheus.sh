#!/usr/bin/env bash
# Installs Prometheus and promtool, with which the tests scrape, and check dashboards and alerts.
#
# Usage: prometheus.sh DEST
#
# Leaves behind DEST/bin/prometheus and DEST/bin/promtool: links, if PATH already
# has them new enough; otherwise wrappers for DEST/prometheus-VERSION, taken from
# Debian sid with its own libraries. Where they already work it does nothing.
set -euo pipefail
# shellcheck source=debian-tool.sh
. "$(dirname "$(readlink -f "$0")")/debian-tool.sh"

minimum=2.42
[ $# -eq 1 ] || { sed -n '4s/^# //p' "$0" >&2; exit 2; }
dest=$(realpath -m "$1")

good_enough() {
    have=$("$1" --version 2>&1 | sed -n '1s/^[a-z]*, version \([0-9.]*\).*/\1/p')
    [ -n "$have" ] && version_at_least "$have" "$minimum"
}

if good_enough "$dest/bin/prometheus" && good_enough "$dest/bin/promtool"; then
    say "already there: $dest/bin/prometheus $have"
    exit 0
fi
open_work "$dest"
if good_enough prometheus && good_enough promtool; then
    mkdir -p "$dest/bin"
    for tool in prometheus promtool; do
        ln -s "$(readlink -f "$(command -v $tool)")" "$work/$tool"
        mv -T "$work/$tool" "$dest/bin/$tool"
    done
    say "linked $have to $dest/bin"
    exit 0
fi
take_tool "$dest" prometheus prometheus "$minimum"
write_wrapper "$dest" prometheus
loader_of "$tree" promtool
write_wrapper "$dest" promtool
for tool in prometheus promtool; do
    good_enough "$dest/bin/$tool" || die "$dest/bin/$tool does not run: $("$dest/bin/$tool" --version 2>&1 | head -n 3)"
done
say "installed $dest/bin/prometheus $have"
