started = []
spawn.start = lambda *args: started.append(args)
for wrong in (dict(code=7), dict(code="1", policy=7), dict(code="1", timeout_s=-1), dict(code="1", language="cobol"),
              dict(code="1", backend="none"), dict(code="1", image="none"),
              dict(code="1", policy=Policy(mounts=[Mount("/no/such/folder")]))):
    try:
        ringfence.run(**wrong)
    except (TypeError, ValueError, ringfence.RingfenceError):
        continue
    print("not refused:", wrong)
print(started, children())
