import os, hashlib
os.chmod("shut", 0o700)
found = []
for top, ds, fs in os.walk("."):
    for n in sorted(ds + fs):
        p = os.path.join(top, n); i = os.lstat(p)
        os.chmod(p, 0o700) if p == "./d/none" else None
        file = os.path.isfile(p) and not os.path.islink(p)
        text = os.readlink(p) if os.path.islink(p) else hashlib.sha256(open(p, "rb").read()).hexdigest() if file else ""
        found.append((p, oct(i.st_mode), file and i.st_nlink, i.st_mtime_ns, i.st_size, i.st_blocks, text))
sorted(f for f in found if f[0] != "./shut"), os.stat("d/hard").st_ino == os.stat("a.txt").st_ino
