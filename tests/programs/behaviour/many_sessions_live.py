import ringfence
box = ringfence.Sandbox().start()
box.run("import subprocess; p = subprocess.Popen(['sleep', '600'])").check()
box.run("const c = require('child_process').spawn('sleep', ['600']); 1", language="javascript").check()
box.run("sleep 600 & x=1", language="bash").check()
cells = [box.session(language=l).spawn(c) for l, c in
         (("python", "import time; time.sleep(600)"), ("javascript", "while (true) {}"), ("bash", "sleep 600"))]
terminal = box.pty(["sh", "-c", "trap '' HUP; echo up; sleep 600 & sleep 600"])
next(iter(terminal))
print("go")
terminal.wait()
