with Sandbox(policy=Policy(limits=Limits(disk="1M")), workspace="disk") as box:
    say("disk" in box.enforcement.weaker, box.enforcement.disk.note)
    box.files.write("d/f", "x" * 5000)
    names = [(i.path, i.kind) for i in box.files.list(recursive=True)]
    say(names, box.exec(["stat", "-c", "%u %a", ".", "d/f"]).stdout)
    usage = box.files.usage()
    say(usage.bytes >= 5000, usage.bytes_limit, usage.files, usage.files_limit)
    (name,) = os.listdir(PLACE)
    modes = [oct(os.stat(path).st_mode) for path in (PLACE, f"{PLACE}/{name}")]
    say(open(f"{PLACE}/{name}/d/f").read() == "x" * 5000, *modes)
    say(box.run("try: open('big', 'wb').write(bytes(3 << 20))\nexcept OSError as e: r = e.strerror\nr").value)
    try: box.files.write("more", bytes(3 << 20))
    except OSError as e: say(e.strerror)
    box.files.remove("big"); kept = box.snapshot(); box.files.remove("d", recursive=True); box.rollback(kept)
    with box.fork(memory=False) as twin: say(twin.files.read_text("d/f") == "x" * 5000, len(os.listdir(PLACE)))
    box.run("import os\nos.mkdir('deep'); os.chdir('deep')\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')")
    box.exec(["sh", "-c", "ln -s / out; mkdir shut; touch shut/in; chmod 0 shut"]).check()
say(os.listdir(PLACE), os.path.isdir("/usr"))
