import sys
sys.path.insert(0, sys.argv[1])
import ringfence
ringfence.run, ringfence.Sandbox, ringfence.Policy
assert ringfence.run("1").value == "1"
with ringfence.Sandbox() as box:
    box.files.write("f", "x")
    assert [i.path for i in box.files.list()] == ["f"]
    assert box.exec(["cat", "f"]).stdout == "x"
    with box.spawn(["true"]) as p: list(p)
print(sorted(m for m in sys.modules if m.partition(".")[0] in ("asyncio", "concurrent", "ssl", "subprocess")))
