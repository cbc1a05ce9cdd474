from ringfence.backends import auto
auto._is_doubtful = lambda: True
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as seen:
    box = Sandbox()
    box._launcher.preflight()
    weaker = box.plan().enforcement.weaker
    say(len(seen), "memory" in weaker)
    here = sys._getframe().f_lineno + 1
    ringfence.run("1")
    say([(w.category.__name__, w.filename, w.lineno - here) for w in seen])
    ringfence.run("1")
    say(len(seen))
