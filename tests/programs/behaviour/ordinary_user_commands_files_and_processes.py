with Sandbox() as box:
    box.files.write("d/f", "text", mode=0o700)
    say([(i.path, i.kind, i.mode) for i in box.files.list(recursive=True)], box.files.read_text("d/f"))
    say(box.exec(["sh", "-c", "cat d/f; exit 4"]).exit_code, box.exec(["nope"]).exit_code)
    with box.spawn(["sh", "-c", "setsid sleep 600 & echo up; cat"]) as p:
        next(iter(p)); p.write("x"); p.close_stdin()
        say(p.wait().stdout)
    with box.spawn(["sh", "-c", "setsid sleep 4646 & echo up; sleep 600"]) as p: next(iter(p))
    say("4646" in box.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline"]).stdout.split("\0"))
    box.files.remove("d", recursive=True)
    say([i.path for i in box.files.list()], box.state)
say(box.state)
