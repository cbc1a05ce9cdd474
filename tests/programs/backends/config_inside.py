import os, socket
status = dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\t" in line)
print(status["CapEff"], status["CapBnd"], status["NoNewPrivs"], status["Seccomp"])
print(os.getuid() >= 1000, os.getpid() > 1, sorted(name for _, name in socket.if_nameindex()))
print(sorted(set(os.listdir("/dev")) - {"core", "console", "mqueue"}))
for path in ("/etc/passwd", "/usr/x", "/.ringfence/x", "/proc/sys/kernel/hostname", "/sys/x"):
    try:
        open(path, "a")
        print("written", path)
    except OSError:  # a file that cannot be read is no finding
        pass
import pwd
print(pwd.getpwuid(os.getuid()).pw_name, os.stat("/workspace").st_uid == os.getuid())
