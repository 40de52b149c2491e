#!/usr/bin/env bash
# Installs the Debian packages that Rewake needs and this machine lacks.
#
# Usage: system.sh          (installs as root; otherwise it only says what is missing)
set -euo pipefail

missing=()
need() { command -v "$1" >/dev/null 2>&1 || missing+=("$2"); }
need ip iproute2
need unshare util-linux
need nsenter util-linux
need fallocate util-linux
need g++ g++
python3 -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
[ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || [ -e /usr/share/keyrings/debian-archive-keyring.pgp ] ||
    missing+=(debian-archive-keyring)

[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "system.sh: error: missing packages: ${missing[*]}; install them, as root: apt-get install ${missing[*]}" >&2
    exit 1
fi
echo "system.sh: installing ${missing[*]}" >&2
apt-get -q update >/dev/null
DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends -y "${missing[@]}" >/dev/null
