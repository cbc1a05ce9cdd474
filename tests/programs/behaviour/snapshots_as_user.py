import os, warnings
warnings.simplefilter("ignore")
from ringfence import Sandbox, Snapshot
with Sandbox() as box:
    box.run("import os\nfor n in range(300): open(f'f{n}', 'w').write('x' * n)\nos.mkdir('d'); os.chmod('d', 0)")
    before = box.snapshot()
    box.files.write("f3", "other")
    print([change.path for change in before.diff(box.snapshot())])
    box.rollback(before)
    before.export("kept.snapshot")
    with Sandbox(snapshot=Snapshot.load("kept.snapshot")) as other, box.fork(memory=False) as twin:
        print({one.snapshot().digest == before.digest for one in (box, other, twin)})
    os.remove("kept.snapshot")
    print(os.listdir(os.path.expanduser("~/.local/state/ringfence/snapshots")))
