# shellcheck shell=bash
# Shared logic for taking one tool from Debian sid without upgrading the system.
#
# Usage: sourced by criu.sh and llama-server.sh, never run by itself. They call
#     take_tool DEST PACKAGE BINARY MINIMUM
# and then  write_wrapper DEST BINARY [NAME=VALUE...]
#
# The tool's packages and every library they need, the C library included, are
# unpacked into DEST/PACKAGE-VERSION and run through that folder's own dynamic
# loader, so nothing here depends on, or changes, what the system has installed.
# A tree is never changed once it is there: processes that were snapshotted map
# its files, and a newer version goes beside it.
#
# The Debian mirror is the one this machine's apt already uses; where it has
# none, REWAKE_DEBIAN_MIRROR names one. Its signatures are checked by apt.

exec 3>&2 # a trap may run while a function's stderr goes to a file
say() { printf '%s: %s\n' "${0##*/}" "$*" >&3; }
die() { say "error: $*"; exit 1; }

# version_at_least HAVE WANT
version_at_least() {
    [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]
}

# One temporary folder inside DEST (the same file system, so renames are
# atomic), removed however the script ends.
open_work() {
    mkdir -p "$1" || die "cannot create $1; choose a folder you may write to"
    work=$(mktemp -d "$1/.install-XXXXXX") || die "cannot write to $1"
    trap 'rm -rf "$work"' EXIT
    trap 'say "interrupted; nothing was installed"; exit 130' INT TERM HUP
}

# Every archive that may carry sid, most likely first. `--print-uris` reads both
# .list and .sources files and needs no downloaded index.
debian_mirrors() {
    if [ -n "${REWAKE_DEBIAN_MIRROR:-}" ]; then
        printf '%s\n' "${REWAKE_DEBIAN_MIRROR%/}"
        return
    fi
    local uri
    apt-get update --print-uris 2>/dev/null |
        sed -n "s|^'\(.*\)/dists/[^']*/InRelease'.*|\1|p" | awk '!seen[$0]++' |
        while read -r uri; do
            case $uri in
                cdrom:* | *security*) ;;
                *debian*) printf '%s\n' "$uri" ;;
            esac
            # A dated snapshot may be older than the tool: the same host's
            # living archive comes next.
            [[ $uri =~ ^(.*//[^/]+)/.*[0-9]{8}T[0-9]{6}Z$ ]] &&
                printf '%s/debian\n' "${BASH_REMATCH[1]}"
        done || true
}

# apt with a configuration of its own: one source, an empty list of installed
# packages (so that a package's dependencies come complete), its own caches.
private_apt() {
    local command=$1
    shift
    "$command" -q \
        -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null \
        -o Dir::State::lists="$work/lists" -o Dir::State::status="$work/status" \
        -o Dir::State::extended_states="$work/extended" \
        -o Dir::Cache="$work/cache" -o Dir::Cache::archives="$work/cache/archives" \
        -o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::Retries=2 \
        -o APT::Install-Recommends=false -o Acquire::http::Timeout=30 "$@"
}

candidate() {
    private_apt apt-cache policy "$1" | sed -n 's/^ *Candidate: \([^(].*\)/\1/p'
}

# Sets `version` to what the first good mirror has of PACKAGE.
find_package() {
    local package=$1 minimum=$2 mirror mirrors keyring signed='' tried=''
    for keyring in /usr/share/keyrings/debian-archive-keyring.{pgp,gpg}; do
        [ -e "$keyring" ] && signed="[signed-by=$keyring] "
    done
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
    : >"$work/status"
    mirrors=$(debian_mirrors)
    for mirror in $mirrors; do
        say "looking for $package >= $minimum at $mirror (sid)"
        printf 'deb %s%s sid main\n' "$signed" "$mirror" >"$work/sources.list"
        private_apt apt-get update >"$work/update.log" 2>&1 || true
        version=$(candidate "$package")
        if [ -n "$version" ] && version_at_least "${version#*:}" "$minimum"; then
            return
        fi
        tried+="
    $mirror: ${version:-$(grep -m 1 -E '^[EW]:' "$work/update.log" || echo "no package $package")}"
    done
    die "no Debian archive with $package >= $minimum.
  Tried:${tried:-
    nothing: the apt configuration of this machine names no Debian archive}
  To mend: REWAKE_DEBIAN_MIRROR=URI $0 ... with the URI of a Debian mirror (the
  folder that holds dists/ and pool/); on Ubuntu also: apt-get install
  debian-archive-keyring. Or put a $package >= $minimum on PATH yourself."
}

# The bulk of what a dependency list drags in and a private tree never opens.
unneeded() {
    case $1 in
        *-base_* | debconf_* | wget_* | libc-gconv-* | openssl-provider-*) return 0 ;;
        *) return 1 ;;
    esac
}

# take_tool DEST PACKAGE BINARY MINIMUM: sets `tree`, and `loader`, the command
# that runs BINARY from it.
take_tool() {
    local dest=$1 package=$2 binary=$3 minimum=$4 deb
    for deb in apt-get dpkg-deb; do
        command -v $deb >/dev/null ||
            die "$deb not found: this script needs Debian or Ubuntu; elsewhere put $binary >= $minimum on PATH"
    done
    find_package "$package" "$minimum"
    tree=$dest/$package-${version//[^A-Za-z0-9.+-]/_}
    if [ ! -d "$tree" ]; then
        say "downloading $package $version and its libraries"
        private_apt apt-get install --yes --download-only "$package" >"$work/download.log" 2>&1 ||
            die "download of $package failed: $(grep -m 3 '^E' "$work/download.log"). Run this script again; nothing was installed."
        mkdir "$work/tree"
        for deb in "$work"/cache/archives/*.deb; do
            unneeded "${deb##*/}" && continue
            dpkg-deb -x "$deb" "$work/tree" ||
                die "cannot unpack ${deb##*/}: is the disk full? (df -h $dest)"
        done
        rm -rf "$work"/tree/usr/share/{doc,gdb,locale,man}
        mv -T "$work/tree" "$tree"
    fi
    loader_of "$tree" "$binary"
}

# No library of the host may slip in: without the cache, one that is missing
# from the tree is an error now, and not a surprise after the next upgrade.
loader_of() {
    local tree=$1 binary=$2 ld program path folders
    case $tree in
        *[:\']*) die "$tree: a colon or a quote in the path cannot work; choose another DEST" ;;
    esac
    ld=$(find "$tree" -name 'ld-linux*.so.*' -type f -print -quit)
    program=$(find "$tree" -path "*bin/$binary" -print -quit)
    [ -n "$ld" ] && [ -n "$program" ] || die "$tree is incomplete; remove it and run again"
    mapfile -t folders < <(find "$tree" -name 'lib*.so*' -printf '%h\n' | sort -u)
    path=$(IFS=: && printf '%s' "${folders[*]}")
    loader="'$ld' --inhibit-cache --library-path '$path' '$program'"
}

# write_wrapper DEST BINARY [NAME=VALUE...]: the wrapper replaces itself by the
# tool, so that one command is one process.
write_wrapper() {
    local dest=$1 binary=$2 setting
    shift 2
    mkdir -p "$dest/bin"
    {
        printf '#!/bin/sh\n'
        for setting in "$@"; do
            printf "export %s='%s'\n" "${setting%%=*}" "${setting#*=}"
        done
        printf 'exec %s "$@"\n' "$loader"
    } >"$work/wrapper"
    chmod 755 "$work/wrapper"
    mv -T "$work/wrapper" "$dest/bin/$binary"
}
