import os, shutil, tempfile
home = tempfile.mkdtemp(dir=os.path.expanduser("~"))
os.mkdir(home + "/real")
os.symlink("real", home + "/.local")
os.environ["HOME"] = home
from ringfence import Sandbox
from ringfence.cli.launch import load_snapshot, save_snapshot
with Sandbox() as box:
    box.files.write("f", "kept")
    print(save_snapshot(box, "mine"), load_snapshot("mine").size_bytes)
shutil.rmtree(home)
