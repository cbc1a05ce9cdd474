secret = os.path.expanduser("~/secret")
open(secret, "w").write("s")
look = '''
import os
seen = []
for p in ({0!r}, "/root", {1!r}, "/etc/shadow", "/var/log", "/run", "/sys/fs/cgroup"):
    try: seen.append(bool(os.listdir(p) if os.path.isdir(p) else open(p).read()))
    except OSError: seen.append(False)
(seen, len([p for p in os.listdir("/proc") if p.isdigit()]) < 5)
'''.format(secret, source)
say(ringfence.run(look).value)
os.remove(secret)
