from ringfence import choosing
choosing._is_doubtful = lambda: True
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as seen:
    weaker = Sandbox().plan().enforcement.weaker
    say(len(seen), "memory" in weaker)
    here = sys._getframe().f_lineno + 1
    ringfence.run("1")
    say([(w.category.__name__, w.filename, w.lineno - here) for w in seen])
    ringfence.run("1")
    say(len(seen))
