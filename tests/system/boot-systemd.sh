#!/bin/bash
# boot-systemd.sh WORK UNITS
#
# Boots the systemd of this machine as process 1 of namespaces of its own, over a throw-away overlay of the root file
# system, with the units of the folder UNITS and nothing else. For tests of a unit file as it will really run: start,
# reload, watchdog, restart, sandbox, credentials. Needs root. Writes under WORK only; the network is shared, so that a
# server on 127.0.0.1 outside is reached from inside.
#
# The number of the booted process 1, as seen from outside, is written to WORK/pid. A command inside:
#   nsenter -t "$(cat WORK/pid)" --mount --uts --ipc --pid --cgroup --root --wd=/ env -i PATH=/usr/bin:/bin systemctl ..
# Ends with `systemctl poweroff --force` inside, or when this script is killed.
set -euo pipefail

TARGET=machine.target

# Outside: a control group to be the root of the new one, then the namespaces.
outside() {
  local work units group
  work=$(realpath -m "$1")
  units=$(realpath "$2")
  [ "$(id -u)" = 0 ] || { echo "boot-systemd.sh: needs root" >&2; exit 1; }
  [ -x /lib/systemd/systemd ] || { echo "boot-systemd.sh: no /lib/systemd/systemd; apt-get install systemd dbus" >&2; exit 1; }
  mkdir -p "$work"
  rm -f "$work/pid"
  group=$(unified_hierarchy)
  # what earlier runs left behind is empty, and only that is removed
  rmdir "$group"/boot-* 2> /dev/null || true
  group=$group/boot-$$
  mkdir "$group"
  echo $$ > "$group/cgroup.procs"
  exec unshare --mount --propagation private --uts --ipc --cgroup --pid --fork --kill-child \
    "$BASH" "$0" --inside "$work" "$units"
}

# Where version 2 of control groups is mounted: alone, or beside version 1.
unified_hierarchy() {
  local at
  for at in /sys/fs/cgroup /sys/fs/cgroup/unified; do
    [ -e "$at/cgroup.procs" ] && [ "$(stat -f -c %T "$at")" = cgroup2fs ] && { echo "$at"; return; }
  done
  echo "boot-systemd.sh: no control groups of version 2 are mounted" >&2
  exit 1
}

# Inside: process 1 already, but with the mounts of the outside.
inside() {
  local work=$1 units=$2 number root
  read -r number _ < /proc/self/stat
  mkdir -p "$work/layer" "$work/root"
  mount -t tmpfs layer "$work/layer"
  mkdir "$work/layer/upper" "$work/layer/work"
  root=$work/root
  mount -t overlay root -o "lowerdir=/,upperdir=$work/layer/upper,workdir=$work/layer/work" "$root"
  system_mounts "$root"
  mkdir -p "$root/run/systemd/system"
  cp -r "$units/." "$root/run/systemd/system/"
  cat > "$root/run/systemd/system/$TARGET" <<'UNIT'
[Unit]
Description=What a test of one service needs
Requires=basic.target systemd-journald.service dbus.service
After=basic.target systemd-journald.service dbus.service
UNIT
  hostname machine
  echo "$number" > "$work/pid.new"
  mv "$work/pid.new" "$work/pid"
  cd "$root"
  mkdir -p .outside
  pivot_root . .outside
  umount --lazy /.outside
  rmdir /.outside
  # a service with PrivateMounts= makes itself a slave of this
  mount --make-rshared /
  exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --system --unit="$TARGET" --log-target=console --show-status=no
}

system_mounts() {
  local root=$1 node
  mount -t proc proc "$root/proc"
  # limits of the kernel are the outside's: to be read, not to be set
  mount --bind "$root/proc/sys" "$root/proc/sys"
  mount -o remount,bind,ro "$root/proc/sys"
  mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"
  mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
  mount -t tmpfs -o mode=0755 dev "$root/dev"
  for node in null zero full random urandom tty; do
    : > "$root/dev/$node"
    mount --bind "/dev/$node" "$root/dev/$node"
  done
  mkdir "$root/dev/pts" "$root/dev/shm"
  mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
  mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
  ln -s pts/ptmx "$root/dev/ptmx"
  ln -s /proc/self/fd "$root/dev/fd"
  ln -s fd/0 "$root/dev/stdin"
  ln -s fd/1 "$root/dev/stdout"
  ln -s fd/2 "$root/dev/stderr"
  mount -t tmpfs -o mode=0755 run "$root/run"
  mount -t tmpfs -o mode=1777 tmp "$root/tmp"
}

case ${1-} in
  --inside) inside "$2" "$3" ;;
  *) [ $# -eq 2 ] || { sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2; }; outside "$1" "$2" ;;
esac
