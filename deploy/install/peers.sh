#!/usr/bin/env bash
# Installs what `make bench-gateway` compares against: nginx, and routers that package indexes offer.
#
# Usage: peers.sh DEST      (PYTHON=python3.12 peers.sh DEST to choose an interpreter)
#
# Leaves behind DEST/bin/nginx (from Debian sid, with its own libraries, beside the system's) and DEST/venv with vllm-router,
# sglang-router and LiteLLM at the versions that docs/benchmarks.md names. Remove DEST to uninstall.
set -euo pipefail
# shellcheck source=debian-tool.sh
. "$(dirname "$(readlink -f "$0")")/debian-tool.sh"

# LiteLLM is pinned to the last version before a release that its own advisories call compromised.
pins=(vllm-router==0.1.17 sglang-router==0.3.2 "litellm[proxy]==1.80.0")

[ $# -eq 1 ] || { sed -n '4s/^# //p' "$0" >&2; exit 2; }
dest=$(realpath -m "$1")

if ! "$dest/bin/nginx" -v >/dev/null 2>&1; then
    open_work "$dest"
    take_tool "$dest" nginx nginx 1.22
    write_wrapper "$dest" nginx
    "$dest/bin/nginx" -v >"$work/version" 2>&1 || die "nginx does not run: $(head -n 3 "$work/version")"
fi
if [ "$(cat "$dest/venv/.installed" 2>/dev/null)" != "${pins[*]}" ]; then
    say "installing ${pins[*]}"
    [ -x "$dest/venv/bin/pip" ] || "${PYTHON:-python3}" -m venv "$dest/venv"
    "$dest/venv/bin/pip" install --quiet --quiet --disable-pip-version-check "${pins[@]}" || die "pip could not install them"
    printf '%s' "${pins[*]}" >"$dest/venv/.installed"
fi
say "peers are in $dest"
