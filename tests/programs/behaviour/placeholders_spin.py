import os, sys, time
os.chdir(sys.argv[1])
print("spins", flush=True)
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    for name in (".envrc", ".bashrc", ".mcp.json"):
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError:
            continue
        os.write(fd, b"of the guest")
        os.close(fd)
    try:
        os.mkdir(".claude")
        open(".claude/settings.json", "w").write("of the guest")
    except OSError:  # the file is protected just now
        pass
