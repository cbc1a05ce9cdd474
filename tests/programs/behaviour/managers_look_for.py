import os, sys
marker, found = sys.argv[1].encode()[::-1], []
for top in ("/workspace", "/tmp", "/dev/shm", "/run", "/var", "/home", "/root", "/mnt", *sys.argv[2:]):
    for folder, folders, files in os.walk(top):
        folders[:] = [f for f in folders if os.lstat(os.path.join(folder, f)).st_dev == os.stat(top).st_dev]
        for name in files:
            try:
                with open(os.path.join(folder, name), "rb") as file:
                    if marker in file.read(1 << 20): found.append(os.path.join(folder, name))
            except OSError: pass  # it ended meanwhile, or is not ours to read
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("cmdline", "environ"):
        try: text = open(f"/proc/{pid}/{name}", "rb").read()
        except OSError: continue
        if marker in text: found.append(pid)
print(found)
