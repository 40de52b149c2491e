#!/usr/bin/env bash
# Installs a headless Chromium for the tests of the console, without touching the system.
#
# Usage: chromium.sh DEST
#
# Leaves behind DEST/bin/chromium, which runs the distribution's own chromium-headless-shell out of DEST, with the libraries
# and fonts that it needs beside those of the system. Unlike other tools it is not run through a loader of its own: a browser
# starts its helpers as /proc/self/exe. Remove DEST/chromium-* and DEST/bin/chromium to uninstall.
set -euo pipefail
# shellcheck source=debian-tool.sh
. "$(dirname "$(readlink -f "$0")")/debian-tool.sh"

[ $# -eq 1 ] || { sed -n '4s/^# //p' "$0" >&2; exit 2; }
dest=$(realpath -m "$1")
package=chromium-headless-shell
wanted=("$package" fonts-inter fonts-dejavu-core)

# The machine's own sources, but an empty list of installed packages, so that the dependencies come complete.
own_apt() {
    local command=$1
    shift
    "$command" -q \
        -o Dir::State::lists="$work/lists" -o Dir::State::status="$work/status" -o Dir::State::extended_states="$work/extended" \
        -o Dir::Cache="$work/cache" -o Dir::Cache::archives="$work/cache/archives" -o APT::Sandbox::User=root \
        -o Acquire::Languages=none -o Acquire::Retries=2 -o Acquire::http::Timeout=30 -o APT::Install-Recommends=false "$@"
}

# What the system has in any case, or a test never opens.
spared() {
    case $1 in
        libc6_* | libc-bin_* | libstdc++6_* | libgcc-s1_* | gcc-*-base_* | dpkg_* | tar_* | perl*_* | debconf_* | xkb-data_* | adduser_* | passwd_*) return 0 ;;
        *) return 1 ;;
    esac
}

if "$dest/bin/chromium" --version >/dev/null 2>&1; then
    say "$dest/bin/chromium is there"
    exit
fi
for tool in apt-get dpkg-deb; do
    command -v "$tool" >/dev/null || die "$tool not found: this script needs Debian; elsewhere set REWAKE_CHROMIUM to a Chromium"
done
open_work "$dest"
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/tree"
: >"$work/status"
own_apt apt-get update >"$work/update.log" 2>&1 || die "apt-get update failed: $(grep -m 1 -E '^[EW]:' "$work/update.log")"
version=$(own_apt apt-cache policy "$package" | sed -n 's/^ *Candidate: \([^(].*\)/\1/p')
[ -n "$version" ] || die "this machine's apt has no $package (Ubuntu has none): set REWAKE_CHROMIUM to a Chromium or Chrome"
say "downloading $package $version, its libraries and two fonts (about 150 MB)"
own_apt apt-get install --yes --download-only "${wanted[@]}" >"$work/download.log" 2>&1 ||
    die "download failed: $(grep -m 3 '^E' "$work/download.log"). Run this script again; nothing was installed."
for deb in "$work"/cache/archives/*.deb; do
    spared "${deb##*/}" && continue
    dpkg-deb -x "$deb" "$work/tree" || die "cannot unpack ${deb##*/}: is the disk full? (df -h $dest)"
done
rm -rf "$work"/tree/usr/share/{doc,man,locale,icons,mime}
tree=$dest/chromium-${version//[^A-Za-z0-9.+-]/_}
cat >"$work/tree/fonts.conf" <<CONF
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig>
  <dir>$tree/usr/share/fonts</dir>
  <cachedir prefix="xdg">fontconfig</cachedir>
  <alias binding="strong"><family>system-ui</family><prefer><family>Inter</family></prefer></alias>
  <alias binding="strong"><family>sans-serif</family><prefer><family>Inter</family></prefer></alias>
  <alias binding="strong"><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
</fontconfig>
CONF
rm -rf "$tree"
mv -T "$work/tree" "$tree"
program=$(find "$tree/usr/lib" -name "$package" -type f -perm -u+x -print -quit)
[ -n "$program" ] || program=$(find "$tree/usr" -name 'headless_shell' -type f -print -quit)
[ -n "$program" ] || die "$tree has no $package; remove it and run again"
search=$(find "$tree" -name 'lib*.so*' -printf '%h\n' | sort -u | paste -sd :)
mkdir -p "$dest/bin"
cat >"$work/wrapper" <<WRAPPER
#!/bin/sh
export LD_LIBRARY_PATH='$search' FONTCONFIG_FILE='$tree/fonts.conf'
exec '$program' "\$@"
WRAPPER
chmod 755 "$work/wrapper"
mv -T "$work/wrapper" "$dest/bin/chromium"
"$dest/bin/chromium" --version >"$work/version" 2>&1 || die "it does not run: $(head -n 3 "$work/version")"
say "$(cat "$work/version") is in $dest"
