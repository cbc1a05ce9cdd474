import json, os, random, sys, threading, time, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import leftovers, ringfence
from ringfence import RingfenceError, Sandbox
end, told, walls, kills = time.monotonic() + 6, {}, set(), []
def note(error):
    ours = isinstance(error, ringfence.SandboxError)
    told[f"{type(error).__name__} {error.code if isinstance(error, RingfenceError) else ''}"] = (
        [ours, bool(getattr(error, "fix", None)), "limits.memory" in str(error), str(error)])
def use(box):
    walls.update((box.exec(["true"]).backend, box.run("1").backend))
    box.files.write("x", b"1")
def work(one):
    while time.monotonic() < end:
        try: one()
        except Exception as error: note(error)  # the test reads what was noted
def in_a_sandbox():
    with Sandbox() as box:
        for _ in range(3): use(box)
def fire():
    rolls = random.Random(16)
    while time.monotonic() < end:
        time.sleep(rolls.random() * 0.15)
        found = [one for one in leftovers.descendants() if one.name.startswith("rf-")]
        if found:
            kind = rolls.choice(sorted({one.name for one in found}))
            try:
                os.kill(rolls.choice([one.pid for one in found if one.name == kind]), 9)
                kills.append(kind)
            except ProcessLookupError: pass  # it ended by itself
threads = [threading.Thread(target=work, args=(one,)) for one in
    (in_a_sandbox, lambda: walls.add(ringfence.run("1").backend))]
threads.append(threading.Thread(target=fire))
for one in threads: one.start()
for one in threads: one.join()
print(json.dumps([told, sorted(walls), len(kills), ringfence.run("6 * 7").value]))
