# Isolates guestd, as PID 1 of new namespaces. HOLDS: a folder with `root`, which becomes /, and with what to mount there:
# the sandbox's own file systems, the files that are mount points in those, and the host's files.
# OWNER: the host's user that guests are, where this is root; empty for an ordinary user. PYTHON: of the host.
set -eu
"$PYTHON" -I -S -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh", b"lo", 1))' # SIOCSIFFLAGS, IFF_UP: guests have servers
mount -n -a -T "$HOLDS/own"
while read -r file; do
    mkdir -p "${file%/*}"
    : >"$file"
done <"$HOLDS/files"
mount -n -a -T "$HOLDS/shown"
mount -n --rbind "$HOLDS/root" "$HOLDS/root"
cd "$HOLDS/root"
mkdir .host
pivot_root . .host
cd /
umount -n -l /.host
rmdir /.host
# All but the sandbox's own file systems becomes read-only, with what the host has mounted below it. A device that is
# shown read-only can be written to, and its mode cannot be changed. When a step fails, the script ends.
while read -r _ _ _ _ target options _; do
    case $target in
        /proc | /dev/pts | /dev/shm | /tmp | /workspace) continue ;;
        /dev/*) less=nosuid ;;
        *) less=nosuid,nodev ;;
    esac
    mount -n -o "remount,bind,$options,ro,$less" "$(printf %b "$target")"
done </proc/self/mountinfo
unset HOLDS PYTHON file target options less
# A user namespace in which the guest is user 1000 without a capability. The limit of processes counts in it alone.
# guestd is killed when `unshare` is, and gets no signal that this process ignores.
set -- unshare --user --map-user=1000 --map-group=1000 --keep-caps \
    setpriv --bounding-set=-all --inh-caps=-all --ambient-caps=-all --no-new-privs --pdeathsig=KILL \
    env --default-signal "$@"
if [ -n "$OWNER" ]; then
    set -- setpriv --reuid="$OWNER" --regid="$OWNER" --clear-groups "$@"
fi
unset OWNER
exec "$@"
