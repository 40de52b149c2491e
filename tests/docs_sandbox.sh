#!/usr/bin/env bash
# Runs commands of the documents on a machine that is theirs alone: the host's files under a layer that takes all changes, a network
# without a way out, processes that end with it. Usage: docs_sandbox.sh ROOT FOLDER SCRIPT, as root; run by tests/test_docs.py.
#
# Inside, Rewake is where deploy/install/host.sh puts it, an engine and a model where the documents have theirs, and SCRIPT runs in
# a copy of the checkout.
set -euo pipefail
root=$1 folder=$2 script=$3

if [ "${4:-}" != inside ]; then
    exec unshare --mount --net --ipc --uts --pid --fork --kill-child=KILL -- "$0" "$root" "$folder" "$script" inside
fi
mount --make-rprivate /
mount -t tmpfs tmpfs "$folder/layer"
mkdir "$folder/layer/"{changes,work,root}
new=$folder/layer/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/layer/changes,workdir=$folder/layer/work" "$new"
# What is mounted elsewhere, and no part of the layer.
for place in /dev /sys; do mount --rbind "$place" "$new$place"; done
mount -t proc proc "$new/proc"
mount -t tmpfs tmpfs "$new/run"
mount -t tmpfs -o mode=1777 tmpfs "$new/tmp"
mkdir -p "$new/var/lib/rewake" "$new/tmp/docs" "$new/tmp/checkout"
mount --bind "$folder/state" "$new/var/lib/rewake"
mount --bind "$folder/out" "$new/tmp/docs"
rm -rf "$new/etc/rewake" "$new/opt/rewake"
mkdir -p "$new/etc/rewake" "$new/opt/rewake/bin" "$new/opt/rewake/venv/bin" "$new/srv/models" "$new/usr/local/bin"
# `rewake up` starts as it always does; the other commands are forks of one process, see docs_forks.py.
cat >"$new/opt/rewake/venv/bin/rewake" <<END
#!/bin/sh
[ "\$1" != up ] || exec '$REWAKE_PYTHON' '$root/rewake.py' "\$@"
exec '$REWAKE_PYTHON' -I -S '$root/tests/docs_forks.py' /run/forks "\$@"
END
chmod 755 "$new/opt/rewake/venv/bin/rewake"
ln -sfn "$REWAKE_CRIU" "$new/opt/rewake/bin/criu"
ln -sfn /opt/rewake/venv/bin/rewake "$new/usr/local/bin/rewake"
rm -f "$new/usr/local/bin/llama-server"
printf '#!/bin/sh\nexec %q "$@"\n' "$REWAKE_LLAMA_SERVER" >"$new/usr/local/bin/llama-server"
chmod 755 "$new/usr/local/bin/llama-server"
cp "$REWAKE_MODEL" "$new/srv/models/my-model.gguf"
mount --bind "$root" "$new/tmp/checkout"
mkdir "$new/.old"
cd "$new"
pivot_root . .old
umount -l /.old
rmdir /.old
ip link set lo up
cd /tmp/checkout
export PATH=/usr/local/bin:/opt/rewake/venv/bin:$PATH HOME=/root
"$REWAKE_PYTHON" tests/docs_forks.py serve /run/forks </dev/null &
for _ in $(seq 600); do [ ! -e /run/forks ] || break; sleep 0.1; done
exec bash "$script"
