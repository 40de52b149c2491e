#!/usr/bin/env bash
# Installs llama.cpp's server, the engine for GGUF models on a CPU.
#
# Usage: llama-server.sh DEST
#
# Leaves behind DEST/bin/llama-server, a wrapper that becomes the server (one
# process) with the CPU backend that suits this machine, and
# DEST/llama.cpp-tools-VERSION, taken from Debian sid with its own libraries.
# Where DEST/bin/llama-server already works it does nothing. Remove DEST to
# uninstall, once no snapshot needs it.
set -euo pipefail
# shellcheck source=debian-tool.sh
. "$(dirname "$(readlink -f "$0")")/debian-tool.sh"

minimum=0.5
[ $# -eq 1 ] || { sed -n '4s/^# //p' "$0" >&2; exit 2; }
dest=$(realpath -m "$1")
server=$dest/bin/llama-server

if "$server" --version >/dev/null 2>&1; then
    say "already there: $server"
    exit 0
fi
open_work "$dest"
take_tool "$dest" llama.cpp-tools llama-server "$minimum"

# ggml itself knows which of its backends is the fastest that this CPU can run:
# started in their folder, it opens each for its score, and the best one last.
backends=$(find "$tree" -name 'libggml-cpu-*.so' -printf '%h\n' | sort -u | head -n 1)
[ -n "$backends" ] || die "$tree has no CPU backend (libggml-cpu-*.so); the package has changed its layout"
chosen=$(cd "$backends" && eval "LD_DEBUG=files $loader --list-devices" 2>&1 |
    sed -n 's|.*file=.*/\(libggml-cpu-[^/ ]*\.so\) .*dynamically loaded.*|\1|p' | tail -n 1) || true
[ -n "$chosen" ] || die "ggml found no backend for this CPU in $backends"

write_wrapper "$dest" llama-server "GGML_BACKEND_PATH=$backends/$chosen"
"$server" --version >"$work/version" 2>&1 || die "$server does not run: $(head -n 3 "$work/version")"
say "installed $server $version with $chosen"
