import os, random, stat
chance = random.Random(seed)
def some(kind):
    found = [os.path.join(t, n) for t, ds, fs in os.walk(".") for n in ds + fs]
    return [p for p in found if kind(os.lstat(p).st_mode)]
def name():
    return os.path.join(chance.choice([".", *some(stat.S_ISDIR)]), f"n{chance.randrange(30)}")
def change():
    what, new = chance.randrange(11), name()
    files, folders, all = some(stat.S_ISREG), some(stat.S_ISDIR), some(lambda mode: True)
    if what < 3: open(new, "w").write(str(chance.random()))
    elif what == 3: os.mkdir(new)
    elif what == 4: os.symlink("x" * chance.randrange(1, 9), new)
    elif what == 5: os.link(chance.choice(files), new)
    elif what == 6: os.rename(chance.choice(all), new)
    elif what == 7: os.remove(chance.choice(files))
    elif what == 8: os.rmdir(chance.choice(folders))
    elif what == 9: os.chmod(chance.choice(files + folders), chance.choice((0o700, 0o755, 0o500, 0)))
    else:
        path = chance.choice(files); info = os.stat(path)
        open(path, "r+").write(chance.choice("xyz")); os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
for _ in range(count):
    try: change()
    except (OSError, IndexError): pass  # a change that another one made impossible
