#!/usr/bin/env bash
# Installs Rewake on a host: Debian 12 or 13, Ubuntu 22.04 or 24.04, or what descends from them. As root.
#
# Usage: host.sh [install|uninstall] [--prefix DIR] [--gpu] [--criu FILE] [--compiler | --interpreted] [--dry-run] [--restart] [--purge]
#
#   install     the default; over an older version it is the upgrade. What is there already is left as it is: settings, snapshots,
#               CRIU. Nothing that runs is touched, unless --restart is given; it says what still runs the old version.
#   uninstall   stops the services, removes programs and units; settings and snapshots stay, unless --purge is given.
#
#   --prefix DIR   where programs go: /opt/rewake
#   --gpu          also what speaks to NVIDIA's driver
#   --criu FILE    take this CRIU (4.2 or newer) instead of installing one
#   --compiler     install a C compiler and Python's headers too, where they are missing. Where they are, the gateway's data path is
#                  compiled: a request costs half as much there. It takes minutes
#   --interpreted  do not compile it
#   --dry-run      say what would be done, and do nothing
#   --restart      after an upgrade, restart what runs: replicas stop, and come back from their snapshots when they are asked for
#   --purge        uninstall: remove /etc/rewake, /var/lib/rewake and the account too
#   PYTHON=FILE    in the environment: the Python to use, 3.11 or newer
#
# Programs lie in PREFIX/releases/ID, one folder for each version and Python; PREFIX/venv leads to the one in use, so an upgrade
# is one rename, and going back is another. Nothing of the system is upgraded: only packages that are missing are installed.
set -euo pipefail

source=$(cd "$(dirname "$(readlink -f "$0")")/../.." && pwd)
action=install prefix=/opt/rewake extras='' criu='' form='' dry='' restart='' purge=''
config=/etc/rewake state=/var/lib/rewake units=/etc/systemd/system account=rewake
services=(rewake.service rewake-gateway.service rewake-gateway.socket rewake-restorer.service)
minimum_python=3.11

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() { say "error: $*"; exit 1; }
usage() { sed -n '/^# Usage/,/^#   PYTHON/s/^# \{0,1\}//p' "$0" >&2; exit 2; }

# Everything that changes the system goes through here.
run() {
    if [ -n "$dry" ]; then
        printf 'would run:' && printf ' %q' "$@" && printf '\n'
    else
        "$@"
    fi
}

arguments() {
    while [ $# -gt 0 ]; do
        case $1 in
            install | uninstall) action=$1 ;;
            --prefix | --criu)
                [ $# -gt 1 ] || { say "error: $1 wants a value"; usage; }
                case $1 in --prefix) prefix=$(realpath -m "$2") ;; --criu) criu=$(realpath -m "$2") ;; esac
                shift ;;
            --gpu) extras='[gpu]' ;;
            --compiler) form=compiled ;;
            --interpreted) form=interpreted ;;
            --dry-run) dry=1 ;;
            --restart) restart=1 ;;
            --purge) purge=1 ;;
            -h | --help) usage ;;
            *) say "error: what is '$1'?"; usage ;;
        esac
        shift
    done
    case $prefix in
        / | /usr | /usr/local | /opt | "$config" | "$state") die "--prefix $prefix: choose a folder that is Rewake's alone" ;;
        *[[:space:]:\']*) die "--prefix $prefix: no spaces, colons or quotes" ;;
    esac
}

check_host() {
    [ "$(id -u)" -eq 0 ] || [ -n "$dry" ] || die "must be run as root: sudo $0 $action"
    [ "$(uname -sm)" = "Linux x86_64" ] || die "this is $(uname -sm); Rewake's snapshots need Linux on x86_64"
    local family
    # shellcheck source=/dev/null
    family=$(. /etc/os-release 2>/dev/null && printf '%s %s' "${ID:-}" "${ID_LIKE:-}") || true
    case " $family " in
        *' debian '* | *' ubuntu '*) ;;
        *) die "this system (${family:-no /etc/os-release}) is neither Debian nor Ubuntu; there, install from the checkout into a
  virtual environment (pip install .) and put CRIU 4.2 or newer on PATH" ;;
    esac
    command -v apt-get >/dev/null || die "apt-get not found: missing packages cannot be installed"
}

# The first Python that is new enough; nothing if there is none yet. Only where services may look: not in somebody's home.
find_python() {
    local path candidates=(/usr/{bin,local/bin}/python3{,.14,.13,.12,.11})
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for path in "${candidates[@]}"; do
        if "$path" -c "import sys; sys.exit(sys.version_info < (${minimum_python/./, }))" 2>/dev/null; then
            command -v "$path"
            return
        fi
    done
}

# The system's Python is too old on Ubuntu 22.04, whose archive has a newer one beside it.
choose_python() {
    python=$(find_python)
    [ -z "$python" ] || return 0
    local name
    for name in python3.13 python3.12 python3.11; do
        if [ -n "$(apt-cache policy "$name" 2>/dev/null | sed -n 's/^ *Candidate: \([^(].*\)/\1/p')" ]; then
            missing+=("$name" "$name-venv")
            python=/usr/bin/$name
            return
        fi
    done
    die "no Python $minimum_python or newer: neither here nor among the packages that apt knows (tried after apt-get update)"
}

packages() {
    missing=()
    local pair
    for pair in ip:iproute2 unshare:util-linux nsenter:util-linux setpriv:util-linux mount:mount groupadd:passwd; do
        command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
    done
    [ -e /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
    # CRIU comes from Debian's archive, on Ubuntu too, so its signature is checked with Debian's keys.
    [ -n "$criu" ] || compgen -G '/usr/share/keyrings/debian-archive-keyring.*' >/dev/null || missing+=(debian-archive-keyring)
    python=$(find_python)
    if [ -z "$python" ]; then
        run apt-get -qq update
        choose_python
    elif ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        missing+=("python$("$python" -c 'import sys; print(f"{sys.version_info[0]}.{sys.version_info[1]}")')-venv")
    fi
    if [ "$form" = compiled ] && ! can_compile; then
        missing+=(gcc "python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo "${python##*python}")-dev")
    fi
    [ ${#missing[@]} -gt 0 ] || return 0
    say "installing packages: ${missing[*]}"
    run apt-get -qq update
    run env DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends --no-upgrade -y "${missing[@]}" >/dev/null ||
        die "apt-get could not install ${missing[*]}; install them yourself and run this again"
}

# There is a C compiler, the C library's headers, and those of the Python that is used.
can_compile() {
    local include compiler
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null) || return
    compiler=${CC:-$("$python" -c 'import sysconfig; print((sysconfig.get_config_var("CC") or "cc").split()[0])')}
    echo '#include <Python.h>' | "$compiler" -fsyntax-only -I"$include" -x c - 2>/dev/null
}

# The sources without what is built in the checkout: pip writes into the folder that it installs from.
copy_source() {
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    mkdir "$work/source"
    tar -C "$source" --exclude-vcs --exclude='./build' --exclude='./.venv' --exclude='./tests' --exclude='./docs' \
        --exclude='*.egg-info' --exclude='__pycache__' --exclude='./.*_cache' -cf - . | tar -C "$work/source" -xf -
    local version interpreter
    version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$source/pyproject.toml")
    interpreter=$([ -x "$python" ] && "$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' || echo "${python##*/python}")
    [ -n "$form" ] || form=$(can_compile && echo compiled || echo interpreted)
    id=$version-$(cd "$work/source" && { find . -type f -print0 | sort -z | xargs -0 sha256sum; echo "$interpreter$extras $form"; } |
        sha256sum | cut -c1-12)
}

install_release() {
    local release=$prefix/releases/$id now
    now=$(readlink "$prefix/venv" 2>/dev/null || true)
    previous=${now:+$prefix/$now}
    if [ -e "$release/.complete" ]; then
        say "release $id is there"
    else
        say "installing release $id into $release"
        run rm -rf "$release"
        run install -d -m 755 "$prefix" "$prefix/releases"
        run "$python" -m venv "$release"
        run "$release/bin/python" -m pip install --quiet --disable-pip-version-check "$work/source$extras" ||
            die "pip could not install Rewake and its libraries; see above. Nothing that runs was touched: run this again."
        [ "$form" = interpreted ] || compile_release "$release"
        # Programs name the path that stays, so that what they start is the same for every release.
        if [ -z "$dry" ]; then
            grep -lIZ "^#!$release/" "$release"/bin/* | xargs -0 sed -i "1s|^#!$release/|#!$prefix/venv/|"
        fi
        run "$prefix/releases/$id/bin/python" -c 'import gateway.app, restorer.operations.worker, rewake'
        run touch "$release/.complete"
    fi
    [ "$now" = "releases/$id" ] && previous='' && return
    run ln -sfn "releases/$id" "$prefix/.venv.new"
    run mv -T "$prefix/.venv.new" "$prefix/venv"
}

# The release with its data path as native code: built beside it, out of its own libraries, so that nothing of the tools stays.
compile_release() {
    local release=$1 tools=$work/tools
    say "compiling the data path, which takes minutes"
    run "$python" -m venv "$tools"
    if [ -z "$dry" ]; then
        "$release/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$(echo "$tools"/lib/python3*/site-packages)/release.pth"
    fi
    local pip=(-m pip --quiet --disable-pip-version-check)
    if ! {
        run "$tools/bin/python" "${pip[@]}" install "$work/source[compile]" &&
            run env REWAKE_COMPILE=1 "$tools/bin/python" "${pip[@]}" wheel --no-build-isolation --no-deps -w "$work/wheel" "$work/source" &&
            run "$release/bin/python" "${pip[@]}" install --no-deps --force-reinstall --no-index --find-links "$work/wheel" rewake
    }; then
        die "the data path could not be compiled; see above. Nothing that runs was touched. --interpreted installs it as it is."
    fi
}

# Whoever runs it, and the release before for going back, are kept; older ones are not.
remove_old_releases() {
    local folder
    for folder in "$prefix"/releases/*/; do
        folder=${folder%/}
        case $folder in "$prefix/releases/$id" | "$previous" | "$prefix/releases/*") continue ;; esac
        grep -lqs "$folder/" /proc/[0-9]*/maps /proc/[0-9]*/cmdline && continue
        run rm -rf "$folder"
    done
}

install_criu() {
    if [ -n "$criu" ]; then
        [ -x "$criu" ] || die "--criu $criu: no such program"
        run install -d -m 755 "$prefix/bin"
        run ln -sfn "$criu" "$prefix/bin/criu"
    else
        run "$source/deploy/install/criu.sh" "$prefix" || die "CRIU could not be installed; the lines above say why. --criu FILE takes
  one that you have. Without any, Rewake works, but every start is cold."
    fi
}

install_files() {
    if ! getent group "$account" >/dev/null; then run groupadd --system "$account"; fi
    if ! getent passwd "$account" >/dev/null; then
        run useradd --system --gid "$account" --home-dir /nonexistent --no-create-home --shell /usr/sbin/nologin "$account"
    fi
    # The configuration names programs that root runs, and the hashes of keys: root writes it, the gateway reads it.
    run install -d -m 750 -o root -g "$account" "$config"
    run install -d -m 700 -o root -g root "$state"
    run install -m 644 "$source/deploy/examples/rewake.yaml" "$config/rewake.example.yaml"
    if [ -e "$config/rewake.yaml" ]; then
        say "left as it is: $config/rewake.yaml"
    else
        starter >"${work:?}/rewake.yaml"
        run install -m 640 -o root -g "$account" "$work/rewake.yaml" "$config/rewake.yaml"
    fi
    run install -d -m 755 "$units"
    local unit
    for unit in "${services[@]}"; do
        sed "s|/opt/rewake|$prefix|g" "$source/deploy/systemd/$unit" >"$work/$unit"
        cmp -s "$work/$unit" "$units/$unit" || run install -m 644 "$work/$unit" "$units/$unit"
    done
    run ln -sfn "$prefix/venv/bin/rewake" /usr/local/bin/rewake
    booted && run systemctl daemon-reload
    return 0
}

starter() { sed "s|/opt/rewake|$prefix|g" "$source/deploy/examples/starter.yaml"; }
booted() { [ -d /run/systemd/system ] && command -v systemctl >/dev/null; }
active() { booted && systemctl --quiet is-active "$1"; }

report() {
    [ "$form" = compiled ] || say "the data path is interpreted: compiled (--compiler), a request costs half as much there"
    local unit running=()
    for unit in rewake.service rewake-gateway.service rewake-restorer.service; do active "$unit" && running+=("$unit"); done
    if [ ${#running[@]} -gt 0 ] && [ -n "$previous" ]; then
        if [ -n "$restart" ]; then
            run systemctl restart "${running[@]}"
            say "restarted ${running[*]}"
        else
            say "still running the version before: ${running[*]}. To change over: systemctl restart ${running[*]}
  Streams finish first; replicas stop, and come back from their snapshots when they are asked for.
  To go back: ln -sfn ${previous#"$prefix"/} $prefix/venv"
        fi
    elif [ ${#running[@]} -eq 0 ]; then
        say "installed. Next:
  1. name your models in $config/rewake.yaml    ($config/rewake.example.yaml shows every setting)
  2. rewake doctor                              (what works on this host, and how to mend the rest)
  3. systemctl enable --now rewake              (gateway, restorer and store on this host)"
    fi
}

uninstall() {
    local unit running
    if booted; then
        for unit in rewake-gateway.socket rewake-gateway.service rewake-restorer.service rewake.service; do
            if [ -e "$units/$unit" ]; then run systemctl disable --now "$unit"; fi
        done
    elif running=$(grep -las "^$prefix/[vr]e" /proc/[0-9]*/cmdline | tr -dc '0-9\n' | tr '\n' ' ') && [ -n "$running" ]; then
        die "Rewake runs here without systemd (pids $running); stop it first"
    fi
    for unit in "${services[@]}"; do run rm -f "$units/$unit"; done
    if booted; then run systemctl daemon-reload; fi
    [ "$(readlink /usr/local/bin/rewake 2>/dev/null)" != "$prefix/venv/bin/rewake" ] || run rm -f /usr/local/bin/rewake
    run rm -rf "$prefix"
    if [ -n "$purge" ]; then
        run rm -rf "$config" "$state"
        if getent passwd "$account" >/dev/null; then run userdel "$account"; fi
        if getent group "$account" >/dev/null; then run groupdel "$account"; fi
        say "removed, with settings, snapshots and the account"
    else
        say "removed; kept: $config and $state. CRIU went with $prefix: snapshots want the same version again"
    fi
}

arguments "$@"
check_host
if [ "$action" = uninstall ]; then
    uninstall
    exit
fi
packages
copy_source
install_release
install_criu
install_files
remove_old_releases
report
